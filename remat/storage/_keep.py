"""Keeping a saved value as it is."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from remat._graph.meta import TensorMeta
from remat.storage._contract import AbstractStorage
from remat.storage._stored import FIRST, Held, Place, Stored


@final
@dataclass(frozen=True, slots=True)
class Keep(AbstractStorage):
    """Keeps the value as it is, on its device. The default.

    Laws: exact; no copy is made; what is kept is the tensor itself.

    Example:
        >>> from remat import storage
        >>> storage.Keep() == storage.Keep()
        True
    """

    is_exact: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        """The value itself."""
        return Stored.whole(value)

    def held(self, meta: TensorMeta) -> Held:
        """The value itself; plans ask this of thousands of values."""
        return Held.whole(meta)
