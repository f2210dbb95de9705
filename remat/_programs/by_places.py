"""Reads and writes by strides, by places instead.

An operator such as `as_strided` counts in memory. A program has the strides that were traced, but
an example inside of vmap lies as torch's rules have left it, and the operators that replace others
there leave it differently.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._graph.values import Ref, Value

_aten = torch.ops.aten


def replaced(
    value: Value, values: Sequence[Value], *, is_mapped: bool
) -> Callable[..., Any]:
    """The operator of a step, or what does the same wherever its first argument lies.

    Outside of vmap only a write to what is not contiguous is replaced: of that torch's operator
    has no derivative. Obsolete when it has, and when vmap keeps the strides of each example.
    """
    assert value.op is not None
    by_places = _BY_PLACES.get(value.op)
    if by_places is None:
        return value.op
    ref: Ref = value.args[0]
    written = values[ref.index]
    assert isinstance(written.meta, TensorMeta), "one tensor is read or written"
    order = _order_in_memory(written.meta)
    is_contiguous = order == [*range(len(written.meta.shape))]
    is_write = value.op is _aten.as_strided_scatter.default
    if not (is_mapped or (is_write and not is_contiguous)):
        return value.op
    if order is None or _is_part(written, values):
        return value.op
    return functools.partial(by_places, order)


def _order_in_memory(meta: TensorMeta) -> list[int] | None:
    """The dimensions, from the largest stride to the least; None where elements leave gaps."""
    if 0 in meta.shape:
        return [*range(len(meta.shape))]
    order = sorted(range(len(meta.shape)), key=lambda dim: -meta.stride[dim])
    step = 1
    for dim in reversed(order):
        if meta.shape[dim] != 1 and meta.stride[dim] != step:
            return None
        step *= meta.shape[dim]
    return order


def _is_part(value: Value, values: Sequence[Value]) -> bool:
    """Whether a tensor is a view that leaves out a part of the memory behind it."""
    owner = value
    while (base := operators.viewed(owner)) is not None:
        owner = values[base]
    metas = (owner.meta, value.meta)
    sizes = [math.prod(each.shape) for each in metas if isinstance(each, TensorMeta)]
    return sizes[0] != sizes[-1] or owner.op is operator.getitem


# In these `place` is the size, the strides and the offset of what is read or written.
def _read(order: list[int], tensor: Tensor, *place: Any) -> Tensor:
    laid = tensor.permute(order).reshape(-1)
    return _aten.index.Tensor(laid, [_places(tensor, *place)])


def _write(order: list[int], tensor: Tensor, source: Tensor, *place: Any) -> Tensor:
    places, laid = _places(tensor, *place), tensor.permute(order)
    written = laid.reshape(-1).index_put((places,), source).reshape(laid.shape)
    return written.permute([order.index(dim) for dim in range(tensor.dim())])


def _places(tensor: Tensor, *place: Any) -> Tensor:
    """Which element, counted in memory, is at each place of what is read or written."""
    counted = torch.arange(tensor.numel(), device=tensor.device)
    return counted.as_strided(*place)


_BY_PLACES: dict[Callable[..., Any], Callable[..., Any]] = {
    _aten.as_strided.default: _read,
    _aten.as_strided_copy.default: _read,
    _aten.as_strided_scatter.default: _write,
}
