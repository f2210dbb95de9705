"""Stateless draws from keys.

Obsolete when `torch.func._random` becomes public.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools

import torch
from torch import Tensor

_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}


_PHILOX = (
    "_philox_key_split",
    "_philox_uniform_",
    "_philox_normal_",
    "_philox_randint_",
)


@functools.cache
def has_philox(device_type: str) -> bool:
    """Whether torch has stateless kernels for a kind of device; for CPUs since 2.15.

    Obsolete, with all that draws without them, when the oldest supported torch has them
    on every device.
    """
    return device_type in _DISPATCH_KEYS and all(
        hasattr(torch.ops.aten, name)
        and torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{name}", _DISPATCH_KEYS[device_type]
        )
        for name in _PHILOX
    )


def philox_split(keys: Tensor, num: int) -> Tensor:
    """Keys of shape (key, 2) -> (num, key, 2).

    This and the three below are obsolete when `torch.func._random` becomes public.
    """
    return torch.ops.aten._philox_key_split(keys, num)


def philox_uniform(out: Tensor, keys: Tensor, low: float, high: float) -> Tensor:
    """Fills (key, number) from keys of shape (key, 1, 2)."""
    return torch.ops.aten._philox_uniform_(out, keys, low, high)


def philox_normal(out: Tensor, keys: Tensor, mean: float, std: float) -> Tensor:
    """Fills (key, number) from keys of shape (key, 1, 2)."""
    return torch.ops.aten._philox_normal_(out, keys, mean, std)


def philox_integers(out: Tensor, keys: Tensor, low: int, span: int) -> Tensor:
    """Fills (key, number) from keys of shape (key, 1, 2)."""
    info = torch.iinfo(out.dtype)
    end = low + span
    # A bound goes as the int64 with its bits; None is the end of the dtype's range.
    bounds = [value - (1 << 64) * (value >= 1 << 63) for value in (low, end)]
    high = None if end == info.max + 1 else bounds[1]
    return torch.ops.aten._philox_randint_(out, keys, bounds[0], high)
