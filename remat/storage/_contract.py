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

Users may write storages, and one that breaks the contract would give wrong gradients. So
`stored_in` checks the shape, dtype and device of each value, and the version of each tensor
that must not change.
"""

import abc
import dataclasses
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor

from remat._errors import RematError, require_type, show_type
from remat._graph.meta import TensorMeta, unexpanded_shape
from remat._torch import fakes, isolation, levels
from remat.storage._stored import FIRST, Decode, Held, Place, Stored


class AbstractStorage(abc.ABC):
    """The base of the classes that say how a saved value waits for the backward.

    Laws: storages of one class with the same arguments are equal and hash alike; `repr`
    is the code that makes the value; `(a >> b) >> c == a >> (b >> c)`.

    Attributes:
        is_exact: whether values come back to the last bit; a class that does not say so
            is taken for a lossy one.
        keeps: whether every value waits as it is, so that nothing has to be done.

    Example:
        >>> from remat import storage
        >>> isinstance(storage.Keep(), storage.AbstractStorage)
        True
    """

    __slots__ = ()

    is_exact: ClassVar[bool] = False
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
        numbers, one of torch's fake tensors, and what it returns is counted. If it raises,
        as where it has to see numbers, the answer is the whole value, as a bound.

        Args:
            meta: the value's shape, strides, dtype and device; of a DTensor those of this
                rank's part.

        Returns:
            What waits, where, and what the way costs.

        Example:
            >>> import torch
            >>> from remat import storage
            >>> from remat._graph.meta import TensorMeta
            >>> meta = TensorMeta.of(torch.ones(2, 3))
            >>> storage.Cast(torch.bfloat16).held(meta).size_bytes
            12
        """
        return rehearsed(self, meta)

    def leaves(self, meta: TensorMeta) -> bool:
        """Tells whether a value will wait as it is, and nothing else says so.

        A region warns of a storage that leaves all of its values. Unless a class answers
        otherwise, it is taken to leave none.

        Args:
            meta: as for `held`.

        Returns:
            Whether `store` keeps each value like this, whatever its numbers, without a word.

        Example:
            >>> import torch
            >>> from remat import storage
            >>> from remat._graph.meta import TensorMeta
            >>> storage.Cast(torch.float64).leaves(TensorMeta.of(torch.ones(2, 3)))
            True
        """
        return False

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

    def leaves(self, meta: TensorMeta) -> bool:
        """Whether every link does."""
        return all(link.keeps or link.leaves(meta) for link in self.links)

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        """Stores the value, then each resulting tensor."""
        stored = Stored.whole(value)
        for link in self.links:
            here = dataclasses.replace(place, joints=tuple(stored.joints))
            stored = stored.each(functools.partial(stored_in, link, place=here))
        return stored

    def __post_init__(self) -> None:
        require_type(
            "Chain(links=...)", self.links, tuple, wanted="a tuple of storages"
        )
        links = (part for link in self.links for part in links_of(link))
        object.__setattr__(self, "links", tuple(links))
        for link in self.links:
            require_type(
                "storage >> storage",
                link,
                AbstractStorage,
                wanted="instances of the classes of `storage`, as in `Sparse() >> Keep()`",
            )

    def __repr__(self) -> str:
        written = " >> ".join(map(repr, self.links))
        return written if len(self.links) > 1 else f"Chain(links={self.links!r})"


def _held_after(link: AbstractStorage, before: Held, home: torch.device) -> Held:
    """What is held when a link of a chain has stored each tensor of a value from `home`."""
    here: list[TensorMeta] = []
    away: list[TensorMeta] = []
    links = [held_in(link, part) for part in (*before.here, *before.away)]
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


def own_classes() -> dict[str, type[AbstractStorage]]:
    """The classes of this package by their names, without those of users."""
    classes = AbstractStorage.__subclasses__()
    return {
        each.__name__: each
        for each in classes
        if each.__module__.startswith(__package__ or "")
    }


_Form = tuple[torch.Size, torch.dtype, torch.device]


