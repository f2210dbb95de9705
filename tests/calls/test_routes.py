"""The short way of a call: taken where nothing tells two calls apart, and nowhere else."""

import functools
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from remat import disabled, first_order, random, remat
from remat._calls import decorated
from remat._regions import rules
from tests.support import seeded

pytestmark = pytest.mark.contract


def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    """A function of a tensor and a number."""
    return (x * by).sin()


class Scale:
    """Something that a function is told to multiply by."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scale) and self.by == other.by

    def __hash__(self) -> int:
        return hash(self.by)

    @remat
    def method(self, x: Tensor) -> Tensor:
        """Of (n,)."""
        return (x * self.by).sin()


def by_scale(x: Tensor, scale: Scale) -> Tensor:
    """A function of an object."""
    return (x * scale.by).sin()


class Layer(nn.Module):
    """A layer whose input wants no gradient, as a first one's does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(3, 3, seed=seed))

    def forward(self, x: Tensor) -> Tensor:
        """Of (n, 3)."""
        return (x @ self.weight).sin()


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at each call that is looked up."""
    seen: list[int] = []
    call = decorated.DecoratedFunction._call

    def counted(region: Any, args: Any, kwargs: Any) -> Any:
        seen.append(1)
        return call(region, args, kwargs)

    monkeypatch.setattr(decorated.DecoratedFunction, "_call", counted)
    return seen


def counts(region: Any) -> tuple[int, int, int]:
    """Hits, misses and traces kept."""
    info = region.cache_info()
    return info.hits, info.misses, info.currsize


def leaf() -> Tensor:
    """Three numbers that want a gradient."""
    return seeded(3).requires_grad_()


def gradient(fun: Callable[..., Tensor], *args: Any) -> Tensor:
    """The gradient by the first argument of the sum of a result."""
    x, *rest = args
    (found,) = torch.autograd.grad(fun(x, *rest).sum(), x)
    return found


def slope(fun: Callable[..., Tensor], *args: Any) -> Tensor:
    """The same by torch.func."""
    x, *rest = args
    return grad(lambda x: fun(x, *rest).sum())(x.detach())


def slopes(fun: Callable[..., Tensor], *args: Any) -> Tensor:
    """The same for each number apart."""
    x, *rest = args
    return vmap(grad(lambda x: fun(x, *rest).sum()))(x.detach())


#: Each has a short way of its own.
by_each = pytest.mark.parametrize("derivative", [gradient, slope, slopes])


def cosine(by: float) -> Tensor:
    """The gradient of the sum of `scaled`, in closed form."""
    return by * (by * seeded(3)).cos()


def test_a_method_takes_it_for_any_object_of_its_class(looked_up: list[int]) -> None:
    """What is read of `self` is checked at each call."""
    Scale.method.cache_clear()
    one, other = Scale(2.0), Scale(3.0)

    for _ in range(4):
        assert torch.allclose(gradient(one.method, leaf()), cosine(2.0))
        assert torch.allclose(gradient(other.method, leaf()), cosine(3.0))
    # The two of the first round, and nothing after: one trace for each number.
    assert len(looked_up) == 2
    assert Scale.method.cache_info().currsize == 2

    other.by = 2.0
    assert torch.allclose(gradient(other.method, leaf()), cosine(2.0))
    assert len(looked_up) == 2


def test_another_class_is_another_call(looked_up: list[int]) -> None:
    """Although it reads the same of both."""

    class Twice(Scale):
        """A class of its own."""

    region = remat(by_scale)
    region.cache_clear()
    for scale in (Scale(2.0), Twice(2.0), Scale(2.0), Twice(2.0)):
        assert torch.allclose(gradient(region, leaf(), scale), cosine(2.0))

    assert len(looked_up) == 2


def test_static_objects_are_compared_and_not_told_apart_by_their_class() -> None:
    """`static_argnames` promises a comparison of the whole."""
    region = remat(by_scale, static_argnames="scale")
    region.cache_clear()

    for by in (2.0, 2.0, 3.0, 3.0, 2.0):
        assert torch.allclose(gradient(region, leaf(), Scale(by)), cosine(by))

    assert region.cache_info().currsize == 2


def test_layers_of_one_class_share_it(looked_up: list[int]) -> None:
    """Their parameters, which alone want a gradient, are found anew for each."""
    layers: list[Any] = [remat(Layer(seed)) for seed in range(3)]
    layers[0].cache_clear()
    x = seeded(2, 3)

    for _ in range(3):
        for layer in layers:
            (found,) = torch.autograd.grad(layer(x).sum(), layer.weight)
            (wanted,) = torch.autograd.grad(
                (x @ layer.weight).sin().sum(), layer.weight
            )
            assert torch.equal(found, wanted)

    # Each region is looked up once, to learn where its function's traces are.
    assert len(looked_up) == 3
    assert counts(layers[0]) == (8, 1, 1)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda x: [x.sin()] * 2, id="twice"),
        pytest.param(lambda x: x.sin().view(3, 1), id="a view"),
        pytest.param(lambda x: (lambda y: (y, y[1:]))(x.sin()), id="a part besides"),
        pytest.param(lambda x: (x.sin(), x), id="an argument"),
        pytest.param(lambda x: (x.sin(), x[1:]), id="a part of an argument"),
        pytest.param(lambda x: (lambda y: (y, y.detach()))(x.sin()), id="cut off"),
    ],
)
def test_what_is_made_of_outputs_is_made_on_it(
    form: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a plain call makes it: the same storages, and the same gradients."""
    region = remat(form)
    region(leaf())
    # No other way can be taken.
    monkeypatch.setattr(rules, "_run_quietly", None)

    def looked_at(run: Callable[[Tensor], Any]) -> tuple[list[Any], Tensor]:
        x = leaf()
        found = pytree.tree_leaves(run(x))
        wanted = [each.cos().sum() for each in found if each.requires_grad]
        (grad,) = torch.autograd.grad(wanted, x)
        ptrs = [each.untyped_storage().data_ptr() for each in [x, *found]]
        shared = [ptrs.index(each) for each in ptrs]
        kinds = [(each.requires_grad, each.shape, each.stride()) for each in found]
        return [kinds, shared], grad

    (kinds, grad), (expected, expected_grad) = looked_at(region), looked_at(form)
    assert kinds == expected
    assert torch.equal(grad, expected_grad)


