"""A stored value: the tensors that wait, and how to decode them; what will wait of one.

Some values are restored together, as when one collective gathers all sharded values of a region.
`Restoration` restores a set of values together, and can be started long before they are read.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from remat._errors import RematError
from remat._graph.meta import TensorMeta
from remat._torch import levels


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Which value of a region is stored, and when.

    Attributes:
        index: of the value, among the region's inputs or its saved values.
        call: how many times values of the function were stored before, at any signature.
        order: the dimensions of the user's value, in the order in which `store` sees them,
            None for one that vmap added; None if that is their own order.
        mapped: the dimensions that vmap added to the value, as it is outside `store`.
        spread: of a DTensor, of which `store` sees this rank's part, how it is spread over
            the ranks (its spec); None for any other tensor.
        may_differ: whether it was made among DTensors, so that it may be this rank's part
            of one, although nothing tells.
        joints: what the storages in front of this one in a chain leave to be done for many
            values at once.
    """

    index: int = 0
    call: int = 0
    order: tuple[int | None, ...] | None = None
    mapped: tuple[int, ...] = ()
    spread: Any = None
    may_differ: bool = False
    joints: tuple[Joint, ...] = ()

    def of(self, spread: Any) -> Place:
        """The place of this rank's part of a DTensor."""
        return dataclasses.replace(self, spread=spread)

    def mapped_in(self, value: Tensor) -> tuple[int, ...]:
        """The dimensions that vmap added, of what `store` sees.

        None are known of what an earlier storage of a chain made with other dimensions.
        """
        order = self.order or ()
        is_users = len(order) == value.dim()
        return tuple(k for k, dim in enumerate(order) if is_users and dim is None)


FIRST = Place()

Decode = Callable[[Sequence[Tensor]], Tensor]


