"""`engine="rerun"` inside a trace and around one: regions of both engines together."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad

from remat import MutationError, TraceError, remat, scan
from tests.rerun.functions import TRANSFORMS, branches, traceable
from tests.support import assert_bitwise, assert_close, grads, in_turn, seeded, swept

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    # Dynamo reads `.grad` of what it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a"),
]


def test_inside_a_traced_region_it_is_refused_or_right() -> None:
    """A rerun region inside a traced one gives plain's numbers, or says why not."""
    inner = remat(branches, engine="rerun")

    def outer(x: Tensor) -> Tensor:
        return torch.sin(inner(torch.sin(x)))

    try:
        found = grads(remat(outer), [seeded(4)])
    except TraceError:
        return
    assert_bitwise(found, grads(lambda x: branches(x.sin()).sin(), [seeded(4)]))


def test_inside_a_traced_region_it_may_write_to_what_it_makes() -> None:
    """What the write could reach is looked for past the trace around it."""

    def own(x: Tensor, y: Tensor) -> Tensor:
        return y.clone().mul_(x)

    inner: Any = remat(own, engine="rerun")
    args = [seeded(3), seeded(3, seed=1)]
    found = grads(remat(lambda x, y: inner(x, y) + y), args)
    assert_bitwise(found, grads(lambda x, y: own(x, y) + y, args))


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["of one size", "of all"])
def test_gradients_that_nothing_reaches_are_pushed_forward(is_dynamic: bool) -> None:
    """A backward inside that has no gradient to give returns nothing, which torch refuses."""
    w, x = seeded(3, 3).requires_grad_(), seeded(2, 3, seed=1)

    def of_second(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y.cumsum(0), x * y

    def pushed(inner: Any, wrap: Any) -> Any:
        def outer(x: Tensor) -> Tensor:
            none = grad(lambda z: inner(z, x)[0].square().sum())(x)
            return (inner(x, none)[0] + x) @ w

        loss = grad(lambda x: wrap(outer)(x).square().sum())
        return torch.func.jvp(loss, (x,), (x.cos(),))

    region: Any = remat(of_second, engine="rerun")
    found = pushed(region, remat(dynamic_shapes=is_dynamic))
    assert_close(found, pushed(of_second, lambda fun: fun))


def test_a_captured_parameter_inside_is_followed_under_every_level() -> None:
    """In the trace of a derivative, what stands for the parameter needs no gradient."""
    w, x = seeded(3, 3).requires_grad_(), seeded(2, 3, seed=1)

    def fun(x: Tensor) -> Tensor:
        return (x @ w).tanh()

    def pushed(fun: Any) -> tuple[Tensor, Tensor]:
        products = torch.func.jvp(grad(lambda x: fun(x).square().sum()), (x,), (x,))
        return products[1], torch.autograd.grad(products[1].sum(), w)[0]

    inner: Any = remat(fun, engine="rerun")
    assert_close(pushed(remat(lambda x: inner(x))), pushed(fun))


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["of one size", "of all"])
def test_constants_inside_are_those_of_the_trace_around(is_dynamic: bool) -> None:
    """Captured tensors without a gradient, and buffers that are read."""
    mask, norm = seeded(3, seed=1).sign(), nn.BatchNorm1d(3).double().eval()

    def fun(x: Tensor) -> Tensor:
        return norm(x).sin() * mask

    inner: Any = remat(fun, engine="rerun")
    region = remat(lambda x: inner(inner(x)) + x, dynamic_shapes=is_dynamic)
    for size in (4, 4, 5):
        args = [seeded(size, 3)]
        assert_bitwise(grads(region, args), grads(lambda x: fun(fun(x)) + x, args))


@pytest.mark.parametrize(
    "derive", [torch.func.jacfwd, *swept([grad])], ids=["forward", "reverse"]
)
def test_constants_inside_under_two_levels(derive: Any) -> None:
    """A trace of a derivative knows what stands for them while the function first runs."""
    w, mask = seeded(3, 3).requires_grad_(), seeded(3, seed=1).sign()

    def fun(x: Tensor) -> Tensor:
        return ((x @ w).tanh() * mask).sum()

    inner: Any = remat(fun, engine="rerun")
    region, x = remat(lambda x: inner(x.sin()) * x.sum()), seeded(3, seed=2)

    def second(fun: Any) -> Tensor:
        return torch.func.jacfwd(derive(fun))(x)

    assert_close(second(region), second(lambda x: fun(x.sin()) * x.sum()))


