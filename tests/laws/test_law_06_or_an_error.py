"""Law 6, its second half.

"Each gets its gradient, or the call raises `CapturedTensorError`. Never zero, never
stale, never None."
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from remat import (
    CapturedTensorError,
    SideEffectError,
    chain,
    disabled,
    remat,
    scan,
    schedules,
)
from tests.support import assert_bitwise, assert_close, grads, seeded


def mix(x: Tensor, w: Tensor) -> Tensor:
    """What every case computes: its derivative in `w` depends on `x` and on `w`."""
    return torch.sin(torch.sin(x * w) * w)


def gradient(fun: Callable[[Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    """The gradient of one call with respect to `w`."""
    output = fun(x)
    return torch.autograd.grad(output, [w], torch.cos(output.detach()))[0]


class Frozen:
    """A property that builds a tensor from numpy, anew at each look."""

    def __init__(self, w: Tensor) -> None:
        self.array = w.detach().numpy()

    @property
    def w(self) -> Tensor:
        return torch.from_numpy(self.array)


def iterator(w: Tensor) -> Callable[[], Tensor]:
    held = itertools.repeat(w)
    return lambda: next(held)


def generator(w: Tensor) -> Callable[[], Tensor]:
    held = (each for each in [w] * 1000)
    return lambda: next(held)


def member_of_a_set(w: Tensor) -> Callable[[], Tensor]:
    held = {w}
    return lambda: next(iter(held))


def weak_reference(w: Tensor) -> Callable[[], Tensor]:
    held = weakref.ref(w)
    return lambda: held()  # type: ignore[return-value]


def cache(w: Tensor) -> Callable[[], Tensor]:
    held = functools.lru_cache(lambda: w)
    return lambda: held()


UNSEEN = [iterator, generator, member_of_a_set]


@pytest.mark.contract
@pytest.mark.parametrize("way", UNSEEN)
def test_a_tensor_that_cannot_be_followed_is_an_error(way: Any) -> None:
    """It says which tensor, where it is used, and what to do."""
    w, x = seeded(3).requires_grad_(), seeded(2, 3, seed=1).requires_grad_()
    get = way(w)

    with pytest.raises(CapturedTensorError, match="argument") as error:
        remat(lambda x: mix(x, get()))(x)

    assert "float64[3]" in str(error.value)
    assert "test_law_06" in str(error.value)


def stepping(get: Callable[[], Tensor]) -> Callable[[Tensor, Tensor], Any]:
    """A step of a scan that mixes what is reached into the carry."""
    return lambda c, x: (mix(c, get()), x)


def assert_refused_in_stacks(
    x: Tensor, get: Callable[[], Tensor], schedule: Any
) -> None:
    """A scan and a chain name the way out: an argument."""
    with pytest.raises(CapturedTensorError, match="argument"):
        scan(stepping(get), x, x.expand(4, 2, 3), schedule=schedule)
    with pytest.raises(CapturedTensorError, match="argument"):
        chain([torch.sin, lambda x: mix(x, get())], schedule=schedule)(x)


@pytest.mark.contract
@pytest.mark.parametrize("way", UNSEEN)
@pytest.mark.parametrize("schedule", [None, schedules.Every(2), schedules.Revolve(1)])
def test_a_stage_that_cannot_be_followed_is_an_error(schedule: Any, way: Any) -> None:
    """In stacks too, by schedule or not."""
    w, x = seeded(3).requires_grad_(), seeded(2, 3, seed=1).requires_grad_()

    assert_refused_in_stacks(x, way(w), schedule)


@pytest.mark.contract
@pytest.mark.parametrize("schedule", [None, schedules.Every(2), schedules.Revolve(1)])
def test_a_stage_that_leaves_a_tensor_elsewhere_is_an_error(schedule: Any) -> None:
    """Its gradient could not come back to the stack."""
    x, kept = seeded(2, 3).requires_grad_(), list[Tensor]()

    def leaving(x: Tensor) -> Tensor:
        kept.append(x.exp())
        return torch.sin(x)

    with pytest.raises(SideEffectError, match="Return"):
        chain([torch.sin, leaving], schedule=schedule)(x)
    assert kept == []


class Behind:
    """A property that hands out what an iterator holds."""

    def __init__(self, w: Tensor) -> None:
        self.held = itertools.repeat(w)

    @property
    def w(self) -> Tensor:
        return next(self.held)


def hidden_property(w: Tensor) -> Callable[[], Tensor]:
    held = Behind(w)
    return lambda: held.w


def hidden_intermediate(w: Tensor) -> Callable[[], Tensor]:
    held = itertools.repeat(w * 1)
    return lambda: next(held)


def used_once(w: Tensor) -> Callable[[], Tensor]:
    held = iter([w])
    return lambda: next(held)


HIDDEN = [
    *(iterator, generator, hidden_property, hidden_intermediate, used_once),
]


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("way", HIDDEN)
def test_what_alone_wants_a_gradient_and_hides_is_an_error(
    engine: Any, way: Any
) -> None:
    """A region that sees nothing to differentiate would hold all, without a word."""
    w, x = seeded(3).requires_grad_(), seeded(2, 3, seed=1)
    get = way(w)

    def fun(x: Tensor) -> dict[str, Any]:
        return {"found": mix(x, get()), "count": 1}

    with pytest.raises(CapturedTensorError, match=r"float64\[3\].* as an argument"):
        remat(fun, engine=engine)(x)


@pytest.mark.contract
@pytest.mark.parametrize("schedule", [None, schedules.Every(2)])
def test_what_hides_from_a_stack_is_an_error(schedule: Any) -> None:
    """In stacks too, by schedule or not."""
    w, x = seeded(3).requires_grad_(), seeded(2, 3, seed=1)
    get = iterator(w)

    assert_refused_in_stacks(x, get, schedule)
    with disabled():
        assert_bitwise(scan(stepping(get), x, x.expand(1, 2, 3))[0], mix(x, w))
        assert_bitwise(chain([lambda x: mix(x, get())])(x), mix(x, w))


@pytest.mark.contract
def test_what_hides_from_a_region_under_a_transform_is_an_error() -> None:
    """Whatever level of reverse mode it is that wants the gradient."""
    w, x = seeded(3), seeded(2, 3, seed=1)

    def loss(w: Tensor) -> Tensor:
        get = iterator(w)
        return remat(lambda x: mix(x, get()))(x).sum()

    grad, vmap = torch.func.grad, torch.func.vmap
    for transformed in (grad(loss), grad(lambda w: grad(loss)(w).sum())):
        with pytest.raises(CapturedTensorError, match="argument"):
            transformed(w)
    for transformed in (vmap(grad(loss)), grad(lambda ws: vmap(loss)(ws).sum())):
        with pytest.raises(CapturedTensorError, match="argument"):
            transformed(torch.stack([w, w]))


class Keeping(torch.autograd.Function):
    """A function that keeps its argument in an attribute of its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.x.cos()


