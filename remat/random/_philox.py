"""Philox4x32-10 in int64 arithmetic, for devices on which torch has no kernel of it.

The generator is a keyed bijection of 128-bit counters [1]: ten rounds of two 32-bit
multiplications whose high and low halves are exchanged and mixed with the key. Words of
32 bits are held in int64, so that one product keeps both of its halves; its sign bit is
no harm, because products wrap and shifts are masked.

The counter of a key `(seed, offset)` is the 64-bit offset in its two low words and zero
in the others, as in torch's own stateless kernels (ATen/cpu/StatelessPhilox4x32.h).

A stream is drawn in pieces that stay in cache, cut at whole blocks of four words: the key of
a piece is the key of the stream with its offset advanced.

References:
    [1] Parallel Random Numbers: As Easy as 1, 2, 3. J. K. Salmon, M. A. Moraes,
    R. O. Dror, D. E. Shaw, SC'11, 2011. https://doi.org/10.1145/2063384.2063405
    (section 3.3: Philox; the constants are those of its Random123 library).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_ROUNDS = 10
_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
# The golden ratio and sqrt(3) - 1, as 32-bit fractions.
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]

# Blocks a piece. On a CPU an int64 buffer of this length is 128 KiB: the six of the rounds
# stay in a core's second-level cache, and calling an operator costs little beside its
# work. Other devices want longer kernels. Both numbers are heuristics.
_CPU_BLOCKS = 1 << 14
_DEVICE_BLOCKS = 1 << 18

Tile = tuple[slice, int, int]


def scramble(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """The ten rounds, on int64 tensors of one shape with numbers in [0, 2**32).

    The counter is overwritten; the key's two words broadcast to it.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    p0, p1 = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(_ROUNDS):
        torch.mul(c0, _MULTIPLIERS[0], out=p0)
        torch.mul(c2, _MULTIPLIERS[1], out=p1)
        _mix(p1, c1, k0, out=c0)
        _mix(p0, c3, k1, out=c2)
        # The low halves become words 1 and 3. Their upper bits are never multiplied:
        # masking them at the end is enough.
        c1, c3, p0, p1 = p1, p0, c3, c1
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1.bitwise_and_(_LOW), c2, c3.bitwise_and_(_LOW)


def _mix(product: Tensor, word: Tensor, key: Tensor, out: Tensor) -> None:
    """The high half of a product, xor a word, xor the key."""
    torch.bitwise_right_shift(product, 32, out=out)
    out.bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(_LOW)


def block(seed: int, offset: int) -> tuple[int, int, int, int]:
    """One block in Python's integers: for a key or two a hundred times faster than small tensors."""
    c0, c1, c2, c3 = offset & _LOW, offset >> 32 & _LOW, 0, 0
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW
        c2, c3 = (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def blocks(keys: Tensor, first: int, count: int) -> Words:
    """`count` blocks of four words from each stream, from the block `first` on.

    int64 (key, 2), the bits of (seed, offset) -> four int64 (key, count) in [0, 2**32).
    """
    seed, offset = keys[:, :1], keys[:, 1:]
    # Sums of int64 wrap as those of uint64 do.
    position = offset + torch.arange(first, first + count, device=keys.device)
    low, high = position & _LOW, (position >> 32) & _LOW
    counter = (low, high, torch.zeros_like(low), torch.zeros_like(low))
    return scramble(counter, (seed & _LOW, (seed >> 32) & _LOW))


def blocks_of_piece(device: torch.device) -> int:
    """The most blocks that are drawn at once; of a device that is not known yet, as on a CPU."""
    return _CPU_BLOCKS if device.type in ("cpu", "meta") else _DEVICE_BLOCKS


def tiles(num_keys: int, num_blocks: int, device: torch.device) -> Iterator[Tile]:
    """Covers (key, block) by rectangles: a slice of keys, the first block, their number."""
    if num_keys == 0 or num_blocks == 0:
        return
    limit = blocks_of_piece(device)
    width = min(num_blocks, limit)
    height = max(1, limit // width)
    for row in range(0, num_keys, height):
        for first in range(0, num_blocks, width):
            yield slice(row, row + height), first, min(width, num_blocks - first)


def as_int64(value: int) -> int:
    """The int64 with the bits of a uint64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def advanced(keys: Tensor, blocks: int | Tensor) -> Tensor:
    """The keys of the same streams, uint64 (..., 2), `blocks` blocks further on."""
    # torch 2.13 cannot add uint64 on a CPU; int64 wraps to the same bits.
    moved = keys.view(torch.int64).clone()
    moved[..., 1] += blocks
    return moved.view(torch.uint64)