@pytest.mark.filterwarnings("ignore:.*runs the function again in its backward")
def test_buffers_that_change_inside_are_refused_or_run_again() -> None:
    """The trace around would have the change in its backward, too."""
    norm, plain = (nn.BatchNorm1d(3).double() for _ in range(2))
    inner: Any = remat(norm, engine="rerun")

    with pytest.raises(MutationError, match='Pass engine="rerun" to the region around'):
        grads(remat(lambda x: inner(x).sin()), [seeded(4, 3)])

    around: Any = remat(lambda x: inner(x).sin(), engine="auto")
    for _ in range(2):
        found = grads(around, [seeded(4, 3)])
        assert_bitwise(found, grads(lambda x: plain(x).sin(), [seeded(4, 3)]))
    assert_bitwise([*norm.buffers()], [*plain.buffers()])


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_a_gradient_is_linearized_beside_data() -> None:
    """`linearize` traces real tensors, whose numbers it does not tell."""
    region, data = remat(lambda x, w: (x @ w).tanh(), engine="rerun"), seeded(5, 3)
    w = seeded(3, 3, seed=1)

    def mapped(fun: Any) -> Any:
        gradient = grad(lambda w: fun(data, w).sum())
        return torch.func.linearize(gradient, w)[1](w.cos())

    assert_close(mapped(region), mapped(region.__wrapped__))


@pytest.mark.parametrize("tracks", [True, False], ids=["training", "at rest"])
@pytest.mark.parametrize("norm", [torch.batch_norm, torch.instance_norm])
def test_torchs_own_normalizations(norm: Any, tracks: bool) -> None:
    """They take weight and bias in front of the statistics: these were taken for them."""

    def normed(mean: Tensor, variance: Tensor) -> Callable[..., Tensor]:
        settings = (tracks, 0.1, 1e-5, False)
        return lambda x, w, b: norm(x, w, b, mean, variance, *settings).sin()

    def statistics() -> list[Tensor]:
        return [torch.zeros(3).double(), torch.ones(3).double()]

    args = [seeded(2, 3, 5), seeded(3, seed=1), seeded(3, seed=2)]
    own, others = statistics(), statistics()
    found = grads(remat(normed(*own), engine="rerun"), args)
    assert_bitwise([*found, *own], [*grads(normed(*others), args), *others])


GRADIENTS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "func.grad": lambda fun, w: grad(lambda w: fun(w).sum())(w),
    "func.vjp": lambda fun, w: torch.func.vjp(fun, w)[1](w.cos())[0],
    "autograd.grad": lambda fun, w: torch.autograd.grad(
        fun(w).sum(), w, create_graph=True
    )[0],
    "a view": lambda fun, w: grad(lambda w: fun(w).sum())(w).t(),
}


@pytest.mark.contract
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_traced_region_that_returns_the_gradient_of_one_that_runs_again(
    name: str,
) -> None:
    """What its backward detaches is no `detach` of the user's: the gradient goes on."""
    gradient, again = GRADIENTS[name], remat(torch.tanh, engine="rerun")
    region = remat(lambda w: gradient(again, w))

    w = seeded(3, 3)
    assert_bitwise(grads(region, [w]), grads(lambda w: gradient(torch.tanh, w), [w]))


@pytest.mark.contract
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_traced_region_that_hands_out_what_it_gives(transform: Any) -> None:
    """What a rerun region returns is no detached value for the trace around it."""
    inner = remat(traceable, engine="rerun")
    outer = remat(lambda x: inner(x))
    assert outer(seeded(4).requires_grad_()).requires_grad
    assert_bitwise(grads(outer, [seeded(4)]), grads(traceable, [seeded(4)]))
    assert_close(transform(outer, seeded(4)), transform(traceable, seeded(4)))


