"""Reads from autograd's graph what it holds between a forward and its backward.

Each node of the graph shows what it saved: a node of a region as `saved_tensors`, a
node of one of torch's operators in attributes that begin with `_saved_`. What a
scheduled stack holds is kept outside of its node.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, final

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from remat._programs.watching import tensors_in
from remat._regions.protocol import Call
from remat._torch import autograd


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One node of autograd's graph, with what it saved."""

    raw: Any  # autograd's object, whose `name()` is that of the backward operator
    call: Call | None  # the call of a region that it is; None for an operator of torch
    # the tensors that it saved, by the order or the name in which it did
    saved: tuple[Tensor, ...]


def graph_of(outputs: Sequence[Tensor]) -> tuple[tuple[Node, ...], tuple[Tensor, ...]]:
    """The nodes behind some outputs in the order of the forward, and the leaves.

    Reading a saved tensor unpacks what saved-tensor hooks of others packed.
    """
    raws, leaves = _nodes_and_leaves(outputs)
    return tuple(map(_node, sorted(raws, key=autograd.node_number))), leaves


def leaves_of(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The leaves of autograd's graph behind some outputs."""
    return _nodes_and_leaves(outputs)[1]


def _nodes_and_leaves(
    outputs: Sequence[Tensor],
) -> tuple[list[Any], tuple[Tensor, ...]]:
    """Autograd's objects behind some outputs, and what those that accumulate belong to."""
    raws = autograd.nodes_behind(
        [each.grad_fn or get_gradient_edge(each).node for each in outputs]
    )
    leaves = tuple(raw.variable for raw in raws if hasattr(raw, "variable"))
    return [raw for raw in raws if not hasattr(raw, "variable")], leaves


def _node(raw: Any) -> Node:
    call = getattr(raw, "call", None)
    call = call if isinstance(call, Call) else None
    apart = () if call is None else call.region.held_apart
    return Node(raw, call, (*_saved_by(raw), *apart))


def _saved_by(raw: Any) -> Iterator[Tensor]:
    if hasattr(raw, "saved_tensors"):
        yield from (each for each in raw.saved_tensors if each is not None)
        return
    for name in dir(raw):
        if name.startswith("_saved_"):
            yield from tensors_in(getattr(raw, name))
