"""Finds a tensor that wants a gradient but is hidden from the walk over a function's state.

If nothing that a region sees wants a gradient, its function runs as it is. If the outputs
still require grad, autograd's graph tells which leaf they depend on. That is either a leaf
that the function made for itself, which is harmless; or a tensor that the function reached
in a way that cannot be followed, such as an iterator. In the second case the plain run would
hold everything for its backward without saying so: that is refused.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx

from remat import _captures
from remat._errors import out_of_reach
from remat._graph.meta import TensorMeta
from remat._rerun.dependence import is_held, nodes_behind
from remat._torch import levels, trees


def require_nothing_hidden(result: Any, roots: tuple[object, ...]) -> None:
    """Refuses the result of a plain run that depends on a hidden tensor.

    Args:
        result: what the function returned.
        roots: the function, and the objects among its arguments.

    Raises:
        CapturedTensorError: it rests on a leaf that is reached neither from the roots nor
            from the result, and that something else holds.
    """
    outputs = [each for leaf in trees.tensor_leaves(result) for each in _wanted(leaf)]
    if not outputs:
        return
    nodes = nodes_behind([each.grad_fn for each in outputs if each.grad_fn is not None])
    held = [node for node in nodes if is_held(node)]
    if not held:
        return
    seen = _captures.survey((result, *roots)).tensors.keys() | _kept_by(nodes)
    unseen = [node for node in held if id(node.variable) not in seen]
    if unseen:
        gc.collect()  # a leaf that only a cycle holds is not held
    for node in filter(is_held, unseen):
        raise out_of_reach(
            f"a tensor {TensorMeta.of(node.variable)} that requires grad",
            "No other tensor that the region sees requires grad, so it would run without "
            "recomputation and hold all that its backward needs.",
        )


def _wanted(tensor: Tensor) -> Iterator[Tensor]:
    """The levels of a tensor at which some reverse mode wants a gradient."""
    while True:
        if tensor.requires_grad:
            yield tensor
        below = levels.below(tensor)
        if below is None:
            return
        tensor = below


def _kept_by(nodes: Iterable[Any]) -> set[int]:
    """The ids of all that nodes written in Python keep for their backward."""
    seen: set[int] = set()
    pending: list[object] = [
        vars(node) for node in nodes if isinstance(node, FunctionCtx)
    ]
    while pending:
        each = pending.pop()
        if isinstance(each, types.FunctionType):
            each = each.__closure__  # its globals are not kept
        if not isinstance(each, (type, types.ModuleType)) and id(each) not in seen:
            seen.add(id(each))
            pending += gc.get_referents(each)
    return seen
