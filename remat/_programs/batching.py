"""Operators that replace others under vmap, where a program is mapped.

A program has operators that plain code does not call under vmap: those that users' code
is taken apart into, and those that replace writes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._torch import levels

_aten = torch.ops.aten


def _index_fill(tensor: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    """index_fill by a mask. Torch's rule writes one example's value over the others."""
    if not tensor.dim():
        return value.clone()
    mask = torch.zeros(tensor.shape[dim], dtype=torch.bool, device=tensor.device)
    mask = mask.index_fill(0, index, True)
    rest = tensor.dim() - dim % tensor.dim() - 1
    return torch.where(mask.view(-1, *(1,) * rest), value, tensor)


def _copy(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """copy, in its functional form: the source in the other's shape and dtype, carried out."""
    del non_blocking
    plain = source.to(tensor).resolve_conj().resolve_neg()
    return plain.expand(tensor.shape).contiguous()


def _as_strided_scatter(
    tensor: Tensor,
    source: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None = None,
) -> Tensor:
    """as_strided_scatter by indices, where memory is in the order of the elements."""
    if not tensor.is_contiguous():
        return torch.as_strided_scatter(tensor, source, size, stride, offset)
    order = torch.arange(tensor.numel(), device=tensor.device)
    places = order.as_strided(size, stride, offset)
    return tensor.reshape(-1).index_put((places,), source).reshape(tensor.shape)


# Obsolete when views do not mind how examples lie in memory, when torch's rule for
# index_fill is right where the values are mapped and the tensor is not, and when there are
# some for copy and as_strided_scatter, which replace a write to a strided view.
_BATCHABLE: dict[Callable[..., Any], Callable[..., Any]] = {
    _aten.view.default: _aten.reshape.default,
    _aten._unsafe_view.default: _aten.reshape.default,
    _aten.index_fill.int_Tensor: _index_fill,
    _aten.copy.default: _copy,
    _aten.as_strided_scatter.default: _as_strided_scatter,
}


def batchable(op: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, or under vmap one that does the same for any layout of examples."""
    active = levels.current_interpreter()
    if active is None or active[0] != "vmap":
        return op
    return _BATCHABLE.get(op, op)
