"""Torch's own stateless kernels, where it has them and they draw the agreed streams.

That is asked of the device, not of the version of torch: a CPU got these kernels in
torch 2.15, and on other devices older ones may draw other numbers.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from remat import _compat
from remat.random import _portable


def serves(device: torch.device) -> bool:
    """Whether torch's kernels for a device can be used."""
    return _compat.has_philox(device.type) and _agrees(device)


@functools.cache
def _agrees(device: torch.device) -> bool:
    """Whether a few numbers of each kind are those of the portable implementation."""
    # The offset is next to where its low word overflows.
    keys = torch.tensor([[7, 2**32 - 2], [2**63 + 5, 1]], dtype=torch.uint64)
    keys = keys.to(device)
    out = torch.empty(2, 9, device=device)
    found = [uniform(out, keys, 0.0, 1.0).clone(), normal(out, keys, 0.0, 1.0).clone()]
    known = [
        _portable.uniform(out, keys, 0.0, 1.0).clone(),
        _portable.normal(out, keys, 0.0, 1.0).clone(),
    ]
    return (
        torch.equal(found[0], known[0])
        and torch.allclose(found[1], known[1], rtol=1e-5, atol=1e-6)
        and torch.equal(
            split(keys, 3).view(torch.int64), _portable.split(keys, 3).view(torch.int64)
        )
    )


def split(keys: Tensor, num: int) -> Tensor:
    """`num` keys from each: uint64 (key, 2) -> uint64 (key, num, 2)."""
    return _compat.philox_split(keys, num).transpose(0, 1).contiguous()


def uniform(out: Tensor, keys: Tensor, low: float, high: float) -> Tensor:
    """Fills `out`, floating of shape (key, number), with numbers from [low, high)."""
    return _compat.philox_uniform(out, keys[:, None], low, high)


def normal(out: Tensor, keys: Tensor, mean: float, std: float) -> Tensor:
    """Fills `out`, floating of shape (key, number), with normal numbers."""
    return _compat.philox_normal(out, keys[:, None], mean, std)


def integers(out: Tensor, keys: Tensor, low: int, span: int) -> Tensor:
    """Fills `out`, integers of shape (key, number), with numbers from low + [0, span)."""
    return _compat.philox_integers(out, keys[:, None], low, span)
