"""The distributions of torch's stateless kernels, on words from `_philox`.

Uniform numbers and integers are torch's to the last bit. Normal numbers come from the same words
by the same formula (Box and Muller [1]); they agree with torch's kernel to a few units in the last
place, because that one calls the machine's scalar `log`, `sin` and `cos`, which differ from the
vectorized ones in their last bit, and from one C library to the next.

References:
    [1] A Note on the Generation of Random Normal Deviates. G. E. P. Box, M. E. Muller,
    Annals of Mathematical Statistics 29(2), 1958.
    https://doi.org/10.1214/aoms/1177706645
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from remat.random._philox import Words, as_int64, block, blocks, blocks_of_piece, tiles

_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_STEP = 2.0**-32
# What a piece holds beside its result, at the most: for each block, one of 64-bit integers, and key.
_BYTES_OF_BLOCK, _BYTES_OF_LONG_BLOCK, _BYTES_OF_KEY = 96, 114, 16
_FEW_KEYS = 32  # a heuristic: from here on tensors are faster than Python


def workspace_bytes(
    num_keys: int, count: int, dtype: torch.dtype, device: torch.device
) -> int:
    """The most that a draw holds beside its result, of so many numbers for each key: a piece's."""
    is_long = dtype.itemsize == 8
    # A key begins with a block of its own.
    num_blocks = num_keys * -(-count // (2 if is_long else 4))
    is_integer = is_long and not dtype.is_floating_point
    of_block = _BYTES_OF_LONG_BLOCK if is_integer else _BYTES_OF_BLOCK
    most = blocks_of_piece(device)
    return min(num_blocks, most) * of_block + min(num_keys, most) * _BYTES_OF_KEY


def split(keys: Tensor, num: int) -> Tensor:
    """`num` keys from each by `_philox`: uint64 (key, 2) -> uint64 (key, num, 2)."""
    if keys.device.type == "cpu" and keys.shape[0] * num <= _FEW_KEYS:
        return _split_few(keys, num)
    w0, w1, w2, w3 = blocks(keys.view(torch.int64), 0, num)
    pairs = (w0 | (w1 << 32), w2 | (w3 << 32))
    return torch.stack(pairs, dim=-1).view(torch.uint64)


def _split_few(keys: Tensor, num: int) -> Tensor:
    pairs: list[list[int]] = cast("Any", keys).tolist()
    words = [
        block(seed, offset + place) for seed, offset in pairs for place in range(num)
    ]
    derived = [(w0 | w1 << 32, w2 | w3 << 32) for w0, w1, w2, w3 in words]
    return torch.tensor(derived, dtype=torch.uint64).view(-1, num, 2)


def uniform(out: Tensor, keys: Tensor, low: float, high: float) -> Tensor:
    """Fills `out`, floating of shape (key, number), from [low, high) by `_philox`."""
    digits = _DIGITS[out.dtype]
    computed = torch.float64 if digits == 53 else torch.float32
    # Bounds are rounded to the dtype of the result, and narrow dtypes computed in
    # float32, as torch's kernel does.
    start, end = torch.tensor([low, high], dtype=out.dtype, device=out.device)
    scale = (end - start).to(computed)
    is_unit = (low, high) == (0.0, 1.0)

    def sample(words: Words) -> Tensor:
        whole = _interleaved(_pairs(words) if digits == 53 else words)
        found = whole.bitwise_and_((1 << digits) - 1).to(computed).mul_(2.0**-digits)
        return found if is_unit else found.mul_(scale).add_(start)

    return _fill(out, keys, sample)


def normal(out: Tensor, keys: Tensor, mean: float, std: float) -> Tensor:
    """Fills `out`, floating of shape (key, number), with normal numbers by `_philox`."""

    def sample(words: Words) -> Tensor:
        if out.dtype == torch.float64:
            found = _box_muller(_fraction(*words[:2]), _fraction(*words[2:]))
        else:
            u = [word.to(torch.float32).mul_(_STEP).add_(_STEP / 2) for word in words]
            found = [*_box_muller(*u[:2]), *_box_muller(*u[2:])]
        found = _interleaved(found)
        return found if (mean, std) == (0.0, 1.0) else found.mul_(std).add_(mean)

    return _fill(out, keys, sample)


def _box_muller(u: Tensor, v: Tensor) -> list[Tensor]:
    """sqrt(-2 log u) (cos 2 pi v, sin 2 pi v), for u and v in (0, 1]; overwrites both."""
    radius = u.log_().mul_(-2.0).sqrt_()
    angle = v.mul_(2.0 * math.pi)
    return [angle.cos().mul_(radius), angle.sin_().mul_(radius)]


def _fraction(high: Tensor, low: Tensor) -> Tensor:
    """(high + low / 2**32 + 2**-33) / 2**32 in float64, rounded once."""
    small = low.to(torch.float64).mul_(_STEP * _STEP).add_(_STEP * _STEP / 2)
    return high.to(torch.float64).mul_(_STEP).add_(small)


def integers(out: Tensor, keys: Tensor, low: int, span: int) -> Tensor:
    """Fills `out`, integers of shape (key, number), from low + [0, span) by `_philox`.

    Where `span` is all of the dtype's range, `low` is not added.
    """
    is_long = out.element_size() == 8
    is_full = span == 1 << 8 * out.element_size()

    def sample(words: Words) -> Tensor:
        bits = _interleaved(_pairs(words) if is_long else words)
        if is_full:
            return bits
        rest = _remainder(bits, span) if is_long else bits.remainder_(span)
        return rest.add_(as_int64(low))

    return _fill(out, keys, sample)


def _remainder(bits: Tensor, span: int) -> Tensor:
    """Unsigned `bits % span` of int64 bit patterns."""
    if span & (span - 1) == 0:
        return bits & as_int64(span - 1)
    if span > 1 << 63:
        # At most one span fits; comparing without sign is comparing with it flipped.
        flipped = bits ^ as_int64(1 << 63)
        return torch.where(
            flipped < as_int64(span ^ (1 << 63)), bits, bits - as_int64(span)
        )
    rest = (bits & ((1 << 63) - 1)) % span
    carry = (1 << 63) % span
    # The sum rest + carry may not fit: go round the end before it is taken.
    wrapped = torch.where(rest >= span - carry, rest - (span - carry), rest + carry)
    return torch.where(bits < 0, wrapped, rest)


def _pairs(words: Words) -> list[Tensor]:
    """Two draws of 64 bits from four words of a block."""
    return [(words[0] << 32) | words[1], (words[2] << 32) | words[3]]


def _interleaved(parts: Sequence[Tensor]) -> Tensor:
    """Parts of shape (key, block) -> (key, block * part), block by block.

    What follows runs on whole rows: on each part alone it would take three times as long.
    """
    return torch.stack(list(parts), dim=-1).flatten(1)


def _fill(out: Tensor, keys: Tensor, sample: Callable[[Words], Tensor]) -> Tensor:
    """Writes what `sample` makes of each piece of the streams into rows of `out`."""
    each = 2 if out.element_size() == 8 else 4
    bits = keys.view(torch.int64)
    num_blocks = -(-out.shape[1] // each)
    for rows, first, count in tiles(out.shape[0], num_blocks, out.device):
        found = sample(blocks(bits[rows], first, count))
        target = out[rows, first * each : (first + count) * each]
        target.copy_(found[:, : target.shape[1]])
        del found  # before the next piece is drawn
    return out