def swept(x: Tensor, w: Tensor) -> Tensor:
    """Of (3,) and (3,), with a second derivative by each."""
    return (x * w).sin() * w


#: What is differentiated by reverse mode, innermost.
UNDER_REVERSE_MODE: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda f: grad(lambda x, w: f(x, w).sum(), argnums=(0, 1)),
    "grad by one": lambda f: grad(lambda x, w: f(x, w).sum()),
    "grad of grad": lambda f: grad(
        lambda x, w: grad(lambda x: f(x, w).sum())(x).cos().sum(), argnums=(0, 1)
    ),
    "vmap of grad": lambda f: (
        lambda x, w: vmap(grad(lambda x, w: f(x, w).sum(), argnums=(0, 1)), (0, None))(
            x.expand(2, 3), w
        )
    ),
    "vjp": lambda f: lambda x, w: torch.func.vjp(f, x, w)[1](x),
}


@pytest.mark.parametrize("name", UNDER_REVERSE_MODE)
def test_it_is_taken_under_reverse_mode_too(name: str, looked_up: list[int]) -> None:
    """From the second time on, with the same numbers."""
    region = remat(swept)
    region.cache_clear()
    transform = UNDER_REVERSE_MODE[name]
    x, w = seeded(3), seeded(3, seed=1)
    expected = pytree.tree_leaves(transform(swept)(x, w))
    first = pytree.tree_leaves(transform(region)(x, w))
    looked_up.clear()

    again = pytree.tree_leaves(transform(region)(x, w))

    assert not looked_up
    for each, other, right in zip(first, again, expected, strict=True):
        assert torch.equal(each, other)
        assert torch.allclose(each, right)


def test_every_reverse_mode_keeps_its_own_numbers() -> None:
    """After each other, twice, and with plain autograd in between."""
    region = remat(swept)
    region.cache_clear()
    x, w = seeded(3), seeded(3, seed=1)

    for _ in range(2):
        for transform in UNDER_REVERSE_MODE.values():
            found = pytree.tree_leaves(transform(region)(x, w))
            right = pytree.tree_leaves(transform(swept)(x, w))
            assert all(map(torch.allclose, found, right))
            assert torch.equal(gradient(region, leaf(), w), gradient(swept, leaf(), w))