class Late(torch.nn.Module):
    """A module that makes its weight at its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "w"):
            self.w = torch.nn.Parameter(seeded(3))
        return mix(x, self.w)


def own_leaf(x: Tensor) -> Tensor:
    return mix(x, seeded(3).requires_grad_())


def own_gradient(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(mix(x, x).sum(), x, create_graph=True)[0]


def returned_leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def own_module(x: Tensor) -> Tensor:
    return cast(Tensor, Late()(x))


def kept_in_a_context(x: Tensor) -> Tensor:
    return cast(Tensor, Keeping.apply(x.clone().requires_grad_()))


def given_to_a_region(x: Tensor) -> Tensor:
    region = remat(lambda x: mix(x, x), engine="rerun")
    return region(x.clone().requires_grad_())


OWN = [
    *(own_leaf, own_gradient, returned_leaf, own_module, kept_in_a_context),
    given_to_a_region,
]


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("fun", OWN)
def test_a_leaf_that_the_function_makes_hides_nothing(fun: Any, engine: Any) -> None:
    """Nobody outside can ask for its gradient; or it comes out, and the caller can."""
    x = seeded(2, 3, seed=1)
    region: Any = remat(fun, engine=engine)
    found = region(x)

    assert found.requires_grad
    assert_bitwise(found, fun(x))
    late: Any = Late()
    region = remat(late, engine=engine)
    assert_bitwise(region(x), late(x))


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("make", [Tensor.requires_grad_, torch.nn.Parameter])
def test_such_a_leaf_beside_an_argument_hides_nothing(make: Any, engine: Any) -> None:
    """The gradient of the argument is what it is without a region."""
    fun: Any = lambda x: mix(x, make(torch.full((3,), 2.0).double()))  # noqa: E731
    region: Any = remat(fun, engine=engine)
    x, plain = (seeded(2, 3, seed=1).requires_grad_() for _ in range(2))
    fun(plain).sum().backward()

    region(x).sum().backward()

    assert_bitwise(x.grad, plain.grad)


@pytest.mark.contract
def test_what_a_cache_keeps_of_a_forward_is_an_error() -> None:
    """The backward would end in the stand-ins of that run: the gradient was zero."""
    w, x = seeded(3).requires_grad_(), seeded(2, 3, seed=1).requires_grad_()

    @functools.cache
    def doubled() -> Tensor:
        return w * 2

    region: Any = remat(lambda x: mix(x, doubled()), engine="rerun")
    out = region(x)

    with pytest.raises(CapturedTensorError, match=r"float64\[3\] that requires grad"):
        out.sum().backward()


class Adjoint(torch.autograd.Function):
    """Its backward calls the module once more, as that of an adjoint method does."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *weights)
        return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = ctx.module(x)
        wanted = (x, *weights)
        return None, *torch.autograd.grad(out, wanted, gradients, allow_unused=True)


