"""Sparse storage: only the nonzero numbers of a value and their positions wait.

Gist [1] stores the outputs of ReLU this way, in compressed sparse rows.

References:
    [1] Gist: Efficient Data Encoding for Deep Neural Network Training. A. Jain et al.,
    2018. https://doi.org/10.1109/ISCA.2018.00070, section on sparse storage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from remat._errors import refuse, require_type
from remat._graph.meta import TensorMeta
from remat.storage._bits import pack, unpack
from remat.storage._contract import AbstractStorage
from remat.storage._stored import FIRST, Place, Stored

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
@dataclass(frozen=True, slots=True)
class Sparse(AbstractStorage):
    """Keeps the nonzero numbers, and one bit for each position.

    Laws: exact, to the last bit: if there are negative zeros, as dropout makes from
    negative numbers, the signs of zeros are kept in another bit each. Booleans and
    complex numbers are kept unchanged.

    Args:
        min_saving: the fraction of the value's bytes that must be saved, from 0 to
            below 1; a value for which this saves less is kept unchanged.

    Raises:
        TypeError: `min_saving` is not a number.
        ValueError: `min_saving` is not in [0, 1).

    Example:
        >>> from remat import storage
        >>> storage.Sparse(min_saving=0.5)
        Sparse(min_saving=0.5)
    """

    min_saving: float = 0.25

    is_exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        argument = "Sparse(min_saving=...)"
        wanted = "a number from 0 to below 1, as in 0.25"
        require_type(argument, self.min_saving, (float, int), wanted=wanted)
        if isinstance(self.min_saving, bool) or not 0 <= self.min_saving < 1:
            raise refuse(
                argument,
                self.min_saving,
                why="It is the fraction of the bytes to be saved, which is never all of them.",
                do=f"Pass {wanted}.",
            )

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        """Keeps the nonzero numbers and their positions, if that saves enough."""
        if value.dtype is torch.bool or value.is_complex() or not value.numel():
            return Stored.whole(value)
        # Their bits: torch lacks operators for numbers of eight bits and unsigned ones.
        flat = _bits_of_nonzeros(value.reshape(-1))
        is_signed = value.dtype.is_floating_point
        is_there = (flat & torch.iinfo(flat.dtype).max if is_signed else flat) != 0
        is_negative = flat[~is_there] != 0
        numbers = flat[is_there].view(value.dtype)
        parts = [numbers, pack(is_there.view(torch.uint8), 1)]
        if is_negative.any():
            parts.append(pack(is_negative.view(torch.uint8), 1))
        num_bytes = sum(part.nbytes for part in parts)
        if num_bytes > (1 - self.min_saving) * value.nbytes:
            return Stored.whole(value)
        shape = value.shape
        return Stored(tuple(parts), lambda parts: _dense_from_sparse(parts, shape))

    def leaves(self, meta: TensorMeta) -> bool:
        """Whether the dtype is one that is kept."""
        return not self.held(meta).moved_bytes


def _bits_of_nonzeros(value: Tensor) -> Tensor:
    return value.view(_INTEGERS[value.itemsize])


def _dense_from_sparse(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
    numbers, mask, *signs = parts
    places = unpack(mask, 1, shape.numel()).view(torch.bool)
    bits = _bits_of_nonzeros(numbers)
    full = bits.new_zeros(shape.numel())
    if signs:
        num_zeros = shape.numel() - bits.numel()
        is_negative = unpack(signs[0], 1, num_zeros)
        full[~places] = is_negative.to(bits.dtype) * torch.iinfo(bits.dtype).min
    full[places] = bits
    return full.view(numbers.dtype).view(shape)
