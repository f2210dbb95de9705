"""`first_order()`: gradients that nobody differentiates hold no cotangents."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import (
    RematError,
    SecondDerivativeError,
    chain,
    checkpoint_name,
    first_order,
    modules,
    policies,
    remat,
    scan,
    schedules,
)
from tests.support import LiveBytes, assert_bitwise, seeded

pytestmark = [
    pytest.mark.contract,
    # Forward mode's first use compiles torch's own formulas with it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROWS, WIDTH = 32, 8
STATE_BYTES = 8 * ROWS * WIDTH


def block(weight: Tensor, x: Tensor) -> Tensor:
    """A residual unit with hidden values that no matmul gives."""
    return x + torch.sin(torch.tanh(torch.sin(x @ weight)) @ weight)


REGIONS: dict[str, Any] = {
    "nothing": remat(block),
    "matmuls": remat(block, policy=policies.save_matmul_outputs),
    "rerun": remat(block, engine="rerun"),
}


def weights(count: int) -> list[Tensor]:
    return [seeded(WIDTH, WIDTH, seed=k) / 8 for k in range(count)]


def loss(unit: Callable[..., Tensor], given: list[Tensor], x: Tensor) -> Tensor:
    for weight in given:
        x = unit(weight, x)
    return x.square().sum()


def gradient(unit: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """By torch.func, of all weights."""
    x = seeded(ROWS, WIDTH, seed=99)
    return torch.func.grad(lambda given: loss(unit, given, x))(given)


def peak(run: Callable[[], object]) -> int:
    run()
    with LiveBytes() as memory:
        run()
    return memory.peak


def held_by_a_layer(unit: Callable[..., Tensor]) -> int:
    """What the peak under `torch.func.grad` grows by for each layer."""
    few, many = (peak(lambda n=n: gradient(unit, weights(n))) for n in (4, 12))
    return (many - few) // 8


def test_a_layer_holds_no_cotangent() -> None:
    """With it goes the layer's input, before the gradient of its weight is there."""
    weight_bytes = 8 * WIDTH * WIDTH
    region = REGIONS["nothing"]
    every = held_by_a_layer(region)
    with first_order():
        first = held_by_a_layer(region)

    # Its input, its cotangent, its weight and the gradient of that.
    assert every == 2 * STATE_BYTES + 2 * weight_bytes
    assert first == STATE_BYTES + weight_bytes


@pytest.mark.parametrize("unit", REGIONS.values(), ids=REGIONS)
@pytest.mark.parametrize("transform", ["grad", "vmap", "jacrev", "create_graph"])
def test_first_derivatives_are_the_same_to_the_bit(unit: Any, transform: str) -> None:
    """Under every transform that takes one reverse derivative."""
    given, x = weights(2), seeded(3, 4, WIDTH, seed=5)

    def one(x: Tensor) -> Any:
        return torch.func.grad(lambda given: loss(unit, given, x))(given)

    def plainly(x: Tensor) -> Any:
        leaves = [each.clone().requires_grad_() for each in given]
        out = loss(unit, leaves, x)
        return torch.autograd.grad(out, leaves, create_graph=True)

    run: Callable[[], Any] = {
        "grad": lambda: one(x[0]),
        "vmap": lambda: torch.func.vmap(one)(x),
        "jacrev": lambda: torch.func.jacrev(lambda w: unit(w, x[0]))(given[0]),
        "create_graph": lambda: plainly(x[0]),
    }[transform]

    expected = run()
    with first_order():
        found = run()

    assert_bitwise(found, expected)


def second_by_func(unit: Any, x: Tensor) -> Any:
    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: unit(weights(1)[0], x).sum())(x).sum()

    return torch.func.grad(slope)(x)


