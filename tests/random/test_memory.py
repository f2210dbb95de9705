"""What a draw holds beside its result: pieces of a fixed size."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import random
from remat.random import _native, _ops, _portable
from remat.reporting import LiveBytes

COUNT = 1 << 22
KEY = random.key(1)

# Kernels are called below their operators, where the mode sees what they do.
KERNELS: dict[str, tuple[Callable[[], Tensor], int]] = {
    "uniform": (lambda: _ops._uniform_op(KEY, [COUNT], 0.0, 2.0, torch.float32), 1536),
    "uniform float64": (
        lambda: _ops._uniform_op(KEY, [COUNT], 0.0, 1.0, torch.float64),
        1281,
    ),
    "normal": (lambda: _ops._normal_op(KEY, [COUNT], 0.0, 1.0, torch.float32), 1408),
    "normal float16": (
        lambda: _ops._normal_op(KEY, [COUNT], 0.0, 1.0, torch.float16),
        1408,
    ),
    "integers": (lambda: _ops._integers_op(KEY, [COUNT], 0, 8, torch.int32), 1536),
    "integers 64": (lambda: _ops._integers_op(KEY, [COUNT], 0, 8, torch.int64), 2080),
    "bernoulli": (lambda: _ops._mask_op(KEY, [COUNT], 0.5, 1.0, torch.bool), 1536),
    "dropout": (lambda: _ops._mask_op(KEY, [COUNT], 0.5, 2.0, torch.float32), 1280),
}


def extra_kib(
    kernel: Callable[[], Tensor], implementation: ModuleType, monkeypatch: Any
) -> tuple[float, float]:
    """The most that lived beside the result, and the result, in KiB."""
    monkeypatch.setattr(_ops, "_native_or_portable", lambda _: implementation)
    with LiveBytes() as live:
        drawn = kernel()
    size = drawn.untyped_storage().nbytes()
    return (live.peak_bytes - size) / 1024, size / 1024


@pytest.mark.parametrize(("kernel", "known"), KERNELS.values(), ids=KERNELS)
def test_without_torchs_kernels(
    kernel: Callable[[], Tensor], known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About 1.5 MiB of workspace, whatever the size: at most twice the result here."""
    extra, size = extra_kib(kernel, _portable, monkeypatch)

    assert extra <= known + 1  # besides a few scalars
    assert size + extra <= 2 * size


@pytest.mark.contract
@pytest.mark.skipif(not _native.has_kernels("cpu"), reason="torch 2.15 has the kernels")
@pytest.mark.parametrize("name", KERNELS)
def test_with_torchs_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, or the piece of uniform numbers that a mask is made of."""
    extra, _ = extra_kib(KERNELS[name][0], _native, monkeypatch)

    assert extra <= (512 if name == "bernoulli" else 1)


@pytest.mark.contract
def test_a_dropout_holds_its_factor_once() -> None:
    """A plain call: result and factor; nothing of the draw remains."""
    x = torch.ones(COUNT)

    with LiveBytes() as live:
        found = random.dropout(KEY, x, 0.5)

    assert live.current_bytes == found.nbytes
    assert live.peak_bytes == 2 * found.nbytes
