"""Pointwise operators that write over an argument that nothing reads after them.

A program frees each value after its last use. Where the result of a pointwise operator has the
layout of such a value, it takes over the memory instead: one value less is alive during that
step, and the kernel touches less memory. Both forms of the operator are one kernel, which reads
an element before it writes it, so that the numbers are the same to the bit. Inputs belong to
the caller, or wait for another backward, and are never written.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from remat._graph import operators
from remat._graph.meta import TensorMeta, is_alike, is_open
from remat._graph.values import Graph, Ref, Value, roots, step_behind
from remat._torch import schemas

# Smaller tensors come from the allocator's lists: a heuristic.
_FEWEST_BYTES = 2**16

_aten: Any = torch.ops.aten

# Views with every element of a tensor.
_RESHAPED = (_aten.view.default, _aten._unsafe_view.default)
_OF_ALL = (*_RESHAPED, _aten.t.default, _aten.transpose.int, _aten.permute.default)

# Beside pointwise operators: each gives tensors that share memory with nothing.
_MORE = (
    "mm addmm bmm baddbmm matmul clone convolution convolution_backward "
    "native_layer_norm native_layer_norm_backward "
    "native_group_norm native_group_norm_backward _softmax _softmax_backward_data"
)
_MAKERS = frozenset(f"aten.{name}" for name in _MORE.split(" "))


def with_overwriting(graph: Graph) -> Graph:
    """The graph with operators that write over what they are the last to read.

    It is for plain tensors, not to be traced or differentiated. The graph itself is returned
    where nothing can be written over.
    """
    owners = roots(graph)
    last = _last_reads(graph, owners)
    found: dict[int, Value] = {}
    for index in range(graph.num_inputs, len(graph.values)):
        value = graph.values[index]
        variant = _writing_form(value)
        if variant is None:
            continue
        for use in value.uses:
            if last[owners[use]] == index and _may_take(graph, owners, value, use):
                op, name = variant
                kwargs = (*value.kwargs, (name, Ref(use)))
                found[index] = dataclasses.replace(value, op=op, kwargs=kwargs)
                break
    if not found:
        return graph
    values = [found.get(index, value) for index, value in enumerate(graph.values)]
    return dataclasses.replace(graph, values=tuple(values))


def _last_reads(graph: Graph, owners: Sequence[int]) -> list[int]:
    """The last step that reads, and may overwrite, each value's memory; past all for an output.

    Operators that are not torch's own may read on beyond their step, as a collective does
    until its result is waited for.
    """
    end = len(graph.values)
    last = list(range(end))
    for index, value in enumerate(graph.values):
        op: Any = value.op
        is_foreign = isinstance(op, schemas.OpOverload) and op.namespace != "aten"
        until = end if is_foreign else index
        for use in value.uses:
            last[owners[use]] = max(last[owners[use]], until)
    for ref in graph.outputs:
        if ref is not None:
            last[owners[ref.index]] = end
    return last


def _writing_form(value: Value) -> tuple[Any, str] | None:
    """The operator that writes into a given tensor, if a step is pointwise and large."""
    meta = value.meta
    if not isinstance(meta, TensorMeta) or not _is_pointwise(value.op):
        return None
    # An open size is another one in each call, and might be one that is broadcast.
    if is_open(meta) or meta.size_bytes < _FEWEST_BYTES:
        return None
    return schemas.out_variant(value.op)


def _is_pointwise(op: Any) -> bool:
    return isinstance(op, schemas.OpOverload) and torch.Tag.pointwise in op.tags


def _may_take(graph: Graph, owners: Sequence[int], value: Value, use: int) -> bool:
    """Whether a step may write over an argument whose memory it is the last to read."""
    owner = owners[use]
    if owner < graph.num_inputs or not is_alike(graph.values[use].meta, value.meta):
        return False
    # Another view of that memory may have the elements in another order.
    if any(owners[other] == owner for other in value.uses if other != use):
        return False
    return _is_whole(graph, owner, use) and _is_alone(graph.values[owner], graph)


def _is_whole(graph: Graph, owner: int, use: int) -> bool:
    """Whether what is overwritten has all elements of the value in whose memory it is."""
    while use != owner:
        view = graph.values[use]
        if view.op not in _OF_ALL:
            return False
        use = view.uses[0]
    return True


def _is_alone(made: Value, graph: Graph) -> bool:
    """Whether what is overwritten is in memory that its step made, and that nothing else is in."""
    made = step_behind(made, graph.values)
    if operators.short_name(made.op) in _MAKERS:
        return True
    # A composite may return what it was given: the conjugate of a real tensor.
    return _is_pointwise(made.op) and not (
        operators.returns_view(made.op)
        or operators.is_mutable(made.op)
        or schemas.is_composite(made.op)
    )