def second_by_backward(unit: Any, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(
        unit(weights(1)[0], x).square().sum(), x, create_graph=True
    )
    return torch.autograd.grad(slope.sum(), x)


@pytest.mark.parametrize("unit", REGIONS.values(), ids=REGIONS)
@pytest.mark.parametrize("second", [second_by_func, second_by_backward])
def test_a_second_derivative_raises(unit: Any, second: Any) -> None:
    """It is never zero, and the text says what to do."""
    x = seeded(4, WIDTH)

    with (
        first_order(),
        pytest.raises(
            SecondDerivativeError,
            match=r"the gradient of a region with the operands .*: is differentiated in "
            r"reverse mode\. The region was called under first_order\(\).*Call it outside first_order\(\)",
        ) as raised,
    ):
        second(unit, x)
    assert isinstance(raised.value, RematError)

    second(unit, x)  # and outside nothing is left of it


def test_what_counts_is_where_the_region_was_called() -> None:
    """Not where its backward runs."""
    weight, x = weights(1)[0], seeded(4, WIDTH).requires_grad_()
    with first_order():
        y = REGIONS["nothing"](weight, x).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(SecondDerivativeError):
        torch.autograd.grad(slope.sum(), x)

    y = REGIONS["nothing"](weight, x).square().sum()
    with first_order():
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        torch.autograd.grad(slope.sum(), x)


@pytest.mark.parametrize("order", ["jvp of grad", "grad of jvp"])
def test_forward_mode_beside_one_reverse_derivative(order: str) -> None:
    """A Hessian-vector product has one reverse derivative."""
    weight, x, v = weights(1)[0], seeded(4, WIDTH), seeded(4, WIDTH, seed=1)

    def product(unit: Any) -> Tensor:
        def value(x: Tensor) -> Tensor:
            return unit(weight, x).square().sum()

        if order == "jvp of grad":
            return torch.func.jvp(torch.func.grad(value), (x,), (v,))[1]
        return torch.func.grad(lambda x: torch.func.jvp(value, (x,), (v,))[1])(x)

    with first_order():
        found = product(REGIONS["nothing"])

    torch.testing.assert_close(found, product(block))


def test_nested_regions_and_traces() -> None:
    """A trace that is made inside serves calls outside, second derivatives included."""
    inner = remat(block)
    outer = remat(lambda w, x: inner(w, inner(w, x)).sin())
    x = seeded(4, WIDTH)

    with first_order():
        torch.func.grad(lambda x: outer(weights(1)[0], x).sum())(x)
    found = second_by_func(outer, x)

    plain = second_by_func(lambda w, x: block(w, block(w, x)).sin(), x)
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("schedule", [None, schedules.Every(2)], ids=["", "every_2"])
def test_stacks(schedule: Any) -> None:
    """First derivatives are right, a second one raises."""
    weight, x = weights(1)[0], seeded(4, WIDTH)

    def stack(weight: Tensor, x: Tensor) -> Tensor:
        return scan(
            lambda h, _: (block(weight, h), None), x, length=4, schedule=schedule
        )[0]

    expected = torch.func.grad(lambda x: stack(weight, x).sum())(x)
    with first_order():
        assert_bitwise(torch.func.grad(lambda x: stack(weight, x).sum())(x), expected)
        with pytest.raises(SecondDerivativeError):
            second_by_func(stack, x)


def test_another_thread_has_all_orders() -> None:
    """The switch is of the thread that set it."""
    done: list[Any] = []
    x = seeded(4, WIDTH)

    with first_order():
        thread = threading.Thread(
            target=lambda: done.append(second_by_func(REGIONS["nothing"], x))
        )
        thread.start()
        thread.join()

    assert len(done) == 1


def in_place(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Regions that `modules.apply` has put into a model."""
    model = nn.Sequential(*[Unit(weight) for _ in range(2)])
    modules.apply(model, Unit)
    return model


class Unit(nn.Module):
    """A block with its weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return block(self.weight, x)


def named(weight: Tensor, x: Tensor) -> Tensor:
    """A block with a name."""
    return torch.sin(checkpoint_name(block(weight, x), "h"))


BY_NAME = policies.save_only_these_names("h")
WHOLES: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "named": lambda w: lambda x: remat(named, policy=BY_NAME)(w, x),
    "nested": lambda w: remat(
        lambda x: remat(named)(w, remat(named)(w, x)).sin(), policy=BY_NAME
    ),
    "chain": lambda w: chain([lambda x: block(w, x)] * 3),
    "scheduled_chain": lambda w: chain(
        [lambda x: block(w, x)] * 3, schedule=schedules.Revolve(2)
    ),
    "modules": in_place,
}


@pytest.mark.parametrize("name", WHOLES)
def test_whatever_regions_are_made_of(name: str) -> None:
    """The same first derivatives, once and again; a second one raises, and only there."""
    fun = WHOLES[name](weights(1)[0])
    x = seeded(4, WIDTH)
    expected = torch.func.grad(lambda x: fun(x).sum())(x)
    leaf = x.clone().requires_grad_()

    with first_order():
        found = torch.func.grad(lambda x: fun(x).sum())(x)
        out = fun(leaf).sum()
        recorded = torch.autograd.grad(out, leaf, create_graph=True)[0]
        again = torch.autograd.grad(out, leaf)[0]
        with pytest.raises(SecondDerivativeError):
            torch.autograd.grad(recorded.square().sum(), leaf)

    assert_bitwise(found, expected)
    assert_bitwise(recorded.detach(), again)
    torch.testing.assert_close(again, expected)
    second = torch.func.grad(
        lambda x: torch.func.grad(lambda x: fun(x).sum())(x).square().sum()
    )
    assert bool(second(x).abs().sum() > 0)
