"""Keeping a saved value as it is."""

from dataclasses import dataclass
from typing import ClassVar, final

from remat.storage._contract import AbstractStorage


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

    is_available: ClassVar[bool] = True