@pytest.mark.contract
def test_a_stack_inside() -> None:
    """A `scan`, which runs its steps on fakes first, is no draw from a generator."""
    steps = seeded(3, 4)

    def fun(x: Tensor) -> Tensor:
        carry, rows = scan(lambda c, a: ((c * a).tanh(), c), x, steps)
        return carry * rows.sum(0)

    def plain(x: Tensor) -> Tensor:
        carry, rows = x, []
        for a in steps:
            rows.append(carry)
            carry = (carry * a).tanh()
        return carry * torch.stack(rows).sum(0)

    found = grads(remat(fun, engine="rerun"), [seeded(4)])
    assert_close(found, grads(plain, [seeded(4)]))


def test_a_traced_region_inside() -> None:
    """The other way round there is nothing in the way."""
    inner = remat(traceable)

    def outer(x: Tensor) -> Tensor:
        return inner(branches(x))

    plain = grads(lambda x: traceable(branches(x)), [seeded(4)])
    assert_bitwise(grads(remat(outer, engine="rerun"), [seeded(4)]), plain)


class Product(torch.autograd.Function):
    """x * w, of which no torch function sees `w`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return cotangents[0] * w, cotangents[0] * x

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return tangents[0] * w + x * tangents[1]


def reaches(w: Tensor, region: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions that hand on a tensor that they reach, without an operator."""
    by_itself = region(lambda x: (x * w).sin())
    given = region(lambda x, w: (x * w).sin())
    level = region(lambda x: by_itself(x) * w)
    return {
        "a region that reaches it": lambda x: by_itself(x) + by_itself(x * 2),
        "a region that is given it": lambda x: given(x, w),
        "two levels": lambda x: level(x.cos()),
        "autograd.Function": lambda x: Product.apply(x, w).sin(),
        "a stack": lambda x: scan(lambda c, _: ((c * w).sin(), None), x, length=2)[0],
    }


REACHES = [*reaches(torch.ones(()), lambda fun: fun)]


@pytest.mark.contract
@pytest.mark.parametrize(
    "is_passed", [False, *swept([True])], ids=["captured", "passed, too"]
)
@pytest.mark.parametrize(
    ("reach", "engines"),
    in_turn(REACHES, [("rerun", "trace"), ("rerun", "rerun"), ("trace", "rerun")]),
)
def test_what_regions_inside_reach(
    engines: tuple[Any, Any], reach: str, is_passed: bool
) -> None:
    """Each run of the function around gives them its own stand-in; it raised, always."""
    outer, inner = engines

    def region(x: Tensor, w: Tensor) -> Tensor:
        fun = reaches(w, remat(engine=inner))[reach]
        around = remat(lambda x, *_: fun(x), engine=outer)
        return around(x, w) if is_passed else around(x)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return reaches(w, lambda fun: fun)[reach](x)

    def pushed(fun: Any) -> Any:
        gradient = torch.func.grad(lambda x, w: fun(x, w).sum(), argnums=(0, 1))
        mapped = torch.func.vmap(gradient, in_dims=(0, None))(x, w)
        return mapped, torch.func.jvp(gradient, (x, w), (x.cos(), w.sin()))

    x, w = seeded(2, 3), seeded(3, seed=1)
    assert_bitwise(grads(region, [x, w]), grads(plain, [x, w]))
    assert_close(pushed(region), pushed(plain))


def test_functions_that_run_again_on_two_threads() -> None:
    """Each thread's stand-ins are its own, and `Function.apply` is torch's in the end."""
    original = torch.autograd.Function.__dict__["apply"]
    barrier = threading.Barrier(2)

    def step(w: Tensor) -> Tensor:
        def fun(x: Tensor) -> Tensor:
            barrier.wait(timeout=60)
            return Product.apply(x, w)

        remat(fun, engine="rerun")(seeded(3)).sum().backward()
        assert w.grad is not None
        return w.grad

    weights = [seeded(3, seed=seed).requires_grad_() for seed in (1, 2)]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = [*threads.map(step, weights)]

    assert_bitwise(found, [seeded(3), seeded(3)])
    assert torch.autograd.Function.__dict__["apply"] is original
