"""`engine="rerun"`: which output rests on what, and what has no gradient."""

import queue
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, jvp, vjp, vmap

from remat import CapturedTensorError, remat
from remat._regions.protocol import Call
from remat._regions.rules import bind
from remat._rerun.region import rerun_of
from remat._switches.numerics import Numerics
from remat._tracing.trace import Flat
from tests.rerun.functions import branches
from tests.support import assert_bitwise, assert_close, seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    # Dynamo reads `.grad` of what it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a"),
]


def three(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Outputs that rest on some of the arguments."""
    with torch.no_grad():
        unfelt = c.exp()
    return a.sin(), b.sin() * unfelt, a * b


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)])
def test_what_no_used_output_rests_on_has_no_gradient(
    used: tuple[int, ...], engine: Any
) -> None:
    """`.grad` stays None where plain leaves it so: an optimizer then lets it be."""

    def grads_of(fun: Callable[..., Any]) -> list[Tensor | None]:
        args = [seeded(4, seed=k).requires_grad_() for k in range(3)]
        outputs = fun(*args)
        torch.stack([outputs[k] for k in used]).sin().sum().backward()
        return [each.grad for each in args]

    plain = grads_of(three)
    found = grads_of(remat(three, engine=engine))

    assert plain[2] is None
    for ours, theirs in zip(found, plain, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
        else:
            assert_bitwise(ours, theirs)


def test_a_node_waits_for_nothing_but_what_its_outputs_rest_on() -> None:
    """Hooks that wait for a gradient are not held up by who sees the parameter."""
    used, seen = nn.Linear(3, 3), nn.Linear(3, 3)
    everything = [used, seen]

    def block(x: Tensor) -> Tensor:
        assert len(everything) == 2
        return used(x).sin() * everything[1].weight.detach().sum()

    y = remat(block, engine="rerun")(torch.ones(2, 3))

    assert y.grad_fn is not None
    edges = [getattr(node, "variable", None) for node, _ in y.grad_fn.next_functions]
    leaves = [each for each in edges if each is not None]
    assert {id(each) for each in leaves} == {id(each) for each in used.parameters()}


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_second_derivatives_of_mapped_gradients(engine: Any) -> None:
    """Which output rests on what is no matter of the gradients, whose region is mapped."""

    def two(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return a.sin() * 2, (b * c).cos() * b

    def second(fun: Any) -> Any:
        def loss(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
            first, other = fun(x, w, v)
            return (first * w).square().sum() + other.pow(3).sum()

        def of_all(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
            each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, None, 0))
            return each(w, v, x).square().sum()

        args = seeded(3), seeded(3, seed=1), seeded(4, 3, seed=2)
        return torch.func.grad(of_all, argnums=(0, 1, 2))(*args)

    assert_close(second(remat(two, engine=engine)), second(two))


def _asks(x: Tensor, y: Tensor) -> Tensor:
    return y.sin() * (2.0 if (x * 1).requires_grad else 1.0)


def _differentiates(x: Tensor, y: Tensor) -> Tensor:
    of_x = x * 1
    (inner,) = torch.autograd.grad(of_x.sin().sum(), of_x)
    return y.sin() * inner


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("fun", [_asks, _differentiates])
@pytest.mark.parametrize(
    "derive", [lambda one: torch.func.vmap(one), lambda one: one], ids=["vmap", "alone"]
)
def test_what_no_output_rests_on_requires_a_gradient_again(
    derive: Callable[..., Any], fun: Callable[..., Tensor], engine: Any
) -> None:
    """The run of the backward asks, and is told what the forward was."""

    def gradients(fun: Callable[..., Tensor]) -> Any:
        one = torch.func.grad(lambda x, y: fun(x, y).sum(), argnums=(0, 1))
        return derive(one)(seeded(2, 3), seeded(2, 3, seed=1))

    assert_close(gradients(remat(fun, engine=engine)), gradients(fun))


CAPTURING: dict[str, Callable[..., Any]] = {
    "jvp": lambda d, x, w: torch.func.jvp(
        lambda w: grad(lambda x: d(lambda y: (y * w).sin())(x).sum())(x), (w,), (w.cos(),)
    ),
    "jacfwd": lambda d, x, w: torch.func.jacfwd(
        lambda w: grad(lambda x: d(lambda: (x * w).sin())().sum())(x)
    )(w),
    "vmap": lambda d, x, w: torch.func.vmap(
        lambda w: grad(lambda x: d(lambda y: (y * w).sin())(x).sum())(x)
    )(torch.stack([w, w.cos()])),
    "grad": lambda d, x, w: grad(
        lambda w: grad(lambda x: d(lambda y: (y * w).sin())(x * w).sum())(x).sum()
    )(w),
}  # fmt: skip


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("derived", CAPTURING.values(), ids=CAPTURING)
def test_a_captured_tensor_that_a_transform_follows(derived: Any, engine: Any) -> None:
    """Forward mode and vmap follow it through the region, whether or not reverse mode does."""
    x, w = seeded(3), seeded(3, seed=1)

    plain = derived(lambda fun: fun, x, w)

    assert_close(derived(lambda fun: remat(fun, engine=engine), x, w), plain)


def test_a_tensor_left_out_of_reach_loses_no_gradient() -> None:
    """What the function hands out where no walk sees it raises when it is differentiated."""
    kept: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def leaving(x: Tensor) -> Tensor:
        y = branches(x)
        kept.put(y.exp())
        return y

    x = seeded(4).requires_grad_()
    y = remat(leaving, engine="rerun")(x)
    left = kept.get()

    with pytest.raises(
        CapturedTensorError, match=r"stored somewhere.*Return the tensor"
    ):
        (y.sum() + left.sum()).backward()
    # Its numbers may be read.
    assert_close(left, branches(x).exp())


AROUND: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "gradient": lambda f: grad(lambda x: f(x).sum())(seeded(4)),
    "tangent": lambda f: jvp(f, (seeded(4),), (seeded(4, seed=1),)),
    "mapped dimension": lambda f: vmap(f)(seeded(3, 4)),
}


@pytest.mark.parametrize("engine", ["rerun", "trace", "auto"])
@pytest.mark.parametrize("lost", AROUND)
@pytest.mark.parametrize("hidden", ["in an iterator", "in a graph"])
def test_a_hidden_tensor_of_a_transform_around_loses_nothing(
    hidden: str, lost: str, engine: Any
) -> None:
    """Neither a trace nor the graph of a run shows what a level around knows of it."""

    def around(x: Tensor) -> Tensor:
        pull: Any = vjp(torch.sin, x)[1]
        values = iter([x.cos()])

        def function(y: Tensor) -> Tensor:
            found = pull(y)[0] if hidden == "in a graph" else next(values) * y
            return (found * y).sum()

        return grad(remat(function, engine=engine))(torch.ones(4))

    with pytest.raises(CapturedTensorError, match=rf"[Ii]ts {lost} would be lost"):
        AROUND[lost](around)


@pytest.mark.filterwarnings("ignore:.*runs the function again:remat.RematWarning")
@pytest.mark.parametrize("engine", ["rerun", "auto"])
@pytest.mark.parametrize(
    "nest",
    [grad, lambda f: grad(grad(f)), jacfwd],
    ids=["grad", "grad(grad)", "jacfwd"],
)
def test_a_captured_pullback_runs_again(
    nest: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]],
    engine: Any,
) -> None:
    """Where nothing around differentiates or maps what it holds."""
    pull: Any = vjp(lambda x: x**3, torch.tensor(2.0))[1]

    def function(y: Tensor) -> Tensor:
        return pull(y)[0] * y * y

    y = torch.tensor(1.5)
    assert_close(nest(remat(function, engine=engine))(y), nest(function)(y))


def test_what_a_stack_derives_from_is_checked_for_other_tensors() -> None:
    """A function of operands alone: one that rests on more, or leaves more, raises."""
    w, x = seeded(4).requires_grad_(), seeded(4, seed=1).requires_grad_()
    kept: list[Tensor] = []

    def leaving(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        kept.append(tensors[0].exp())
        return [tensors[0].sin()]

    def run(function: Flat) -> Tensor:
        region = rerun_of(function, (True,), (True,))
        (found,) = bind(Call(region, (), Numerics.current()), [x])
        assert found is not None
        return found

    with pytest.raises(CapturedTensorError, match="cannot be followed"):
        run(lambda tensors: [torch.sin(tensors[0] * w)])
    y = run(leaving)
    with pytest.raises(CapturedTensorError, match="stored somewhere"):
        (y + kept[0]).sum().backward()


class WithoutWeight(torch.autograd.Function):
    """Gives its second operand no gradient, as a fused kernel does that adds it elsewhere."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, w = args
        ctx.save_for_backward(w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0] @ ctx.saved_tensors[0].T, None


def product_without(x: Tensor, w: Tensor) -> Tensor:
    apply: Any = WithoutWeight.apply
    return apply(x.sin(), w)


def sum_with(x: Tensor, w: Tensor) -> Tensor:
    return x.sin() + w


@pytest.mark.contract
@pytest.mark.parametrize("fun", [product_without, sum_with])
def test_a_gradient_that_is_none(fun: Any) -> None:
    """An optimizer skips a parameter without one, and decays one with zeros.

    One function gives none, the other no second one.
    """

    def gradients(fun: Any) -> list[Any]:
        x, w = seeded(3, 3).requires_grad_(), seeded(3, 3).requires_grad_()
        fun(x, w).sum().backward()
        y = fun(x, w).sum()
        how: Any = {"allow_unused": True, "create_graph": True}
        once: Any = torch.autograd.grad(y, [x, w], **how)
        return [
            x.grad,
            w.grad,
            *once,
            *torch.autograd.grad(once[0].sum(), [x, w], **how),
        ]

    assert_bitwise(gradients(remat(fun, engine="rerun")), gradients(fun))
