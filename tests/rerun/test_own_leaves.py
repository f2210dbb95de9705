"""`engine="rerun"`: a leaf that the function makes for itself and returns is no captured tensor."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import CapturedTensorError, remat
from tests.support import assert_bitwise, seeded

pytestmark = pytest.mark.contract


def beside(x: Tensor) -> tuple[Tensor, Tensor]:
    """As VectorQuantize returns its loss while it does not train."""
    return x.sin(), torch.zeros((), dtype=x.dtype, requires_grad=True)


def used(x: Tensor) -> tuple[Tensor, Tensor]:
    bias = torch.ones(4, dtype=x.dtype).requires_grad_()
    return (x + bias).sin(), bias


def as_parameter(x: Tensor) -> tuple[Tensor, Tensor]:
    weight = nn.Parameter(torch.full((4,), 2.0, dtype=x.dtype))
    return (x * weight).sin(), weight * 2


def from_argument(x: Tensor) -> tuple[Tensor, Tensor]:
    anchor = x.detach().requires_grad_()
    return (x * anchor).sin(), anchor


@pytest.mark.parametrize("fun", [beside, used, as_parameter, from_argument])
def test_it_is_returned_and_the_argument_gets_its_gradient(fun: Any) -> None:
    """Outputs and gradients are plain's."""
    x = seeded(4).requires_grad_()
    y = seeded(4).requires_grad_()
    expected, own = fun(x)
    region: Any = remat(fun, engine="rerun")
    found, returned = region(y)

    assert_bitwise([found, returned], [expected, own])
    assert returned.requires_grad
    (expected.sum() + own.sum()).backward()
    (found.sum() + returned.sum()).backward()
    assert_bitwise(y.grad, x.grad)


HELD = seeded(4).requires_grad_()
HIDDEN = itertools.repeat(HELD)


def test_a_tensor_that_comes_from_outside_is_none_of_its_own() -> None:
    """Nor is one that it only makes a leaf of: its gradient would be lost."""
    late = itertools.repeat(seeded(4))

    for fun in (
        lambda x: (x.sin(), next(HIDDEN)),
        lambda x: (x.sin() * next(late).requires_grad_(), next(late)),
    ):
        with pytest.raises(CapturedTensorError):
            remat(fun, engine="rerun")(seeded(4).requires_grad_())
