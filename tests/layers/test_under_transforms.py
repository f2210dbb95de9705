"""`scan` equals a Python loop under every transform, and under pairs of two."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import chain, remat, scan
from remat.schedules import AbstractSchedule, Every, Revolve
from tests.layers.stacks import (
    SCHEDULES,
    arguments,
    by,
    ignoring,
    loop,
    scanned,
    swap,
    tanh_cell,
)
from tests.support import assert_bitwise, assert_close, grads, in_turn, seeded, swept

# Forward mode's first use compiles torch's own formulas with it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")

ALL = (0, 1, 2)
BATCH = 2


def batched() -> tuple[Tensor, Tensor, Tensor]:
    """The arguments, the last two with a mapped dimension: first, and in the middle."""
    w, c, xs = arguments()
    return w, torch.stack([c, 2 * c]), torch.stack([xs, xs.sin()], 1)


def plain_call(f: Any, *args: Any) -> Any:
    return f(*args)


def over_examples(f: Any) -> Any:
    return vmap(f, in_dims=(None, 0, 1), randomness="error")


def double_backward(f: Any) -> Any:
    leaves = [each.clone().requires_grad_() for each in arguments()]
    first = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
    squares = torch.stack([each.square().sum() for each in first])
    return torch.autograd.grad(squares.sum(), leaves)


def second(f: Any) -> Any:
    return grad(lambda *a: sum(g.square().sum() for g in grad(f, argnums=ALL)(*a)))


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: grad(f, argnums=ALL)(*arguments()),
    "grad of the carry": lambda f: grad(f, argnums=1)(*arguments()),
    "vjp": lambda f: vjp(f, *arguments())[1](seeded()),
    "jvp": lambda f: jvp(f, arguments(), arguments()),
    "jacfwd": lambda f: jacfwd(f)(*arguments()),
    "jacrev": lambda f: jacrev(lambda *a: torch.stack([f(*a), f(*a).sin()]))(*arguments()),
    "vmap(grad)": lambda f: over_examples(grad(f, argnums=ALL))(*batched()),
    "grad(vmap)": lambda f: grad(
        lambda *a: over_examples(f)(*a).prod(), argnums=ALL
    )(*batched()),
    "grad(vmap(grad))": lambda f: grad(
        lambda *a: over_examples(grad(f))(*a).square().sum(), argnums=ALL
    )(*batched()),
    "vmap(vmap(grad))": lambda f: vmap(
        vmap(grad(f, argnums=ALL), in_dims=(None, 0, None)), in_dims=(None, None, 1)
    )(*batched()),
    "grad(vmap(vmap))": lambda f: grad(
        lambda *a: vmap(vmap(f, (None, 0, None)), (None, None, 1))(*a).sum(), argnums=ALL
    )(*batched()),
    "grad(grad)": lambda f: second(f)(*arguments()),
    "hessian": lambda f: hessian(f)(*arguments()),
    "jvp(grad)": lambda f: jvp(grad(f, argnums=ALL), arguments(), arguments()),
    "grad(jvp)": lambda f: grad(lambda t: jvp(f, arguments(), (t, *arguments()[1:]))[1])(
        arguments()[0]
    ),
    "double backward": double_backward,
    "region": lambda f: grad(lambda *a: plain_call(remat(f), *a).sin(), argnums=ALL)(*arguments()),
}  # fmt: skip
QUICK = [Every(3), Revolve(2)]


@pytest.mark.parametrize("make", [tanh_cell, *swept([swap, ignoring])])
@pytest.mark.parametrize(
    "name", [*(name for name in TRANSFORMS if name != "hessian"), *swept(["hessian"])]
)
def test_scan_equals_a_loop(name: str, make: Any):
    """Without a schedule, and with one or two."""
    expected = TRANSFORMS[name](scanned(make, loop))

    for schedule in [None, *QUICK] if make is tanh_cell else [Revolve(2)]:
        assert_close(TRANSFORMS[name](scanned(make, by(schedule))), expected)


@pytest.mark.contract
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("make", [tanh_cell, swap, ignoring])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_backward_is_bitwise_the_schedule_free(
    schedule: AbstractSchedule | None, make: Any, reverse: bool
):
    """A schedule adds gradients in the order in which autograd does."""
    found = grads(scanned(make, by(schedule, reverse=reverse)), arguments())

    free = grads(scanned(make, by(None, reverse=reverse)), arguments())
    plain = scanned(make, lambda *a: loop(*a, reverse=reverse))
    assert_bitwise(found, free)
    assert_close(found, grads(plain, arguments()))


@pytest.mark.parametrize("outer", [None, Revolve(2)], ids=repr)
@pytest.mark.parametrize("inner", [None, Every(1)], ids=repr)
def test_scans_nest(outer: AbstractSchedule | None, inner: AbstractSchedule | None):
    """A scan in the step of a scan, under transforms and in a region."""

    def nested(one: Any, other: Any) -> Any:
        def loss(w: Tensor, c: Tensor, xs: Tensor) -> Tensor:
            def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                h, ys = other(tanh_cell(w), h, torch.stack([x, x.sin()]))
                return h, ys.sum(0)

            h, ys = one(step, c, xs[:3])
            return h.square().sum() + ys.sin().sum()

        return loss

    for name in ("grad", "vmap(grad)", "region"):
        expected = TRANSFORMS[name](nested(loop, loop))
        found = TRANSFORMS[name](nested(by(outer), by(inner)))
        assert_close(found, expected)


@pytest.mark.parametrize("inner", ["scan", "remat"])
def test_a_region_in_a_mapped_step_captures_what_the_step_does(inner: str):
    """The cotangents are mapped, too; whether a gradient is wanted is no look of the user's."""

    def mapped(one: Any, other: Any) -> Any:
        def run(w: Tensor, c: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
            ws = [w.sin(), w]

            def inner(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                return (h @ ws[1] + x.sin()).tanh(), h.sum()

            return one(lambda h, x: other(inner, h, torch.stack([x, x])), c, xs[:3])

        def pull(*each: Tensor) -> Any:
            outputs, back, *_ = vjp(run, *each)
            return back((outputs[0].cos(), outputs[1].sin()))

        return vmap(pull)(*(torch.stack([each, each.sin()]) for each in arguments()))

    def as_region(step: Any, h: Tensor, x: Tensor) -> Any:
        return remat(lambda h, x: loop(step, h, x))(h, x)

    other = by(None) if inner == "scan" else as_region
    assert_close(mapped(by(Every(2)), other), mapped(loop, loop))


def test_a_mapped_pullback_of_a_region_around_has_a_derivative():
    """A stack maps all that it returns, also gradients that are the same for each example."""

    def derivative(one: Any, around: Any) -> Any:
        def run(w: Tensor, c: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
            def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                return (new := h + (x @ w).tanh()), new.sum()

            return around(lambda c, xs: one(step, c, xs))(c, xs)

        def pull(*each: Tensor) -> Any:
            outputs, back, *_ = vjp(run, *each)
            ones = [torch.ones(each.shape, dtype=each.dtype) for each in outputs]
            return back(tuple(ones))  # for each example the same, and not mapped

        def total(*examples: Tensor) -> Tensor:
            return sum(
                (each.sin().sum() for each in vmap(pull)(*examples)), seeded(0).sum()
            )

        examples = (torch.stack([each, each.sin()]) for each in arguments())
        return grad(total, argnums=ALL)(*examples)

    assert_close(derivative(by(Every(2)), remat), derivative(loop, lambda f: f))


@pytest.mark.parametrize("schedule", [None, Every(2)], ids=repr)
def test_a_region_around_traces_first(schedule: AbstractSchedule | None):
    """A step that reaches an argument of the region around it, met there for the first time."""

    def plain(w: Tensor, c: Tensor, xs: Tensor, by: Any = loop) -> Tensor:
        h, ys = by(lambda h, x: ((h @ w + x).cos(), h.mean()), c, xs)
        return h.sum() * ys.sum()

    def stacked(w: Tensor, c: Tensor, xs: Tensor) -> Tensor:
        return plain(w, c, xs, by(schedule))

    leaves = [each.clone().requires_grad_() for each in arguments()]
    assert_close(grads(remat(stacked), leaves), grads(plain, leaves))


@pytest.mark.parametrize("schedule", [None, Every(1)], ids=repr)
def test_only_what_is_captured_is_wanted(schedule: AbstractSchedule | None):
    """Stages traced under forward mode, and in a region, for an argument without gradient."""
    w, x = arguments()[0].requires_grad_(), seeded(*arguments()[1].shape)

    def plain(x: Tensor) -> Tensor:
        return x.sin() @ w

    stack = chain([torch.sin, lambda x: x @ w], schedule)
    assert_close(jvp(stack, (x,), (x,)), jvp(plain, (x,), (x,)))
    outer = remat(lambda x: chain([torch.sin, lambda x: x @ w], schedule)(x))
    assert_close(
        torch.autograd.grad(outer(x).sum(), w), torch.autograd.grad(plain(x).sum(), w)
    )


LAYERS: list[Callable[[Any], Any]] = [
    lambda x: (x.sin(), 2),
    lambda pair: pair[0].square() * pair[1],
    lambda x: {"a": x, "b": x.flip(0)},
    lambda d: d["a"][1:] * d["b"][:-1],
    lambda x: x.expand(2, -1),
    lambda x: torch.tanh(x).sum(0),
]


def composed(x: Any) -> Any:
    """The layers without a stack."""
    for layer in LAYERS:
        x = layer(x)
    return x


OF_A_LOSS: dict[str, Callable[[Any], Callable[[Tensor], Any]]] = {
    "grad": grad,
    "hessian": hessian,
    "vmap(grad)": lambda f: lambda x: vmap(grad(f))(torch.stack([x, -x])),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(torch.stack([x, -x])).prod()),
    "jvp(grad)": lambda f: lambda x: jvp(grad(f), (x,), (x,)),
    "grad(remat)": lambda f: grad(lambda x: plain_call(remat(f), x).sin()),
}


@pytest.mark.contract
@pytest.mark.parametrize(
    ("name", "schedule"),
    in_turn(OF_A_LOSS, [None, Every(1), Every(4), Revolve(2)]),
    ids=str,
)
def test_chain_equals_composition(name: str, schedule: AbstractSchedule | None):
    """Layers that pass on pytrees, views and expanded tensors."""

    def loss(f: Any) -> Any:
        return lambda x: f(x).square().sum()

    x, run, transform = seeded(5), chain(LAYERS, schedule), OF_A_LOSS[name]

    assert_close(transform(loss(run))(x), transform(loss(composed))(x))
    assert_bitwise(grads(run, (x,)), grads(composed, (x,)))


@pytest.mark.parametrize("schedule", [None, Every(2)])
def test_a_region_around_traces_under_autocast(
    schedule: AbstractSchedule | None,
) -> None:
    """Autocast casts the carry anew at each step, one that is made inside too."""
    weight, xs = (seeded(*shape, dtype=torch.float32) for shape in ((4, 4), (5, 3, 4)))
    weight.requires_grad_()

    def through(repeat: Any, **options: Any) -> Any:
        def run(weight: Tensor, xs: Tensor) -> Any:
            def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                carry = torch.tanh(carry @ weight + x)
                return carry, carry @ weight

            return repeat(step, torch.zeros(3, 4), xs, **options)

        return run

    region: Any = remat(through(scan, schedule=schedule))
    with torch.autocast(weight.device.type, torch.bfloat16):
        found, expected = region(weight, xs), through(loop)(weight, xs)

    assert_bitwise(found, expected)
