"""The contract of storage: how a saved value waits between forward and backward.

A storage value says *how* a value is kept; a policy says *which*. It is a frozen value:
two of them are the same when their class and their arguments are, and the repr is the
code that makes it. It holds no value of the program and does no work by itself.

What each class promises for a value that it stores and gives back:

- shape and dtype are those of the value that was stored;
- the bits are the same (an exact class), or the numbers are within a bound that the
  class states (a lossy one);
- the device is that of the value that was stored, wherever it waited;
- what waits belongs to the storage: the program neither reads nor writes it meanwhile.

In this release only `Keep` is carried out. The others can be written down, compared and
printed; `require_available` refuses them where a region would have to use them.
"""

import abc
from dataclasses import dataclass
from typing import ClassVar, final

from remat._errors import explain
from remat.storage._check import require_type


class AbstractStorage(abc.ABC):
    """The base of the values that say how a saved value waits for the backward.

    Laws: storages of one class with the same arguments are equal and hash alike; `repr`
    is the code that makes the value; `(a >> b) >> c == a >> (b >> c)`.

    Attributes:
        is_available: whether this release carries the storage out.

    Example:
        >>> from remat import storage
        >>> isinstance(storage.Keep(), storage.AbstractStorage)
        True
    """

    __slots__ = ()

    is_available: ClassVar[bool]

    def __rshift__(self, other: "AbstractStorage") -> "Chain":
        """Chains storages: first this one, then `other` on what this one keeps.

        Args:
            other: the storage that is applied second.

        Returns:
            The chain of both; the backward undoes it from its end.

        Raises:
            TypeError: `other` is no storage value.

        Example:
            >>> from remat import storage
            >>> storage.Sparse() >> storage.Keep()
            Sparse(min_saving=0.25) >> Keep()
        """
        return Chain((*_links(self), *_links(other)))


@final
@dataclass(frozen=True, slots=True, repr=False)
class Chain(AbstractStorage):
    """Storages one after the other; write `a >> b`.

    Laws: a chain made by `>>` is flat, so `>>` is associative; the order counts.

    Args:
        links: the storages in the order in which a value passes them.

    Raises:
        TypeError: a link is no storage value.

    Example:
        >>> from remat import storage
        >>> (storage.Sparse() >> storage.Keep()).links
        (Sparse(min_saving=0.25), Keep())
    """

    links: tuple[AbstractStorage, ...]

    is_available: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Checks the links."""
        for link in self.links:
            require_type(
                "storage >> storage",
                link,
                AbstractStorage,
                wanted="instances of the classes of `storage`, as in `Sparse() >> Keep()`",
            )

    def __repr__(self) -> str:
        """The code that makes this value."""
        return " >> ".join(map(repr, self.links))


def require_available(storage: AbstractStorage, where: str) -> None:
    """Refuses a storage that this release cannot carry out.

    Args:
        storage: the storage that a region would have to use.
        where: what asks for it, for the message, as in `saved_inputs["x"]`.

    Raises:
        NotImplementedError: the storage comes with a later release.

    Example:
        >>> from remat import storage
        >>> storage.require_available(storage.Keep(), where='saved_inputs["x"]')
    """
    if storage.is_available:
        return
    name = type(storage).__name__
    raise NotImplementedError(
        explain(
            where=where,
            what=f"asks for {storage!r}.",
            why=f"`storage.{name}` comes with a later release of remat; this one "
            "carries out `storage.Keep` only.",
            do="Use `storage.Keep()` until then.",
        )
    )


def _links(storage: AbstractStorage) -> tuple[AbstractStorage, ...]:
    return storage.links if isinstance(storage, Chain) else (storage,)
