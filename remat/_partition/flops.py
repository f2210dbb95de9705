"""FLOPs of the steps of a graph, by torch's own formulas."""

from __future__ import annotations

import torch

from remat._graph.values import (
    Graph,
    Meta,
    TensorMeta,
    Value,
    replace_refs,
)
from remat._torch import flops


def _shapes(meta: Meta) -> object:
    if isinstance(meta, TensorMeta):
        return torch.Size(meta.hints)
    return None if meta is None else tuple(_shapes(each) for each in meta)


def step_flops(graph: Graph, value: Value) -> int:
    """FLOPs of one step by torch's own formulas, 0 where it has none."""
    if value.op is None:
        return 0

    def shape(index: int) -> object:
        meta = graph.values[index].meta
        return _shapes(meta)

    args, kwargs = replace_refs((value.args, value.kwargs), shape)
    return flops.flops_of(value.op, args, dict(kwargs), _shapes(value.meta))
