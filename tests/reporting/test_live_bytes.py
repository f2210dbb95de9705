"""Live bytes count what operators make, each storage once, and nothing that was there."""

from typing import Any

import pytest
import torch

from remat import remat
from remat.reporting import LiveBytes


def test_a_storage_counts_once_and_while_it_lives():
    """Views add nothing, and a dead tensor's bytes go."""
    with LiveBytes() as live:
        x = torch.zeros(1024)
        view = x.view(32, 32).t()
        assert live.current_bytes == 4096
        del x
        assert live.current_bytes == 4096
        del view
        assert live.current_bytes == 0

    assert live.peak_bytes == 4096


def test_what_autograd_saves_under_torch_func_is_seen():
    """Between forward and backward of exp, its output lives, also under vjp."""
    x = torch.zeros(256)

    with LiveBytes() as live:
        loss_and_pullback = torch.func.vjp(lambda t: t.exp().sum(), x)
        held = live.current_bytes
        del loss_and_pullback

    assert held == 1024 + 4
    assert live.current_bytes == 0


def test_what_was_there_does_not_count():
    """What an operator is given does not count, not even through a view or in place."""
    x = torch.zeros(256)

    with LiveBytes() as live:
        x.view(16, 16).add_(1)

    assert live.peak_bytes == 0


def test_a_trace_does_not_count():
    """The first call of a region, which traces it, peaks where the second does."""
    f, x = remat(lambda x: x.exp().sin().sum()), torch.zeros(256)

    peaks: list[int] = []
    for _ in range(2):
        with LiveBytes() as live:
            torch.func.grad(f)(x)
        peaks.append(live.peak_bytes)

    assert peaks[0] == peaks[1] > 0


@pytest.mark.contract
@pytest.mark.parametrize(
    ("op", "expected"), [(torch.ops.aten.mul.Scalar, 0), (torch.ops.aten.add.Scalar, 2)]
)
def test_zeros_without_memory_are_no_fault(op: Any, expected: int):
    """Torch reads their memory where any dispatch mode is on: a segmentation fault."""
    made: Any = torch.ops.aten._efficientzerotensor
    zero = made([3], dtype=torch.float64)

    with LiveBytes():
        found = op(zero, 2)

    assert found.dtype is torch.float64
    assert found.tolist() == [expected] * 3
