"""The contract of storage: how a saved value waits between forward and backward.

A storage says *how* a value is kept; a policy says *which*. A storage is an immutable
object: two are equal if their classes and their arguments are, and the repr is the code
that makes it. It holds no tensor of the program.

What each class promises for a value that it stores and gives back:

- shape and dtype are those of the value that was stored;
- the bits are the same (an exact class), or the numbers are within a bound that the
  class states (a lossy one);
- the device is that of the value that was stored, wherever it waited;
- what waits belongs to the storage: the program neither reads nor writes it meanwhile.

`store` is called once for each value, in the forward, with a tensor that no transform has
wrapped and that requires no gradient; `Stored.restore` once for each backward. `held` tells
before any call what will wait: plans, reports and `saved_residuals` all ask it.
"""

import abc
import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from remat._graph.meta import TensorMeta
from remat.storage._argument_checks import require_type
from remat.storage._stored import FIRST, Held, Place, Stored
from remat.storage._storing import rehearsed, stored_in


class AbstractStorage(abc.ABC):
    """The base of the classes that say how a saved value waits for the backward.

    Laws: storages of one class with the same arguments are equal and hash alike; `repr`
    is the code that makes the value; `(a >> b) >> c == a >> (b >> c)`.

    Attributes:
        is_exact: whether values come back to the last bit.
        keeps: whether every value waits as it is, so that nothing has to be done.

    Example:
        >>> from remat import storage
        >>> isinstance(storage.Keep(), storage.AbstractStorage)
        True
    """

    __slots__ = ()

    is_exact: ClassVar[bool]
    keeps: ClassVar[bool] = False

    @abc.abstractmethod
    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        """Turns a value into the tensors that wait.

        Args:
            value: a contiguous tensor of any shape and dtype, not to be changed.
            place: which of a region's values it is, and in which call.

        Returns:
            The tensors that wait, and their decoder. If the storage does not apply to
            the value, or would save nothing, this is the value itself.

        Example:
            >>> import torch
            >>> from remat import storage
            >>> storage.Sparse().store(torch.eye(16)).size_bytes
            96
        """

    def held(self, meta: TensorMeta) -> Held:
        """Tells what a value will hold while it waits, without storing it.

        Unless a class answers otherwise, `store` is called once with a tensor that has no
        numbers, one of torch's fake tensors, and what it returns is counted. If it has to
        see numbers, the answer is the whole value, as a bound.

        Args:
            meta: the value's shape, strides, dtype and device; of a DTensor those of this
                rank's part.

        Returns:
            What waits, where, and what the way costs.

        Example:
            >>> import torch
            >>> from remat import storage
            >>> from remat._graph.values import TensorMeta
            >>> meta = TensorMeta.of(torch.ones(2, 3))
            >>> storage.Cast(torch.bfloat16).held(meta).size_bytes
            12
        """
        return rehearsed(self, meta)

    def __rshift__(self, other: "AbstractStorage") -> "Chain":
        """Chains storages: first this one, then `other` on what this one keeps.

        Args:
            other: the storage that is applied second.

        Returns:
            The chain of both; the backward undoes it from its end.

        Raises:
            TypeError: `other` is not a storage value.

        Example:
            >>> from remat import storage
            >>> storage.Sparse() >> storage.Keep()
            Sparse(min_saving=0.25) >> Keep()
        """
        return Chain((*links_of(self), *links_of(other)))


@final
@dataclass(frozen=True, slots=True, repr=False)
class Chain(AbstractStorage):
    """Storages one after the other; write `a >> b`.

    Laws: a chain made by `>>` is flat, so `>>` is associative; the order counts.

    Args:
        links: the storages in the order in which a value passes them.

    Raises:
        TypeError: a link is not a storage value.

    Example:
        >>> from remat import storage
        >>> (storage.Sparse() >> storage.Keep()).links
        (Sparse(min_saving=0.25), Keep())
    """

    links: tuple[AbstractStorage, ...]

    @property
    def is_exact(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether every link is exact."""
        return all(link.is_exact for link in self.links)

    @property
    def keeps(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether every link keeps values as they are."""
        return all(link.keeps for link in self.links)

    def held(self, meta: TensorMeta) -> Held:
        """What the last link leaves of what the others do."""
        found = Held.whole(meta)
        for link in self.links:
            if found.is_bound:
                break  # what the next link is given depends on the numbers
            found = _held_after(link, found, meta.device)
        return found

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        """Stores the value, then each resulting tensor."""
        stored = Stored.whole(value)
        for link in self.links:
            here = dataclasses.replace(place, joints=tuple(stored.joints))
            stored = stored.each(functools.partial(stored_in, link, place=here))
        return stored

    def __post_init__(self) -> None:
        for link in self.links:
            require_type(
                "storage >> storage",
                link,
                AbstractStorage,
                wanted="instances of the classes of `storage`, as in `Sparse() >> Keep()`",
            )

    def __repr__(self) -> str:
        return " >> ".join(map(repr, self.links))


def _held_after(link: AbstractStorage, before: Held, home: torch.device) -> Held:
    """What is held when a link of a chain has stored each tensor of a value from `home`."""
    here: list[TensorMeta] = []
    away: list[TensorMeta] = []
    links = [link.held(part) for part in (*before.here, *before.away)]
    for place, found in enumerate(links):
        if place < len(before.here) or found.moved_bytes:
            # What is made of a file's numbers is in memory again.
            here += [each for each in found.here if each.device == home]
            away += [each for each in found.here if each.device != home]
            away += found.away
        else:
            away.append(before.away[place - len(before.here)])
    moved_bytes = before.moved_bytes + sum(found.moved_bytes for found in links)
    is_bound = any(found.is_bound for found in links)
    return Held(tuple(here), tuple(away), moved_bytes, is_bound)


def links_of(storage: AbstractStorage) -> tuple[AbstractStorage, ...]:
    """The links of a chain; any other storage by itself."""
    return storage.links if isinstance(storage, Chain) else (storage,)
