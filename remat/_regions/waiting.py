"""A saved value on its way from forward to backward, in whatever form its storage gives it.

It travels as one tensor of the value's own metadata but without data, so that it passes
through `save_for_backward` and the wrappers of torch.func like any other; what waits hangs
on it. Nothing may compute with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from remat._errors import RematError
from remat._graph.meta import TensorMeta, unexpanded_shape
from remat._regions import prefetch
from remat._torch import dtensor, fakes, tracer
from remat._torch.autograd import apply_through
from remat._torch.tensors import storage_key, storages_of, tensor_without_data
from remat.storage import AbstractStorage, Place, Stored, densely, stored_in

_aten: Any = torch.ops.aten
_PASSED_ON = (_aten.alias.default, _aten.detach.default)


@final
class Waiting(Tensor):
    """A tensor without data that stands for a stored value."""

    stored: Stored  # what waits
    #: The dimensions by falling stride, in which the value was contiguous; None if it was not.
    stride_order: tuple[int, ...] | None
    #: Of a DTensor, what stands for this rank's part, and how it is spread.
    part: tuple[Waiting, Any] | None

    @classmethod
    def of(
        cls,
        value: Tensor,
        stored: Stored,
        stride_order: tuple[int, ...] | None,
        part: tuple[Waiting, Any] | None = None,
    ) -> Waiting:
        """A tensor that looks like `value` and holds `stored`."""
        found: Waiting = tensor_without_data(cls, value)
        found.stored = stored
        found.stride_order = stride_order
        found.part = part
        return found

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Permits what only passes the tensor on, and refuses every other operator."""
        if func in _PASSED_ON:
            (value,) = args
            return cls.of(value, value.stored, value.stride_order, value.part)
        raise RematError.of(
            where=f"{func} on a saved value of a region",
            what="reads a value while it waits in its storage.",
            why="Saved-tensor hooks see a region's saved values in their stored form.",
            do="Remove the hooks around the region, or the storage from its policy.",
        )

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Its metadata: the numbers wait."""
        return f"Waiting({TensorMeta.of(self)})"

    def resume(self) -> Tensor:
        """The value, with the strides that it had."""
        return self.as_it_was(self.stored.restore())

    def as_it_was(self, restored: Tensor) -> Tensor:
        """What the storage returned, with the strides that the value had."""
        if self.part is not None:
            part, spread = self.part
            return dtensor.in_place_of(part.as_it_was(restored), spread)
        shape, stride = self.shape, self.stride()
        sizes = unexpanded_shape(shape, stride)
        if self.stride_order is None:
            like = torch.empty_strided(
                sizes, stride, dtype=self.dtype, device=self.device
            )
            return like.copy_(restored.reshape(sizes)).expand(shape)
        order = self.stride_order
        permuted = restored.contiguous().view([sizes[dim] for dim in order])
        back = [order.index(dim) for dim in range(len(order))]
        return permuted.permute(back).expand(shape)


# What one call has stored, by the storage and by the numbers in memory that were stored.
Twins = dict[tuple[Any, ...], Stored]


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The stored tensors behind a `Waiting`; any other tensor itself."""
    return tensor.stored.tensors if isinstance(tensor, Waiting) else (tensor,)


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold a tensor's numbers, whatever its class."""
    for part in parts_of(tensor):
        if not (fakes.is_fake(part) or fakes.wraps_fakes(part)):
            yield from storages_of(part)


def twin_key(
    dense: Tensor, storage: AbstractStorage, place: Place
) -> tuple[Any, ...] | None:
    """Equal for what waits as one: the same numbers in memory, stored alike."""
    # A subclass may have no memory of its own.
    if type(dense) is not Tensor:
        return None
    lies = storage_key(dense), dense.storage_offset(), dense.numel(), dense.dtype
    return (storage, place.spread, *lies)


def wait(
    value: Tensor, storage: AbstractStorage, place: Place, twins: Twins | None = None
) -> Tensor:
    """What stands for a stored value; the value itself if the storage does not apply to it.

    Nothing is stored while a trace runs: the region around decides what waits. `twins` is what
    this call has stored before: a view of the same numbers in memory, of any shape and order,
    waits as what they do.
    """
    if storage.keeps or tracer.proxy_is_active() or fakes.is_fake(value):
        return value
    spread = dtensor.placement(value)
    if spread is not None:
        part = wait(dtensor.local_part(value), storage, place.of(spread), twins)
        if type(part) is not Waiting:
            return value
        return Waiting.of(value, part.stored, None, (part, spread))
    dense, place, order = densely(value, place)
    key = None if order is None else twin_key(dense, storage, place)
    if key is None:
        stored = stored_in(storage, dense, place)
    else:
        twins = {} if twins is None else twins
        stored = twins.get(key)
        if stored is None:
            stored = twins[key] = stored_in(storage, dense, place)
    waiting = stored.tensors
    if len(waiting) == 1 and storage_key(waiting[0]) == storage_key(value):
        return value
    return Waiting.of(value, stored, order)


def resumed(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors, some of which may wait, as they were; no gradient is recorded."""
    if Waiting not in map(type, tensors):
        return tensors
    waiting = [each for each in tensors if type(each) is Waiting]
    restored = iter(prefetch.finish([each.stored for each in waiting]))
    return [
        each.as_it_was(next(restored)) if type(each) is Waiting else each
        for each in tensors
    ]


def wait_differentiably(
    value: Tensor, storage: AbstractStorage, place: Place, twins: Twins
) -> Tensor:
    """`wait`; what flows back to the result flows to the value."""
    if type(value) is Waiting:
        return value
    if not value.requires_grad:
        return wait(value, storage, place, twins)
    found = apply_through(lambda v: wait(v.detach(), storage, place, twins), value)
    return found if type(found) is Waiting else value


def resume_differentiably(tensor: Tensor) -> Tensor:
    """A tensor that may wait as it was; what flows back to it flows to what waited."""
    is_waiting = type(tensor) is Waiting
    return apply_through(Waiting.resume, tensor) if is_waiting else tensor


def store_inputs(
    operands: list[Tensor], inputs: Mapping[int, AbstractStorage], call: int
) -> None:
    """Replaces operands by their stored forms, as `saved_inputs` says, in the call of a number."""
    twins: Twins = {}
    for index, storage in inputs.items():
        place = Place(index, call)
        operands[index] = wait_differentiably(operands[index], storage, place, twins)
