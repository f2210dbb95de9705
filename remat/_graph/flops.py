"""FLOPs of operators and of the steps of a graph, by torch's own formulas."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import flop_counter

from remat._graph.meta import TensorMeta
from remat._graph.values import Graph, Value, replace_refs


def step_flops(graph: Graph, value: Value) -> int:
    """FLOPs of one step by torch's own formulas, 0 where it has none."""
    metas = (value.meta, *(graph.values[index].meta for index in value.uses))
    if value.op is None or None in metas:  # a sparse tensor is computed with
        return 0

    def shape(index: int) -> object:
        return _shapes(graph.values[index].meta)

    args, kwargs = replace_refs((value.args, value.kwargs), shape)
    return flops_of(value.op, args, dict(kwargs), _shapes(value.meta))


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of one operator by torch's own formulas, 0 where it has none.

    The CPU's attention has none in torch 2.13: those of other attention kernels are used. Most need
    only shapes, which may be given instead of tensors; their results are cached. Those that need
    numbers (attention over ragged sequences) give 0 if there are only shapes.
    """
    packet, known = getattr(op, "overloadpacket", op), flop_counter.flop_registry
    formula = known.get(packet) or known.get(_COUNTED_AS.get(packet))
    if formula is None:
        return 0
    if getattr(formula, "_get_raw", False):
        has_numbers = any(isinstance(each, Tensor) for each in args)
        return int(formula(*args, **kwargs, out_val=out)) if has_numbers else 0
    try:
        return _flops_at(formula, _shapes(args), _shapes(kwargs), _shapes(out))
    except TypeError:  # an argument that does not hash
        return int(formula(*args, **kwargs, out_val=out))


@functools.lru_cache(maxsize=4096)
def _flops_at(formula: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> int:
    return int(formula(*args, **dict(kwargs), out_val=out))


def _shapes(tree: Any) -> Any:
    """Shapes instead of tensors and their metadata, so that arguments can be hashed."""
    if isinstance(tree, Tensor):
        return tree.shape
    if isinstance(tree, TensorMeta):
        return torch.Size(tree.hints)
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, tuple | list):
        return tuple(map(_shapes, cast("Sequence[Any]", tree)))
    if isinstance(tree, dict):
        given = cast("dict[str, Any]", tree)
        return tuple((name, _shapes(each)) for name, each in given.items())
    return tree


# The CPU's attention, and the attention whose formula is used for it.
_COUNTED_AS = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}"): getattr(
        torch.ops.aten, f"_scaled_dot_product_{other}"
    )
    for name, other in (
        ("flash_attention_for_cpu", "flash_attention"),
        ("flash_attention_for_cpu_backward", "efficient_attention_backward"),
    )
}
