"""What a storage made of one value: the tensors that wait, and the way back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Which value of a region is stored, and when.

    Attributes:
        index: of the value, among the region's inputs or its saved values.
        call: how many calls of the region came before this one.
    """

    index: int = 0
    call: int = 0


FIRST = Place()


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """One value that waits.

    Attributes:
        parts: what the value was taken apart into, in the order that `decode` wants; a
            part may itself be stored.
        decode: from the parts to the value.

    Example:
        >>> import torch
        >>> from remat.storage import Cast
        >>> stored = Cast(torch.bfloat16).store(torch.ones(3))
        >>> stored.size_bytes, stored.restore()
        (6, tensor([1., 1., 1.]))
    """

    parts: tuple[Tensor | Stored, ...]
    decode: Callable[[Sequence[Tensor]], Tensor]

    @classmethod
    def whole(cls, value: Tensor) -> Stored:
        """The value itself, kept as it is."""
        return cls((value,), _only)

    def restore(self) -> Tensor:
        """The value, as often as it is asked for."""
        parts = [
            part.restore() if isinstance(part, Stored) else part for part in self.parts
        ]
        return self.decode(parts)

    def each(self, store: Callable[[Tensor], Stored]) -> Stored:
        """The same with each tensor that waits stored in turn."""
        parts = [
            part.each(store) if isinstance(part, Stored) else store(part)
            for part in self.parts
        ]
        return Stored(tuple(parts), self.decode)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that wait."""
        found: list[Tensor] = []
        for part in self.parts:
            found += part.tensors if isinstance(part, Stored) else (part,)
        return tuple(found)

    @property
    def size_bytes(self) -> int:
        """The bytes of the tensors that wait."""
        return sum(tensor.nbytes for tensor in self.tensors)


def _only(parts: Sequence[Tensor]) -> Tensor:
    return parts[0]