def stored_in(storage: AbstractStorage, value: Tensor, place: Place) -> Stored:
    """What a storage makes of a value, with a decoder that is checked.

    The value itself, if that takes less than what was made by numbers that nobody could know.

    Raises:
        RematError: the storage broke its contract.
    """
    before, form = levels.versions_below([value]), _form_of(value)
    name = type(storage).__name__
    stored: Any = storage.store(value, place)
    _require_stored(storage, stored)
    if levels.versions_below([value]) != before:
        raise RematError.of(
            where=f"{name}.store",
            what=f"changed the value {_shown_form(form)} that it was given.",
            why="It belongs to the caller, or the region still computes with it.",
            do="Change a copy: value.clone().",
        )
    if _is_beyond(stored, storage, value):
        return Stored.whole(value)
    unchecked: Decode = stored.decode

    def decode(parts: Sequence[Tensor]) -> Tensor:
        restored: Any = unchecked(parts)
        found = _form_of(restored) if isinstance(restored, Tensor) else None
        if found == form:
            return restored
        came = _shown_form(found) if found else type(restored).__name__
        raise RematError.of(
            where=f"a value {_shown_form(form)} in {name}",
            what=f"came back from its storage as {came}.",
            why="The backward needs the value as it was stored.",
            do="Have `decode` return the shape, dtype and device of the value that "
            "`store` was given.",
        )

    return dataclasses.replace(stored, decode=decode)


def _is_beyond(stored: Stored, storage: AbstractStorage, value: Tensor) -> bool:
    """Whether more waits than the value, of a storage that stated it as a bound."""
    here = sum(part.nbytes for part in stored.tensors if part.device == value.device)
    if here <= value.nbytes or fakes.is_fake(value):
        return False
    return held_in(storage, TensorMeta.of(value)).is_bound


def _form_of(value: Tensor) -> _Form:
    return value.shape, value.dtype, value.device


def _shown_form(form: _Form) -> str:
    shape, dtype, device = form
    return f'{show_type(dtype, shape)} on "{device}"'


def _require_stored(storage: AbstractStorage, found: object) -> None:
    if not isinstance(found, Stored):
        what = f"returned {type(found).__name__}, not `storage.Stored`."
    elif not isinstance(found.parts, (tuple, list)):  # pyright: ignore[reportUnnecessaryIsInstance]
        what = f"returned Stored with a {type(found.parts).__name__} in place of parts."
    else:
        parts = cast("Sequence[object]", found.parts)
        wrong = [each for each in parts if not isinstance(each, (Tensor, Stored))]
        tensors = [each for each in parts if isinstance(each, Tensor)]
        layouts = [each.layout for each in tensors if each.layout != torch.strided]
        if not wrong and not layouts:
            return
        kind = type(wrong[0]).__name__ if wrong else f"{layouts[0]} tensor"
        what = f"returned Stored with a {kind} among its parts."
    raise RematError.of(
        where=f"{type(storage).__name__}.store",
        what=what,
        why="A stored value is a tuple of dense tensors and a function that decodes them.",
        do="Return Stored((part, ...), decode), or Stored.whole(value) for a value that "
        "is kept as it is.",
    )


def held_in(storage: AbstractStorage, meta: TensorMeta) -> Held:
    """What a storage says that a value will hold.

    Raises:
        RematError: it says something else.
    """
    found: Any = storage.held(meta)
    if isinstance(found, Held):
        return found
    raise RematError.of(
        where=f"{type(storage).__name__}.held",
        what=f"returned {type(found).__name__}, not `storage.Held`.",
        why="Plans, reports and `saved_residuals` count what it says.",
        do="Return Held(here, away), or Held.whole(meta) for a value that is kept as it is.",
    )


def rehearsed(storage: AbstractStorage, meta: TensorMeta) -> Held:
    """What `store` makes of a value without numbers, late; the whole, if it needs them."""
    value = dataclasses.replace(meta.once, requires_grad=False, placement=None)
    # After the calls in which ranks compare what they hold.
    place = Place(call=sys.maxsize, spread=meta.placement)
    with isolation.isolated(), fakes.fake_mode(meta.device), torch.no_grad():
        dense, place, order = densely(value.empty(), place)
        try:
            waiting = stored_in(storage, dense, place).tensors
        except RematError:
            raise
        # What a user's code raises for a tensor without numbers says nothing of a call with them.
        except Exception:  # noqa: BLE001
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

    A view of it where that will do, its place with the order of its dimensions, and that order;
    None for a copy in their own.
    """
    stride = value.stride()
    sizes = unexpanded_shape(value.shape, stride)
    is_repeated = sizes != [*value.shape]  # a slice of all is an operator, too
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
