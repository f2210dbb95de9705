"""An associative scan that is one operator; on a CPU torch has it from 2.14 on."""

from collections.abc import Callable

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
