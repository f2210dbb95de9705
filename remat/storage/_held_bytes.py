"""How many bytes a value will hold while it waits, told without storing it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from remat._graph.meta import TensorMeta, unexpanded_shape
from remat._torch import fakes, isolation
from remat.storage._contract_checks import stored_in
from remat.storage._stored import Place, Stored


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
        """Bytes on the device of the value."""
        return sum(part.size_bytes for part in self.here)

    @property
    def elsewhere_bytes(self) -> int:
        """Bytes in host memory, on another device, or in a file."""
        return sum(part.size_bytes for part in self.away)

    def through(self, storage: _Holds, home: torch.device) -> Held:
        """What is held when the next link of a chain has stored each of the tensors.

        `home` is the device of the value.
        """
        if self.is_bound:
            return self  # what the next storage is given depends on the numbers
        here: list[TensorMeta] = []
        away: list[TensorMeta] = []
        links = [storage.held(part) for part in (*self.here, *self.away)]
        for found in links[: len(self.here)]:
            here += found.here
            away += found.away
        for part, found in zip(self.away, links[len(self.here) :], strict=True):
            # What is made of a file's numbers is in memory again.
            made = found.here if found.moved_bytes else ()
            here += [each for each in made if each.device == home]
            away += [each for each in made if each.device != home]
            away += found.away if found.moved_bytes else (part,)
        moved_bytes = self.moved_bytes + sum(found.moved_bytes for found in links)
        is_bound = any(found.is_bound for found in links)
        return Held(tuple(here), tuple(away), moved_bytes, is_bound)


class _Holds(Protocol):
    def held(self, meta: TensorMeta) -> Held: ...

    def store(self, value: Tensor, place: Place) -> Stored: ...


def rehearsed(storage: _Holds, meta: TensorMeta) -> Held:
    """What `store` makes of a value without numbers, as if in a late call of a function.

    If `store` has to see numbers, this is the whole value, as a bound.
    """
    value = dataclasses.replace(meta.once, requires_grad=False, placement=None)
    # After the calls in which ranks compare what they hold.
    place = Place(call=sys.maxsize, spread=meta.placement)
    with isolation.isolated(), fakes.fake_mode(meta.device), torch.no_grad():
        dense, place, order = densely(value.empty(), place)
        try:
            waiting = stored_in(storage, dense, place).tensors
        except RuntimeError as error:
            if not fakes.needs_values(error):
                raise
            return Held((value,), moved_bytes=2 * value.size_bytes, is_bound=True)
        if len(waiting) == 1 and waiting[0] is dense:
            return Held.whole(meta)
        parts = [_part(tensor, meta, order) for tensor in waiting]
    return Held(
        tuple(part for part in parts if part.device == meta.device),
        tuple(part for part in parts if part.device != meta.device),
        value.size_bytes + sum(part.size_bytes for part in parts),
    )


def _part(tensor: Tensor, meta: TensorMeta, order: Sequence[int] | None) -> TensorMeta:
    """A tensor that waits, with the dimensions of the value if it has as many."""
    if order is not None and len(order) == tensor.dim():
        tensor = tensor.permute([order.index(dim) for dim in range(len(order))])
    return dataclasses.replace(TensorMeta.of(tensor), placement=meta.placement)


def densely(
    value: Tensor, place: Place
) -> tuple[Tensor, Place, tuple[int, ...] | None]:
    """A value as a storage is given it: contiguous, and each of its numbers once, as it is.

    Returns:
        A view of it where that will do, its place with the order of its dimensions, and
        that order; None for a copy in their own.
    """
    stride = value.stride()
    sizes = unexpanded_shape(value.shape, stride)
    is_repeated = sizes != [*value.shape]
    numbers = value[tuple(map(slice, sizes))] if is_repeated else value
    order = sorted(range(value.dim()), key=lambda dim: -stride[dim])
    dense = numbers.permute(order)
    own = iter(range(value.dim()))
    users = [None if dim in place.mapped else next(own) for dim in range(value.dim())]
    is_flipped = dense.is_conj() or dense.is_neg()
    if dense.is_contiguous() and not is_flipped:
        ordered = tuple([users[dim] for dim in order])
        return dense, dataclasses.replace(place, order=ordered), tuple(order)
    place = dataclasses.replace(place, order=tuple(users))
    return numbers.resolve_conj().resolve_neg().contiguous(), place, None
