"""`Numerics.applied`: the switches of a trace, and nothing of it left behind."""

import contextlib

import pytest
import torch
from torch import Tensor

from remat._switches.numerics import Numerics
from tests.support import assert_bitwise, seeded

pytestmark = pytest.mark.contract


def in_bfloat16(x: Tensor, w: Tensor) -> Tensor:
    return x.bfloat16() @ w.detach().bfloat16()


@pytest.mark.parametrize("way", ["returns", "raises"])
def test_casts_of_weights_do_not_outlive_the_body(way: str) -> None:
    """Autocast keeps them by the weight, and takes no note of a later change of it."""
    x = seeded(2, 3, dtype=torch.float32)
    w = seeded(3, 3, dtype=torch.float32).requires_grad_()

    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        inside = None
        with contextlib.suppress(ZeroDivisionError), Numerics.current().applied():
            inside = x @ w
            _ = 1 // (way == "returns")
        expected = in_bfloat16(x, w)
        with torch.no_grad():
            w.mul_(2)
        after = x @ w

    assert inside is not None
    assert_bitwise(inside.detach(), expected)
    assert_bitwise(after.detach(), in_bfloat16(x, w))


def test_casts_of_weights_do_not_enter_the_body() -> None:
    """The body's weights are others than the caller's, under the same autocast."""
    x = seeded(2, 3, dtype=torch.float32)
    w = seeded(3, 3, dtype=torch.float32).requires_grad_()

    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        _ = x @ w
        with torch.no_grad():
            w.mul_(2)
        with Numerics.current().applied():
            inside = x @ w

    assert_bitwise(inside.detach(), in_bfloat16(x, w))