def test_reverse_mode_and_plain_autograd_are_both_known(looked_up: list[int]) -> None:
    """Neither takes the place of the other."""
    region = remat(swept)
    region.cache_clear()
    x, w = leaf(), seeded(3, seed=1)
    transformed = UNDER_REVERSE_MODE["grad"](region)

    for _ in range(3):
        gradient(region, x, w)
        transformed(x.detach(), w)

    assert len(looked_up) == 2


def test_what_a_level_below_wants_is_another_call() -> None:
    """Of a tensor that the transform has wrapped, and does not differentiate."""
    region = remat(swept)
    region.cache_clear()
    x, w = seeded(3), seeded(3, seed=1)

    def slope(fun: Callable[..., Tensor]) -> Tensor:
        return grad(lambda x: fun(x, w.exp()).sum())(x)

    for _ in range(2):
        slope(region)
    w.requires_grad_()

    (found,) = torch.autograd.grad(slope(region).sum(), w)

    assert torch.allclose(found, torch.autograd.grad(slope(swept).sum(), w)[0])


class Own(Tensor):
    """A tensor of a class that leaves torch's functions as they are."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def test_another_class_below_a_wrapper_is_another_call(looked_up: list[int]) -> None:
    """The wrapper has torch's own class, whatever it wraps."""
    region = remat(swept)
    region.cache_clear()
    x, w = seeded(3), seeded(3, seed=1)
    transformed = UNDER_REVERSE_MODE["grad"](region)
    for _ in range(2):
        transformed(x, w)
    looked_up.clear()

    transformed(x.as_subclass(Own), w)

    assert len(looked_up) == 1


def test_what_is_captured_alone_wants_a_gradient_under_reverse_mode() -> None:
    """By no argument, at the first call and at those like it."""
    layer = Layer(0)
    region: Any = remat(layer)
    region.cache_clear()
    x, given = seeded(2, 3), dict(layer.named_parameters())

    def slope(fun: Any) -> Tensor:
        return grad(lambda given: functional_call(fun, given, (x,)).sum())(given)[
            "weight"
        ]

    for _ in range(3):
        assert torch.equal(slope(region), slope(layer))


def test_without_gradients_to_compute_nothing_is_recorded() -> None:
    """After the same layer with them."""
    layer: Any = remat(Layer(0))
    x = seeded(2, 3)
    for _ in range(2):
        assert layer(x).requires_grad
    layer.weight.requires_grad_(False)

    assert not layer(x).requires_grad


ELSEWHERE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "disabled": disabled,
    "checking": random.checking,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("context", ELSEWHERE.values(), ids=ELSEWHERE)
def test_where_regions_are_off_it_is_not_taken(
    context: Callable[[], AbstractContextManager[Any]], looked_up: list[int]
) -> None:
    """After calls that took it, and only there."""
    region = remat(scaled)
    for _ in range(2):
        region(leaf())
    looked_up.clear()

    with context():
        found = region(leaf())
    assert len(looked_up) == 1
    assert "FastPath" not in type(found.grad_fn).__name__

    assert "FastPath" in type(region(leaf()).grad_fn).__name__
    assert len(looked_up) == 1


@pytest.mark.parametrize(
    "context", [context for name, context in ELSEWHERE.items() if name != "inference"]
)
@pytest.mark.parametrize("derivative", [slope, slopes])
def test_under_a_transform_it_is_not_taken_where_regions_are_off(
    derivative: Callable[..., Tensor],
    context: Callable[[], AbstractContextManager[Any]],
    looked_up: list[int],
) -> None:
    """What a block of `no_grad` cuts off is cut off there too."""
    region = remat(scaled)
    for _ in range(2):
        derivative(region, leaf())

    def half_off(fun: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with context():
                off = fun(x)
            return fun(x) * off

        return run

    looked_up.clear()
    found = derivative(half_off(region), leaf())

    assert torch.allclose(found, derivative(half_off(scaled), leaf()))
    assert len(looked_up) == 1


def test_another_threads_blocks_do_not_switch_this_one_off() -> None:
    """They only take the short way from it."""
    region = remat(scaled)
    entered, leave = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with disabled():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=elsewhere)
    region(leaf())
    thread.start()
    entered.wait()
    try:
        found = region(leaf())
    finally:
        leave.set()
        thread.join()

    assert "FastPath" in type(found.grad_fn).__name__


