"""Streams in pieces that stay in cache.

A stream is cut at whole blocks of four words, so that any piece can be drawn alone: the
key of a piece is the key of the stream with its offset advanced.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Blocks a piece. On a CPU an int64 buffer of this length is 128 KiB: the six of the rounds
# stay in a core's second-level cache, and calling an operator costs little beside its
# work. Other devices want longer kernels. Both numbers are heuristics.
_CPU_BLOCKS = 1 << 14
_DEVICE_BLOCKS = 1 << 18

Tile = tuple[slice, int, int]


def tiles(num_keys: int, num_blocks: int, device: torch.device) -> Iterator[Tile]:
    """Covers (key, block) by rectangles: a slice of keys, the first block, their number."""
    if num_keys == 0 or num_blocks == 0:
        return
    limit = _CPU_BLOCKS if device.type == "cpu" else _DEVICE_BLOCKS
    width = min(num_blocks, limit)
    height = max(1, limit // width)
    for row in range(0, num_keys, height):
        for first in range(0, num_blocks, width):
            yield slice(row, row + height), first, min(width, num_blocks - first)


def advanced(keys: Tensor, blocks: int | Tensor) -> Tensor:
    """The keys of the same streams, `blocks` blocks further on.

    Args:
        keys: uint64 of shape (..., 2).
        blocks: how far, an int in the range of int64 or int64 of shape (...).

    Returns:
        Keys of the same shape; offsets wrap at 2**64.
    """
    # torch 2.13 cannot add uint64 on a CPU; int64 wraps to the same bits.
    moved = keys.view(torch.int64).clone()
    moved[..., 1] += blocks
    return moved.view(torch.uint64)