@pytest.mark.contract
def test_a_backward_that_calls_a_module_again() -> None:
    """What it takes for its parameters are those that it has saved; they were zero."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    weights = [*module.parameters()]

    def fun(x: Tensor) -> Tensor:
        return Adjoint.apply(module, x.sin(), *weights).sin()

    x = seeded(2, 3).requires_grad_()
    expected = torch.autograd.grad(fun(x).sum(), [x, *weights])

    region = remat(fun, engine="rerun")
    found = torch.autograd.grad(region(x).sum(), [x, *weights])

    assert_bitwise(found, expected)


@pytest.mark.contract
def test_what_hides_may_where_nothing_is_recorded() -> None:
    """Without gradients there is nothing to lose, nor to recompute."""
    w, x = seeded(3).requires_grad_(), seeded(2, 3, seed=1)
    get = iterator(w)
    region = remat(lambda x: mix(x, get()))

    for switch in (torch.no_grad, torch.inference_mode, disabled):
        with switch():
            assert_bitwise(region(x), mix(x, w))
    w.requires_grad_(False)
    assert_bitwise(region(x), mix(x, w))


@pytest.mark.parametrize("way", [weak_reference, cache])
def test_a_tensor_behind_a_call_is_followed_or_an_error(way: Any) -> None:
    """Weak references and caches hand out a tensor without a path of their own."""
    w, x = seeded(3).requires_grad_(), seeded(2, 3, seed=1)
    get = way(w)

    def fun(x: Tensor) -> Tensor:
        return mix(x, get())

    try:
        found = gradient(remat(fun), x, w)
    except CapturedTensorError:
        return
    assert_bitwise(found, gradient(fun, x, w))


def test_an_array_that_changes_is_noticed() -> None:
    """A tensor made from a reachable numpy array is never stale."""
    w, x = seeded(3), seeded(2, 3, seed=1).requires_grad_()
    held = Frozen(w)

    def fun(x: Tensor) -> Tensor:
        return mix(x, held.w)

    region = remat(fun)
    for _ in range(2):
        assert_bitwise(gradient(region, x, x), gradient(fun, x, x))
        held.array = held.array * 2


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_a_parameter_of_a_script_module_raises() -> None:
    """Its interpreter calls operators below autograd, where a gradient would be lost."""
    layer = torch.jit.script(torch.nn.Linear(3, 3).double())
    region = remat(lambda x: layer(x).sin())

    with pytest.raises(CapturedTensorError, match=r"before torch\.jit\.script"):
        region(seeded(3, 3).requires_grad_())


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_function_of_torchscript_takes_captured_parameters(engine: Any) -> None:
    """No mode sees what its interpreter is given."""
    scripted = torch.jit.script(mix)
    w = seeded(3, 3, seed=1).requires_grad_()
    x = seeded(3, 3).requires_grad_()

    def fun(x: Tensor) -> Tensor:
        return scripted(x, w).sin() + w

    region: Any = remat(fun, engine=engine)
    for _ in range(2):
        assert_close(gradient(region, x, w), gradient(fun, x, w))


def test_a_tensor_that_a_custom_backward_alone_reaches() -> None:
    """No mode sees what a backward of the user's takes from its closure."""
    weight = seeded(3).requires_grad_()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return gradient * weight

    def fun(x: Tensor) -> Tensor:
        return cast("Tensor", Scaled.apply(x)).sin()

    text = r"error\.py:\d+: the backward of an autograd.Function uses a tensor that its forward did not save"
    with pytest.raises(CapturedTensorError, match=f"{text}.*ctx.save_for_backward"):
        remat(fun)(seeded(3).requires_grad_())


def test_a_tensor_that_a_hook_captures() -> None:
    """Nor what a hook takes from its closure; passed to the region, it is as good as any."""
    weight = seeded(3).requires_grad_()

    def fun(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda gradient: gradient * w)  # pyright: ignore[reportUnknownMemberType]
        return y.square()

    with pytest.raises(
        CapturedTensorError, match=r"or a hook one .* to the region; or use"
    ):
        remat(lambda x: fun(x, weight))(seeded(3).requires_grad_())

    args = [seeded(3), seeded(3, seed=1)]
    assert_bitwise(grads(remat(fun), args), grads(fun, args))