def test_first_order_holds_for_calls_like_those_before() -> None:
    """A second derivative is refused, not forgotten to be refused."""
    region = remat(scaled)
    for _ in range(2):
        region(leaf())
    x = leaf()
    with first_order():
        (slope,) = torch.autograd.grad(region(x).sum(), x, create_graph=True)

    with pytest.raises(RuntimeError, match="first_order"):
        torch.autograd.grad(slope.sum(), x)


@pytest.mark.parametrize("mapped", [lambda f: f, vmap], ids=["as it is", "mapped"])
def test_first_order_holds_for_calls_like_those_before_a_transform(
    mapped: Callable[[Any], Callable[[Tensor], Tensor]],
) -> None:
    """In a call that differs from those before by the block alone."""
    region = remat(scaled)

    def twice() -> Tensor:
        first = mapped(grad(lambda x: region(x).sum()))
        return grad(lambda x: first(x).sum())(seeded(3))

    for _ in range(2):
        twice()

    with first_order(), pytest.raises(RuntimeError, match="first_order"):
        twice()
    assert torch.allclose(twice(), -4 * (2 * seeded(3)).sin())


class Config:
    """What a function may be told by others than its arguments."""

    by = 2.0
    scale: Callable[[Tensor], Tensor]


def changing(told: str) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """A function of a tensor, and what changes what it computes."""
    by, config, steps = 2.0, Config(), [2.0]

    def by_cell(x: Tensor) -> Tensor:
        return scaled(x, by)

    def change_cell() -> None:
        nonlocal by
        by = 3.0

    def by_attribute(x: Tensor) -> Tensor:
        return scaled(x, config.by)

    def by_default(x: Tensor, by: float = 2.0) -> Tensor:
        return scaled(x, by)

    def by_list(x: Tensor) -> Tensor:
        return scaled(x, steps[0])

    def by_method(x: Tensor) -> Tensor:
        return config.scale(x)

    config.scale = scaled
    kinds = {
        "cell": (by_cell, change_cell),
        "attribute": (by_attribute, lambda: setattr(config, "by", 3.0)),
        "default": (by_default, lambda: setattr(by_default, "__defaults__", (3.0,))),
        "list": (by_list, lambda: steps.__setitem__(0, 3.0)),
        "partial": (
            part := functools.partial(scaled, by=2.0),
            lambda: part.keywords.update(by=3.0),
        ),
        "method": (
            by_method,
            lambda: setattr(config, "scale", lambda x: scaled(x, 3.0)),
        ),
    }
    return kinds[told]


@by_each
@pytest.mark.parametrize(
    "told", ["cell", "attribute", "default", "list", "partial", "method"]
)
def test_changed_state_is_another_call(
    told: str, derivative: Callable[..., Tensor], looked_up: list[int]
) -> None:
    """Law 7: it is traced again, once."""
    fun, change = changing(told)
    region = remat(fun)
    region.cache_clear()
    for by in (2.0, 3.0):
        looked_up.clear()
        for _ in range(3):
            assert torch.allclose(derivative(region, leaf()), cosine(by))
        assert len(looked_up) == 1
        change()

    assert region.cache_info().currsize == 2


@by_each
def test_a_call_that_fails_leaves_it_open(
    derivative: Callable[..., Tensor], looked_up: list[int]
) -> None:
    """Law 11: the error is the function's own, and the next call is as those before."""

    def root(x: Tensor) -> Tensor:
        return torch.linalg.cholesky(x.reshape(1, 1)).sin()

    region = remat(root)
    region.cache_clear()
    x = seeded(1).abs().requires_grad_()
    expected = derivative(root, x)
    for _ in range(2):
        derivative(region, x)
    looked_up.clear()

    for _ in range(2):
        with pytest.raises(RuntimeError, match="positive-definite"):
            derivative(region, (-x).detach().requires_grad_())
        assert torch.allclose(derivative(region, x), expected)
    assert not looked_up


