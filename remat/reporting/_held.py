"""Reads from autograd's graph what it holds between a forward and its backward.

Each node of the graph shows what it saved: a node of a region as `saved_tensors`, a
node of one of torch's operators in attributes that begin with `_saved_`. What a
scheduled stack holds is kept outside of its node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, final

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from remat._programs.watching import tensors_in
from remat._regions.protocol import Call
from remat._rerun.dependence import nodes_behind
from remat._torch import autograd


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One node of autograd's graph, with what it saved."""

    raw: Any  # autograd's object
    number: int  # its place in the order of the forward
    call: Call | None  # the call of a region that it is; None for an operator of torch
    # the tensors that it saved, by the order or the name in which it did
    saved: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        """The backward operator, "MulBackward0"."""
        return str(self.raw.name())


def graph_of(outputs: Sequence[Tensor]) -> tuple[tuple[Node, ...], tuple[Tensor, ...]]:
    """The nodes behind some outputs in the order of the forward, and the leaves.

    Reading a saved tensor unpacks what saved-tensor hooks of others packed.
    """
    raws = _raw_nodes(outputs)
    nodes = [_node(raw) for raw in raws if not hasattr(raw, "variable")]
    return tuple(sorted(nodes, key=lambda node: node.number)), _leaves_among(raws)


def leaves_of(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The leaves of autograd's graph behind some outputs."""
    return _leaves_among(_raw_nodes(outputs))


def _raw_nodes(outputs: Sequence[Tensor]) -> list[Any]:
    """Autograd's objects behind some outputs, those that accumulate gradients included."""
    return nodes_behind(
        [output.grad_fn or get_gradient_edge(output).node for output in outputs]
    )


def _leaves_among(raws: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(raw.variable for raw in raws if hasattr(raw, "variable"))


def _node(raw: Any) -> Node:
    call = getattr(raw, "call", None)
    call = call if isinstance(call, Call) else None
    apart = () if call is None else call.region.held_apart
    return Node(raw, autograd.node_number(raw), call, (*_saved_by(raw), *apart))


def _saved_by(raw: Any) -> Iterator[Tensor]:
    if hasattr(raw, "saved_tensors"):
        yield from (each for each in raw.saved_tensors if each is not None)
        return
    for name in dir(raw):
        if name.startswith("_saved_"):
            yield from tensors_in(getattr(raw, name))
