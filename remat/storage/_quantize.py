"""Quantizing: a saved value waits as integers of a few bits, with a scale per group.

ActNN [1] and GACT [2] store activations this way. The rounding may be random, so that
its expectation is the value, and gradients stay unbiased ([1], section 3).

References:
    [1] ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed
    Training. J. Chen et al., 2021. https://arxiv.org/abs/2104.14129
    [2] GACT: Activation Compressed Training for Generic Network Architectures. X. Liu
    et al., 2022. https://arxiv.org/abs/2206.11357
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor

from remat._errors import refuse, require_count, require_type
from remat._graph.meta import TensorMeta
from remat.random import fold_in, uniform
from remat.random._philox import as_int64
from remat.storage._bits import pack, unpack
from remat.storage._contract import AbstractStorage, rehearsed
from remat.storage._stored import FIRST, Held, Place, Stored

_BITS = (8, 4, 2)
# In how many parts at most a value is quantized, and of how many numbers at least.
_MOST_PARTS, _LEAST_NUMBERS = 16, 2**16


@final
@dataclass(frozen=True, slots=True)
class Quantize(AbstractStorage):
    """Keeps the value as integers, with one scale for each group of numbers.

    Groups are consecutive numbers of one example, where `vmap(grad)` maps the region, unless they
    are of what another storage has made.
    A group's minimum and step are kept in bfloat16 (in float64 for float64). They are
    rounded first, so that the levels still enclose the group's numbers; then the
    numbers are rounded.

    Laws: lossy; each number comes back within one step of its group, or half a step if
    `stochastic` is off; a group with an infinity or nan comes back as nan; booleans
    come back exactly, from one bit each; integers and complex numbers are kept
    unchanged, and so are values that would need no fewer bytes.

    Args:
        bits: the bits of one number: 8, 4 or 2.
        group_size: how many numbers share a scale.
        stochastic: whether numbers are rounded at random, unbiased.
        key: the key of `remat.random` for the random rounding, or its two numbers, as
            which it is kept; None if it is off.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is out of range, or a key is missing or has no effect.

    Example:
        >>> from remat import storage
        >>> storage.Quantize(4)
        Quantize(bits=4, group_size=256, stochastic=False, key=None)
    """

    bits: int
    group_size: int = 256
    stochastic: bool = False
    key: torch.Tensor | tuple[int, ...] | None = None

    is_exact: ClassVar[bool] = False

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        """Quantizes floating numbers, packs booleans, keeps other values."""
        if value.dtype is torch.bool:
            return _in_one_bit(value)
        added = place.mapped_in(value)
        first = tuple(range(len(added)))
        examples = value.movedim(added, first)
        shape = examples.shape
        count = shape[: len(added)].numel()
        size = value.numel() // max(count, 1)
        size_bytes = -(-size * self.bits // 8)
        size_bytes += 2 * -(-size // self.group_size) * _scale_dtype(value).itemsize
        is_smaller = size_bytes < size * value.itemsize
        if not value.dtype.is_floating_point or not value.numel() or not is_smaller:
            return Stored.whole(value)
        stored = self._in_groups(examples.reshape(count, size), place.index)
        decode_rows = stored.decode  # without the parts, which a chain replaces

        def decode(parts: Sequence[Tensor]) -> Tensor:
            decoded = decode_rows(parts).view(shape)
            return decoded.movedim(first, added).contiguous()

        return Stored(stored.parts, decode)

    def _in_groups(self, examples: Tensor, index: int) -> Stored:
        """The packed numbers, the steps and the minima of the groups of each row."""
        kept, wide = _scale_dtype(examples), _wide_dtype(examples)
        rows, draws = self._rows(examples), None
        if self.key is not None:
            key = fold_in(_key_of(self.key, rows.device), index)
            draws = uniform(key, rows.shape, dtype=torch.float64)
        numbers = torch.empty_like(rows, dtype=torch.uint8)
        scales: list[tuple[Tensor, Tensor]] = []
        # In float64, of a few groups at a time: of all of them it would be several times the value.
        most = max(-(-len(rows) // _MOST_PARTS), -(-_LEAST_NUMBERS // self.group_size))
        for first in range(0, len(rows), most):
            part = slice(first, first + most)
            # Of quarters, the ranges of groups and what is computed from them are finite.
            quarters = rows[part].to(wide) * 0.25
            scales.append(self._scales(quarters, kept))
            drawn = None if draws is None else draws[part]
            numbers[part] = self._levels(quarters, *scales[-1], drawn)
        step, low = (torch.cat(each) for each in zip(*scales, strict=True))
        (count, size), dtype = examples.shape, examples.dtype
        packed = pack(numbers.view(count, -1)[:, :size].reshape(-1), self.bits)
        if packed.untyped_storage().nbytes() > packed.nbytes:
            packed = packed.clone()  # a view would keep the padding of the row too

        def decode(parts: Sequence[Tensor]) -> Tensor:
            packed, step, low = parts
            numbers = unpack(packed, self.bits, count * size).view(count, size)
            rows = self._rows(numbers.to(wide))
            decoded = rows.mul_(step.to(wide)).add_(low.to(wide))
            # The highest level may lie above the highest number.
            range_ = torch.finfo(dtype)
            decoded = decoded.clamp_(range_.min / 4, range_.max / 4).mul_(4)
            return decoded.view(count, -1)[:, :size].to(dtype).contiguous()

        return Stored((packed, step, low), decode)

    def _scales(self, quarters: Tensor, kept: torch.dtype) -> tuple[Tensor, Tensor]:
        """The steps and the minima of groups, from a quarter of their numbers."""
        low, high = quarters.aminmax(dim=1, keepdim=True)
        low = _rounded_down(low, kept)
        steps = 2**self.bits - 1
        return -_rounded_down(-(high.double() - low.double()) / steps, kept), low

    def _levels(
        self, quarters: Tensor, step: Tensor, low: Tensor, draws: Tensor | None
    ) -> Tensor:
        """The numbers of the levels, rounded to the nearest, or at random by draws."""
        places = (quarters.double() - low.double()).div_(step.double())
        places = torch.where(step > 0, places, 0.0)
        places = places.round_() if draws is None else places.add_(draws).floor_()
        return places.clamp_(0, 2**self.bits - 1).nan_to_num_()

    def _rows(self, examples: Tensor) -> Tensor:
        """Groups as rows; the last of an example is padded with its last number."""
        missing = -examples.shape[1] % self.group_size
        if missing:
            last = examples[:, -1:].expand(-1, missing)
            examples = torch.cat([examples, last], dim=1)
        return examples.view(-1, self.group_size)

    def held(self, meta: TensorMeta) -> Held:
        """What waits, for which the key does not matter; it has numbers."""
        return rehearsed(Quantize(self.bits, self.group_size), meta)

    def leaves(self, meta: TensorMeta) -> bool:
        """Whether the value would need no fewer bytes."""
        return not self.held(meta).moved_bytes

    def __post_init__(self) -> None:
        require_type("Quantize(bits=...)", self.bits, int, wanted="8, 4 or 2")
        if self.bits not in _BITS:
            raise refuse(
                "Quantize(bits=...)",
                self.bits,
                why="Only these pack evenly into bytes and keep more than the sign.",
                do="Pass 8, 4 or 2.",
            )
        require_count("Quantize(group_size=...)", self.group_size, at_least=1)
        require_type(
            "Quantize(stochastic=...)", self.stochastic, bool, wanted="True or False"
        )
        require_type(
            "Quantize(key=...)",
            self.key,
            (torch.Tensor, tuple, type(None)),
            wanted="a key of `remat.random`, or None",
        )
        if self.stochastic and self.key is None:
            raise refuse(
                "Quantize(stochastic=...)",
                self.stochastic,
                why="Random rounding needs a key, because it uses no hidden generator.",
                do="Pass `key=remat.random.key(seed)`, or `stochastic=False`.",
            )
        if self.key is not None and not self.stochastic:
            raise refuse(
                "Quantize(key=...)",
                self.key,
                why="Without `stochastic=True` the key would have no effect.",
                do="Pass `stochastic=True`, or no key.",
            )
        if self.key is not None:
            object.__setattr__(self, "key", _numbers_of(self.key))


def _numbers_of(key: Tensor | tuple[int, ...]) -> tuple[int, ...]:
    """Those of a key, which compare, hash and pickle."""
    given: Any = key
    if isinstance(key, Tensor):
        given = cast("Any", key).tolist() if key.dim() == 1 else ()
    found = tuple[Any, ...](given)
    if len(found) != 2 or any(type(n) is not int or n >> 64 for n in found):
        raise refuse(
            "Quantize(key=...)",
            key,
            why="A key is two whole numbers of 64 bits.",
            do="Pass `remat.random.key(seed)`.",
        )
    return found


def _in_one_bit(value: Tensor) -> Stored:
    shape = value.shape
    packed = pack(value.reshape(-1).view(torch.uint8), 1)
    return Stored(
        (packed,),
        lambda parts: unpack(parts[0], 1, shape.numel()).view(torch.bool).view(shape),
    )


def _key_of(numbers: Tensor | tuple[int, ...], device: torch.device) -> Tensor:
    """A key of such numbers, made on a device that nothing waits for."""
    words = [torch.full((), as_int64(int(each)), device=device) for each in numbers]
    return torch.stack(words).view(torch.uint64)


def _wide_dtype(value: Tensor) -> torch.dtype:
    """The dtype in which a value is computed with."""
    return torch.float64 if value.dtype is torch.float64 else torch.float32


def _scale_dtype(value: Tensor) -> torch.dtype:
    """The dtype in which the minima and steps of a value's groups are kept."""
    return torch.float64 if value.dtype is torch.float64 else torch.bfloat16


def _rounded_down(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The minima of groups as `dtype`: rounded, never up; nan where not finite."""
    rounded = numbers.to(dtype)
    is_above = rounded.to(numbers.dtype) > numbers
    lower = torch.nextafter(rounded, torch.full_like(rounded, -torch.inf))
    rounded = torch.where(is_above, lower, rounded)
    return torch.where(numbers.isfinite(), rounded, torch.nan)