class Joint(Protocol):
    """Work that is done for many values at once: for all values whose joints are equal."""

    @property
    def num_ahead(self) -> int:
        """How many regions ahead of the backward it may begin."""
        ...

    def start(self, parts: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Begins the work on one tensor of each value, all of one dtype and device.

        What it returns waits for the end, and returns a tensor for each.
        """
        ...


@final
@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Stored:
    """One value that waits.

    Attributes:
        parts: what the value was taken apart into, in the order that `decode` wants; a
            part may itself be stored.
        decode: from the parts to the value.
        joint: work on the only part that comes before `decode`, and is done together with
            that on the parts of other values.
        settle: what makes the parts readable, where they are still being written.

    Example:
        >>> import torch
        >>> from remat.storage import Cast
        >>> stored = Cast(torch.bfloat16).store(torch.ones(3))
        >>> stored.size_bytes, stored.restore()
        (6, tensor([1., 1., 1.]))
    """

    parts: tuple[Tensor | Stored, ...]
    decode: Decode
    joint: Joint | None = None
    settle: Callable[[], None] | None = None

    @classmethod
    def whole(cls, value: Tensor) -> Stored:
        """The value itself, kept as it is."""
        return cls((value,), first_part)

    def restore(self) -> Tensor:
        """The value, as often as it is asked for."""
        (value,) = Restoration((self,)).finish()
        return value

    def each(self, store: Callable[[Tensor], Stored]) -> Stored:
        """This value with each waiting tensor stored by another storage."""
        if self.settle is not None:
            self.settle()
        parts = [
            part.each(store) if isinstance(part, Stored) else store(part)
            for part in self.parts
        ]
        return Stored(tuple(parts), self.decode, self.joint)

    @property
    def joints(self) -> Iterator[Joint]:
        """The joint work on the way back, in any order."""
        if self.joint is not None:
            yield self.joint
        for part in self.parts:
            yield from part.joints if isinstance(part, Stored) else ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that wait."""
        several = [p.tensors if isinstance(p, Stored) else (p,) for p in self.parts]
        return tuple(itertools.chain.from_iterable(several))

    @property
    def size_bytes(self) -> int:
        """The bytes of the tensors that wait."""
        return sum(tensor.nbytes for tensor in self.tensors)


def first_part(parts: Sequence[Tensor]) -> Tensor:
    """Decodes a value that is its own only part."""
    return parts[0]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What a value will hold while it waits.

    Attributes:
        here: tensors like those that wait on the value's device.
        away: tensors like those that wait in other memory, or in a file.
        moved_bytes: the bytes that are read and written on the way into the storage, more
            often counted where the way is slower than the device's memory; 0 if the value
            waits as it is. The way back costs the same.
        is_bound: whether less may wait, depending on the numbers, as with `Sparse`.
    """

    here: tuple[TensorMeta, ...]
    away: tuple[TensorMeta, ...] = ()
    moved_bytes: int = 0
    is_bound: bool = False

    @classmethod
    def whole(cls, meta: TensorMeta) -> Held:
        """The value itself, as it is."""
        return cls((meta.once,))

    @property
    def size_bytes(self) -> int:
        """Bytes on the device of the value, of an expanded tensor those of its memory."""
        return sum(part.once.size_bytes for part in self.here)

    @property
    def elsewhere_bytes(self) -> int:
        """Bytes in host memory, on another device, or in a file, likewise."""
        return sum(part.once.size_bytes for part in self.away)


@final
class Restoration:
    """Restores several stored values in as few steps as their joints allow.

    Stored values are decoded from the innermost storage outwards. At each level, all
    values with equal joints are restored by one piece of work. That of the first level
    starts when this is made.
    """

    def __init__(self, storeds: Sequence[Stored]) -> None:
        self._storeds = storeds
        self._joined: dict[int, Tensor] = {}
        self._flights: list[_Flight] = []
        self._start()

    def finish(self) -> list[Tensor]:
        """The values, when they have arrived; it is asked for once."""
        while self._flights:
            for storeds, end in self._flights:
                self._joined.update(zip(map(id, storeds), end(), strict=True))
            self._flights = []
            self._start()
        return [self._untouched(stored) for stored in self._storeds]

    def _untouched(self, stored: Stored) -> Tensor:
        """The value; raises if `decode` changed a part, which a later backward reads again."""
        before = levels.versions_below(stored.tensors)
        value = self._value(stored)
        if levels.versions_below(stored.tensors) == before:
            return value
        raise RematError.of(
            where="the `decode` of a storage",
            what="changed one of the stored parts.",
            why="A second backward would read the changed part.",
            do="Change a copy: parts[0].clone().",
        )

    def _start(self) -> None:
        ready = [each for stored in self._storeds for each in self._ready(stored)]
        groups: dict[_Group, dict[int, tuple[Stored, Tensor]]] = {}
        for stored in ready:
            assert stored.joint is not None
            (part,) = map(self._value, stored.parts)
            group = groups.setdefault((stored.joint, part.dtype, part.device), {})
            group[id(stored)] = stored, part
        for (joint, *_), group in groups.items():
            storeds, parts = zip(*group.values(), strict=True)
            self._flights.append((storeds, joint.start(parts)))

    def _ready(self, part: Tensor | Stored) -> Iterator[Stored]:
        """The values whose parts are all restored, but whose own joint is still to be done."""
        if isinstance(part, Tensor) or id(part) in self._joined:
            return
        below = [each for inner in part.parts for each in self._ready(inner)]
        yield from below
        if part.joint is not None and not below:
            yield part

    def _value(self, part: Tensor | Stored) -> Tensor:
        if isinstance(part, Tensor):
            return part
        if part.joint is not None:
            return part.decode((self._joined[id(part)],))
        return part.decode([self._value(inner) for inner in part.parts])


_Flight = tuple[Sequence[Stored], Callable[[], Sequence[Tensor]]]
_Group = tuple[Joint, torch.dtype, torch.device]
