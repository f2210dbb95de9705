"""An associative scan that is one operator; on a CPU torch has it from 2.14 on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan

from remat import remat
from tests.support import assert_bitwise, assert_close, seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]

Pair = tuple[Tensor, Tensor]


def products(x: Tensor) -> Tensor:
    return associative_scan(torch.mul, x, 0, combine_mode="pointwise")


def test_gradients_are_those_of_plain_torch() -> None:
    x, region = seeded(3, 2).requires_grad_(), remat(products)
    for _ in range(2):
        found, expected = region(x), products(x)
        assert_bitwise(found, expected)
        assert_bitwise(
            torch.autograd.grad(found.sin().sum(), x),
            torch.autograd.grad(expected.sin().sum(), x),
        )
    assert region.programs(x)[0].operators.count("associative_scan") == 1


def test_a_second_derivative_is_right() -> None:
    def second(fun: Callable[[Tensor], Tensor]) -> Tensor:
        def first(x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: fun(x).sin().sum())(x).sin().sum()

        return torch.func.grad(first)(seeded(3, 3))

    assert_close(second(remat(products)), second(lambda x: x.cumprod(0)))


def recurrence(decay: Tensor, x: Tensor) -> Tensor:
    """`h = decay * h + x` at each step: each pair has the product of decays, and what is added."""

    def combine(left: Pair, right: Pair) -> Pair:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return associative_scan(combine, (decay, x), 0, combine_mode="pointwise")[1]


def loop(decay: Tensor, x: Tensor) -> Tensor:
    """The same, step by step."""
    state, found = torch.zeros_like(x[0]), []
    for each, new in zip(decay, x, strict=True):
        state = each * state + new
        found.append(state)
    return torch.stack(found)


@pytest.mark.parametrize("order", [1, 2])
def test_a_function_that_mixes_its_leaves_has_its_whole_gradient(order: int) -> None:
    """torch's own takes the decays for independent of what is added."""

    def derivative(fun: Callable[[Tensor, Tensor], Tensor]) -> Any:
        args = seeded(4, 3).requires_grad_(), seeded(4, 3, seed=1).requires_grad_()
        out = fun(*args)
        for _ in range(order):
            found = torch.autograd.grad(out.sin().sum(), args, create_graph=True)
            out = torch.stack(found)
        return out

    assert_close(derivative(remat(recurrence)), derivative(loop))


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch 2.15 can map it")
@pytest.mark.parametrize(
    "scan", [lambda _, x: products(x), recurrence], ids=["products", "recurrence"]
)
def test_a_gradient_of_a_mapped_one_is_right(scan: Callable[..., Tensor]) -> None:
    """A map of torch's own puts the graph of a function of one row around several rows."""

    def gradient(fun: Callable[..., Tensor]) -> Any:
        args = seeded(2, 4, 3), seeded(2, 4, 3, seed=1)
        return torch.func.grad(lambda x: torch.func.vmap(fun)(args[0], x).sin().sum())(
            args[1]
        )

    step_by_step = loop if scan is recurrence else lambda _, x: x.cumprod(0)
    assert_close(gradient(remat(scan)), gradient(step_by_step))
