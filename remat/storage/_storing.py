"""Storing a value: as one is given it, checked against the contract, or rehearsed.

Users may write storages, and one that breaks the contract would give wrong gradients.
So the shape, dtype and device of each value are checked, and the version of each tensor
that must not change.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from remat._errors import RematError, refusal
from remat._graph.meta import TensorMeta, unexpanded_shape
from remat._torch import fakes, isolation, levels
from remat.storage._stored import Decode, Held, Place, Stored

_Form = tuple[torch.Size, torch.dtype, torch.device]


class _Stores(Protocol):
    def store(self, value: Tensor, place: Place) -> Stored: ...


def stored_in(storage: _Stores, value: Tensor, place: Place) -> Stored:
    """What a storage makes of a value, with a decoder that is checked.

    Args:
        storage: how it is to wait.
        value: what is to wait.
        place: which value it is.

    Returns:
        What `storage.store` returns.

    Raises:
        RematError: it broke its contract.
    """
    before = levels.versions_below([value])
    stored: Any = storage.store(value, place)
    _require_stored(storage, stored)
    if levels.versions_below([value]) != before:
        raise refusal(
            RematError,
            where=f"{type(storage).__name__}.store",
            what=f"changed the value {_shown_form(_form_of(value))} that it was given.",
            why="It belongs to the caller, or the region still computes with it.",
            do="Change a copy: value.clone().",
        )
    decode = _checked(stored.decode, type(storage).__name__, _form_of(value))
    return dataclasses.replace(stored, decode=decode)


def _checked(decode: Decode, storage_name: str, form: _Form) -> Decode:
    """A decoder whose result is checked against the shape, dtype and device stored."""

    def checked(parts: Sequence[Tensor]) -> Tensor:
        value: Any = decode(parts)
        found = _form_of(value) if isinstance(value, Tensor) else None
        if found == form:
            return value
        came = _shown_form(found) if found else type(value).__name__
        raise refusal(
            RematError,
            where=f"a value {_shown_form(form)} in {storage_name}",
            what=f"came back from its storage as {came}.",
            why="The backward needs the value as it was stored.",
            do="Have `decode` return the shape, dtype and device of the value that "
            "`store` was given.",
        )

    return checked


def _form_of(value: Tensor) -> _Form:
    return value.shape, value.dtype, value.device


def _shown_form(form: _Form) -> str:
    shape, dtype, device = form
    return f'{str(dtype).removeprefix("torch.")}{[*shape]} on "{device}"'


def _require_stored(storage: _Stores, found: object) -> None:
    if not isinstance(found, Stored):
        what = f"returned {type(found).__name__}, not `storage.Stored`."
    elif not isinstance(found.parts, (tuple, list)):  # pyright: ignore[reportUnnecessaryIsInstance]
        what = f"returned Stored with a {type(found.parts).__name__} in place of parts."
    else:
        parts = cast("Sequence[object]", found.parts)
        wrong = [each for each in parts if not isinstance(each, (Tensor, Stored))]
        if not wrong:
            return
        what = f"returned Stored with a {type(wrong[0]).__name__} among its parts."
    raise refusal(
        RematError,
        where=f"{type(storage).__name__}.store",
        what=what,
        why="A stored value is a tuple of tensors and a function that decodes them.",
        do="Return Stored((part, ...), decode), or Stored.whole(value) for a value that "
        "is kept as it is.",
    )


def rehearsed(storage: _Stores, meta: TensorMeta) -> Held:
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
