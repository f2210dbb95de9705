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
from typing import ClassVar, final

import torch
from torch import Tensor

from remat._graph.meta import TensorMeta
from remat.random import fold_in, uniform
from remat.storage._argument_checks import refuse, require_count, require_type
from remat.storage._bits import pack, unpack
from remat.storage._contract import AbstractStorage, rehearsed
from remat.storage._stored import FIRST, Held, Place, Stored

_BITS = (8, 4, 2)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Quantize(AbstractStorage):
    """Keeps the value as integers, with one scale for each group of numbers.

    A group's minimum and step are kept in bfloat16 (in float64 for float64). They are
    rounded first, so that the levels still enclose the group's numbers; then the
    numbers are rounded.

    Laws: lossy; each number comes back within one step of its group, or half a step if
    `stochastic` is off; a group with an infinity or nan comes back as nan; booleans
    come back exactly, from one bit each; integers and complex numbers are kept
    unchanged, and so are values that would need no fewer bytes. Two instances are equal
    if their numbers are, and if they hold the same key object: a key is a tensor, and
    tensors have no cheap equality.

    Args:
        bits: the bits of one number: 8, 4 or 2.
        group_size: how many numbers share a scale.
        stochastic: whether numbers are rounded at random, unbiased.
        key: the key of `remat.random` for the random rounding; None if it is off.

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
    key: torch.Tensor | None = None

    is_exact: ClassVar[bool] = False

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        """Quantizes floating numbers, packs booleans, keeps other values."""
        if value.dtype is torch.bool:
            return _in_one_bit(value)
        num_groups = -(-value.numel() // self.group_size)
        size_bytes = -(-value.numel() * self.bits // 8)
        size_bytes += 2 * num_groups * _scale_dtype(value).itemsize
        if not value.dtype.is_floating_point or size_bytes >= value.nbytes:
            return Stored.whole(value)
        return self._in_groups(value, place.index)

    def _in_groups(self, value: Tensor, index: int) -> Stored:
        """The packed numbers, the steps and the minima of the groups."""
        kept = _scale_dtype(value)
        wide = torch.float64 if kept is torch.float64 else torch.float32
        rows = self._rows(value.reshape(-1).to(wide))
        low, high = rows.aminmax(dim=1, keepdim=True)
        low = _rounded_down(low, kept)
        levels = 2**self.bits - 1
        # In double precision, where the difference of two single numbers is finite.
        step = -_rounded_down(-(high.double() - low.double()) / levels, kept)
        places = (rows.double() - low.double()) / step.double()
        places = torch.where(step > 0, places, 0.0)
        if self.key is None:
            places = places.round_()
        else:
            key = fold_in(self.key, index)
            draws = uniform(key, places.shape, dtype=places.dtype)
            places = places.add_(draws).floor_()
        numbers = places.clamp_(0, levels).nan_to_num_().to(torch.uint8)
        packed = pack(numbers.view(-1)[: value.numel()], self.bits)
        if packed.untyped_storage().nbytes() > packed.nbytes:
            packed = packed.clone()  # a view would keep the padding of the row too
        shape, dtype = value.shape, value.dtype

        def decode(parts: Sequence[Tensor]) -> Tensor:
            packed, step, low = parts
            numbers = self._rows(unpack(packed, self.bits, shape.numel()).to(wide))
            decoded = numbers.mul_(step.to(wide)).add_(low.to(wide))
            # The highest level may lie above the highest number.
            range_ = torch.finfo(dtype)
            decoded = decoded.clamp_(range_.min, range_.max)
            return decoded.view(-1)[: shape.numel()].view(shape).to(dtype)

        return Stored((packed, step, low), decode)

    def _rows(self, flat: Tensor) -> Tensor:
        """Groups as rows; the last row is padded with its last number."""
        missing = -flat.numel() % self.group_size
        if missing:
            flat = torch.cat([flat, flat[-1:].expand(missing)])
        return flat.view(-1, self.group_size)

    def held(self, meta: TensorMeta) -> Held:
        """What waits, for which the key does not matter; it has numbers."""
        return rehearsed(Quantize(self.bits, self.group_size), meta)

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
            (torch.Tensor, type(None)),
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

    def __eq__(self, other: object) -> bool:
        """Whether the numbers are equal and the keys are the same object."""
        return isinstance(other, Quantize) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def _fields(self) -> tuple[int, int, bool, int]:
        return self.bits, self.group_size, self.stochastic, id(self.key)


def _in_one_bit(value: Tensor) -> Stored:
    shape = value.shape
    packed = pack(value.reshape(-1).view(torch.uint8), 1)
    return Stored(
        (packed,),
        lambda parts: unpack(parts[0], 1, shape.numel()).view(torch.bool).view(shape),
    )


def _scale_dtype(value: Tensor) -> torch.dtype:
    """The dtype in which the minima and steps of a value's groups are kept."""
    return torch.float64 if value.dtype is torch.float64 else torch.bfloat16


def _rounded_down(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The minima of groups as `dtype`: rounded, never up, and finite where the number is."""
    rounded = numbers.to(dtype)
    is_above = rounded.to(numbers.dtype) > numbers
    lower = torch.nextafter(rounded, torch.full_like(rounded, -torch.inf))
    rounded = torch.where(is_above, lower, rounded)
    lowest = torch.finfo(dtype).min
    return torch.where(numbers.isfinite(), rounded.clamp(min=lowest), torch.nan)
