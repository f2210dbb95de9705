"""Quantizing: a saved value waits as integers of few bits, with a scale a group.

ActNN [1] and GACT [2] store activations so; the rounding may be random, so that its
mean is the value and gradients stay unbiased ([1], section 3).

References:
    [1] ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed
    Training. J. Chen et al., 2021. https://arxiv.org/abs/2104.14129
    [2] GACT: Activation Compressed Training for Generic Network Architectures. X. Liu
    et al., 2022. https://arxiv.org/abs/2206.11357
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from remat.storage._check import refuse, require_count, require_type
from remat.storage._contract import AbstractStorage

_BITS = (8, 4, 2)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Quantize(AbstractStorage):
    """Keeps the value as integers, with one scale for each group of numbers.

    Laws: lossy; each number comes back within one step of its group, half a step if
    `stochastic` is off. Two are equal when their numbers are and they hold the very same
    key: a key is a tensor, and tensors have no cheap equality.

    Args:
        bits: the bits of one number: 8, 4 or 2.
        group_size: how many numbers share a scale.
        stochastic: whether numbers are rounded at random, unbiased.
        key: the key of the random rounding, of `remat.random`; None where it is off.

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

    is_available: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Checks the arguments."""
        _check_bits(self.bits)
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
        _check_randomness(self.stochastic, self.key)

    def __eq__(self, other: object) -> bool:
        """Whether the numbers are equal and the keys are the same object."""
        return isinstance(other, Quantize) and self._fields() == other._fields()

    def __hash__(self) -> int:
        """The hash of what `==` compares."""
        return hash(self._fields())

    def _fields(self) -> tuple[int, int, bool, int]:
        return self.bits, self.group_size, self.stochastic, id(self.key)


def _check_bits(bits: int) -> None:
    require_type("Quantize(bits=...)", bits, int, wanted="8, 4 or 2")
    if bits not in _BITS:
        raise refuse(
            "Quantize(bits=...)",
            bits,
            why="Numbers are packed whole into bytes, and one bit keeps the sign alone.",
            do="Pass 8, 4 or 2.",
        )


def _check_randomness(stochastic: bool, key: torch.Tensor | None) -> None:
    if stochastic and key is None:
        raise refuse(
            "Quantize(stochastic=...)",
            stochastic,
            why="Random rounding needs a key: nothing draws from a hidden generator.",
            do="Pass `key=remat.random.key(seed)`, or `stochastic=False`.",
        )
    if key is not None and not stochastic:
        raise refuse(
            "Quantize(key=...)",
            key,
            why="Without `stochastic=True` the key would have no effect.",
            do="Pass `stochastic=True`, or no key.",
        )
