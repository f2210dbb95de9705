"""Casting: a saved value waits in a smaller floating dtype."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from remat._errors import refuse, require_type
from remat._graph.meta import TensorMeta
from remat.storage._contract import AbstractStorage
from remat.storage._stored import FIRST, Place, Stored


@final
@dataclass(frozen=True, slots=True)
class Cast(AbstractStorage):
    """Keeps the value in another floating dtype.

    Laws: lossy; each number comes back within half a unit in the last place of `dtype`,
    if it is in that dtype's range; the value's dtype is restored. Integers, complex
    numbers and values of a dtype that is not wider are kept unchanged.

    Args:
        dtype: the floating dtype in which the value waits.

    Raises:
        TypeError: `dtype` is not a `torch.dtype`.
        ValueError: `dtype` is not a floating one.

    Example:
        >>> import torch
        >>> from remat import storage
        >>> storage.Cast(torch.bfloat16)
        Cast(dtype=torch.bfloat16)
    """

    dtype: torch.dtype

    is_exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        argument = "Cast(dtype=...)"
        require_type(argument, self.dtype, torch.dtype, wanted="a dtype of torch")
        if not self.dtype.is_floating_point:
            raise refuse(
                argument,
                self.dtype,
                why="A cast to it would truncate numbers instead of rounding them.",
                do="Pass a floating dtype such as torch.bfloat16, or use `Quantize`.",
            )

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        """Casts floating numbers of a wider dtype; other values are kept."""
        dtype = value.dtype
        if not dtype.is_floating_point or dtype.itemsize <= self.dtype.itemsize:
            return Stored.whole(value)
        return Stored((value.to(self.dtype),), lambda parts: parts[0].to(dtype))

    def leaves(self, meta: TensorMeta) -> bool:
        """Whether the dtype is no wider floating one."""
        return not self.held(meta).moved_bytes