def test_another_number_of_threads_is_learned(looked_up: list[int]) -> None:
    """torch's own guard fails for it; the call that is looked up puts another in place."""
    region = remat(scaled)
    region.cache_clear()
    number = torch.get_num_threads()
    for _ in range(2):
        region(leaf())
    looked_up.clear()
    try:
        torch.set_num_threads(number + 1)
        for _ in range(3):
            region(leaf())
        assert len(looked_up) == 1
    finally:
        torch.set_num_threads(number)


@pytest.mark.parametrize(
    ("switch", "undo"),
    [
        (
            lambda: torch.set_float32_matmul_precision("high"),
            lambda: torch.set_float32_matmul_precision("highest"),
        ),
        (
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        (
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
        ),
        (
            lambda: torch.backends.cuda.enable_math_sdp(False),
            lambda: torch.backends.cuda.enable_math_sdp(True),
        ),
    ],
    ids=["matmul precision", "determinism", "default dtype", "attention kernels"],
)
@by_each
def test_other_switches_are_another_signature(
    switch: Callable[[], None],
    undo: Callable[[], None],
    derivative: Callable[..., Tensor],
) -> None:
    """Law 12: each has its own trace, and back again the first one serves."""
    region, x = remat(scaled), leaf()
    region.cache_clear()
    for _ in range(2):
        derivative(region, x)
    switch()
    try:
        for _ in range(2):
            derivative(region, x)
    finally:
        undo()
    derivative(region, x)

    assert counts(region) == (3, 2, 2)


@pytest.fixture
def precise() -> Generator[None]:
    """Puts the precision of float32 products back."""
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("precise")
@by_each
def test_a_switch_that_the_function_sets_is_another_signature(
    derivative: Callable[..., Tensor],
) -> None:
    """A call under what the trace has left is not one like the call that was traced."""

    def sets(x: Tensor) -> Tensor:
        torch.set_float32_matmul_precision("high")
        return x.sin()

    region = remat(sets)
    region.cache_clear()
    for expected in ((0, 1, 1), (0, 2, 2), (1, 2, 2)):
        derivative(region, leaf())
        assert counts(region) == expected


@pytest.mark.usefixtures("precise")
def test_a_switch_that_a_backwards_trace_sets_is_another_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is looked up for the switches that are in force when it runs."""
    asked: list[str] = []
    pulled_back = rules._pulled_back

    def leaves_high(ctx: Any, cotangents: Any) -> Any:
        asked.append(torch.get_float32_matmul_precision())
        found = pulled_back(ctx, cotangents)
        torch.set_float32_matmul_precision("high")
        return found

    monkeypatch.setattr(rules, "_pulled_back", leaves_high)
    region, x = remat(lambda x: x.sin().sin()), leaf()
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision("highest")
        out = region(x).sum()
        torch.set_float32_matmul_precision(precision)
        torch.autograd.grad(out, x)

    assert asked == ["highest", "high"]


@by_each
def test_medium_precision_is_not_high(derivative: Callable[..., Tensor]) -> None:
    """Torch's guard sees that they are not the highest, but not which of them it is."""
    region = remat(scaled)
    region.cache_clear()
    try:
        for precision in ("high", "high", "medium", "medium", "high"):
            torch.set_float32_matmul_precision(precision)
            derivative(region, leaf())
    finally:
        torch.set_float32_matmul_precision("highest")

    assert counts(region) == (3, 2, 2)


def test_the_cache_may_be_cleared_while_a_call_runs() -> None:
    """The call goes on, and the next one traces."""
    region: Any = remat(scaled)
    region.cache_clear()
    for x in (seeded(2).requires_grad_(), leaf()):
        region(x)

    def pack(tensor: Tensor) -> Tensor:
        region.cache_clear()
        return tensor

    x = leaf()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        out = region(x)
    (found,) = torch.autograd.grad(out.sum(), x)

    assert torch.allclose(found, cosine(2.0))
    assert region.cache_info().currsize == 0
    region(leaf())
    assert region.cache_info().currsize == 1
