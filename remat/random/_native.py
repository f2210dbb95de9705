"""Torch's own stateless kernels, where it has them and they draw the agreed streams.

That is asked of the device, not of the version of torch: a CPU got these kernels in
torch 2.15, and on other devices older ones may draw other numbers.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remat._torch import schemas
from remat.random import _portable
from remat.random._philox import as_int64

_aten = torch.ops.aten
_KERNELS = ("key_split", "uniform_", "normal_", "randint_")

# (out, keys, two bounds or moments) -> out
_Draw = Callable[[Tensor, Tensor, Any, Any], Tensor]


def serves(device: torch.device) -> bool:
    """Whether torch's kernels for a device can be used."""
    return has_kernels(device.type) and _agrees(device)


@functools.cache
def has_kernels(device_type: str) -> bool:
    """Whether torch has stateless kernels for a kind of device; for CPUs since 2.15.

    Obsolete, with all that draws without them, when the oldest supported torch has them
    on every device.
    """
    return all(
        hasattr(_aten, f"_philox_{name}")
        and schemas.has_kernel_on(device_type, f"aten::_philox_{name}")
        for name in _KERNELS
    )


@functools.cache
def _agrees(device: torch.device) -> bool:
    """Whether a few numbers of each kind are those of the portable implementation."""
    # The offset is next to where its low word overflows.
    keys = torch.tensor([[7, 2**32 - 2], [2**63 + 5, 1]], dtype=torch.uint64)
    keys = keys.to(device)

    def drawn(by: _Draw, dtype: torch.dtype, first: float, second: float) -> Tensor:
        return by(torch.empty(2, 9, dtype=dtype, device=device), keys, first, second)

    kinds = [
        (uniform, _portable.uniform, torch.float32, (0.0, 1.0)),
        (integers, _portable.integers, torch.int32, (-5, 1000)),
        (integers, _portable.integers, torch.int64, (-5, 10**15)),
    ]
    normals = [drawn(by, torch.float32, 0.0, 1.0) for by in (normal, _portable.normal)]
    halves = [by(keys, 3).view(torch.int64) for by in (split, _portable.split)]
    return (
        torch.equal(*halves)
        and all(
            torch.equal(drawn(own, dtype, *bounds), drawn(known, dtype, *bounds))
            for own, known, dtype, bounds in kinds
        )
        and torch.allclose(*normals, rtol=1e-5, atol=1e-6)
    )


def split(keys: Tensor, num: int) -> Tensor:
    """`num` keys from each by torch's kernel: uint64 (key, 2) -> uint64 (key, num, 2)."""
    halves = _aten._philox_key_split  # noqa: SLF001
    return halves(keys, num).transpose(0, 1).contiguous()


def uniform(out: Tensor, keys: Tensor, low: float, high: float) -> Tensor:
    """Fills `out`, floating of shape (key, number), from [low, high) by torch's kernel."""
    return _aten._philox_uniform_(out, keys[:, None], low, high)


def normal(out: Tensor, keys: Tensor, mean: float, std: float) -> Tensor:
    """Fills `out`, floating of shape (key, number), with normal numbers by torch's kernel."""
    return _aten._philox_normal_(out, keys[:, None], mean, std)


def integers(out: Tensor, keys: Tensor, low: int, span: int) -> Tensor:
    """Fills `out`, integers of shape (key, number), from low + [0, span) by torch's kernel."""
    end = low + span
    # A bound goes as the int64 with its bits; None is the end of the dtype's range.
    high = None if end == torch.iinfo(out.dtype).max + 1 else as_int64(end)
    return _aten._philox_randint_(out, keys[:, None], as_int64(low), high)
