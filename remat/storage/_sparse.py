"""Sparse storage: of a value with many zeros only the rest and its places wait.

Gist [1] stores the outputs of ReLU so, in compressed sparse rows.

References:
    [1] Gist: Efficient Data Encoding for Deep Neural Network Training. A. Jain et al.,
    2018. https://doi.org/10.1109/ISCA.2018.00070, section on sparse storage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from remat.storage._bits import pack, unpack
from remat.storage._check import refuse, require_type
from remat.storage._contract import AbstractStorage
from remat.storage._stored import FIRST, Place, Stored


@final
@dataclass(frozen=True, slots=True)
class Sparse(AbstractStorage):
    """Keeps the numbers that are not zero and a bit for each place.

    Laws: exact, to the last bit: where zeros are negative, as dropout makes them of negative
    numbers, each zero's sign waits in a bit more. Truth values and complex numbers are kept
    as they are.

    Args:
        min_saving: the fraction of the value's bytes that must be spared for it to be
            stored so, from 0 to below 1; a value that would spare less is kept as it is.

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
        """Checks the argument."""
        argument = "Sparse(min_saving=...)"
        wanted = "a number from 0 to below 1, as in 0.25"
        require_type(argument, self.min_saving, (float, int), wanted=wanted)
        if isinstance(self.min_saving, bool) or not 0 <= self.min_saving < 1:
            raise refuse(
                argument,
                self.min_saving,
                why="It is the fraction of the bytes that is spared, and none spares all.",
                do=f"Pass {wanted}.",
            )

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        """The numbers that are not zero and a bit for each, where that saves enough."""
        flat = value.reshape(-1)
        if value.dtype is torch.bool or value.is_complex() or not flat.numel():
            return Stored.whole(value)
        is_there = flat != 0
        zeros = flat[~is_there]
        if value.dtype.is_floating_point and value.dtype.itemsize == 1:
            zeros = zeros.float()  # torch tells no signs of eight-bit numbers
        is_negative = zeros.signbit()
        parts = [flat[is_there], pack(is_there.view(torch.uint8), 1)]
        if is_negative.any():
            parts.append(pack(is_negative.view(torch.uint8), 1))
        num_bytes = sum(part.nbytes for part in parts)
        if num_bytes > (1 - self.min_saving) * value.nbytes:
            return Stored.whole(value)
        shape = value.shape
        return Stored(tuple(parts), lambda parts: _spread(parts, shape))


def _spread(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
    numbers, mask, *signs = parts
    places = unpack(mask, 1, shape.numel()).view(torch.bool)
    full = numbers.new_zeros(shape.numel())
    if signs:
        num_zeros = shape.numel() - numbers.numel()
        is_negative = unpack(signs[0], 1, num_zeros).view(torch.bool)
        zeros = torch.where(is_negative, -0.0, 0.0)
        full[~places] = zeros.to(numbers.dtype)
    full[places] = numbers
    return full.view(shape)
