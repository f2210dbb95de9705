"""Law 1, same numbers: cotangents that are zero, infinite, constant, or laid out unusually.

"Without lossy storage, the outputs of one call, and the contributions it makes to
gradients given its cotangents, are bitwise those of `fun` under `.backward()` on a CPU."
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import remat
from tests.laws.derivatives import second
from tests.support import assert_bitwise, assert_close, grads, seeded

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


@pytest.mark.contract
@pytest.mark.parametrize("name", ["ceil", "sign", "zeros_like"])
def test_a_derivative_that_needs_no_cotangent(name: str) -> None:
    """Where a gradient is zero whatever comes back, a cotangent of it still comes."""
    fun = getattr(torch, name)
    x = seeded(3, 4)

    def around(inner: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda x: inner(x) * x

    region: Any = remat(lambda x: fun(x) + 0 * x)
    found = second(around(region))(x)

    assert_close(found, second(around(lambda x: fun(x) + 0 * x))(x))
    bare: Any = remat(fun)
    assert_close(second(bare)(x), second(fun)(x))


@pytest.mark.contract
@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("cotangent", [-2.0, float("inf")])
def test_the_derivative_of_the_largest(name: str, cotangent: float) -> None:
    """Zeros are zeros whatever their sign, or an infinite cotangent, would make of them."""
    fun = getattr(torch, name)
    args, cotangents = [seeded(3, 4).round()], [torch.tensor(cotangent).double()]

    assert_bitwise(grads(remat(fun), args, cotangents), grads(fun, args, cotangents))


@pytest.mark.contract
def test_a_cotangent_that_is_a_constant() -> None:
    """No derivative by it is traced: some backwards have none, and need none."""
    table = seeded(5, 3)

    def bag(table: Tensor) -> Tensor:
        words = torch.tensor([[0, 2, 2], [4, 1, 0]])
        return F.embedding_bag(words, table.exp(), mode="max")

    def curved(fun: Callable[..., Any]) -> Tensor:
        first = torch.func.grad(lambda x: fun(x).sum())
        return torch.func.grad(lambda x: first(x).sin().sum())(table)

    assert_close(curved(remat(bag)), curved(bag))


@pytest.mark.contract
def test_a_captured_output_under_an_unusual_cotangent() -> None:
    """A captured tensor that is returned as it is is known when a backward is traced."""
    weight = seeded(3, seed=1).requires_grad_()

    def fun(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + x, weight

    def gradient(fun: Callable[..., Any]) -> Any:
        x = seeded(2, 3).requires_grad_()
        outputs = fun(x)
        cotangents = [seeded(3, 2).mT, seeded(6)[::2]]
        return torch.autograd.grad(outputs, [x, weight], cotangents)

    assert_bitwise(gradient(remat(fun)), gradient(fun))
