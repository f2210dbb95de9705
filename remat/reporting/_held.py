"""Reads from autograd's graph what it holds between a forward and its backward.

Each node of the graph shows what it saved: a node of a region as `saved_tensors`, a
node of one of torch's operators in attributes that begin with `_saved_`. What a
scheduled stack holds is kept outside of its node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast, final

from torch import Tensor

from remat._regions.protocol import Call
from remat._regions.waiting import storages
from remat._torch import autograd, tensors
from remat.layers._scheduled import Swept


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One node of autograd's graph, with what it saved.

    Attributes:
        raw: autograd's object.
        number: its place in the order of the forward.
        call: the call of a region that it is; None for an operator of torch.
        saved: the tensors that it saved, by the order or the name in which it did.
    """

    raw: Any
    number: int
    call: Call | None
    saved: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        """The backward operator, "MulBackward0"."""
        return str(self.raw.name())

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """For each storage that it holds, what tells it from others, and its bytes."""
        return tuple(
            (tensors.key_of(each), each.nbytes())
            for tensor in self.saved
            for each in storages(tensor)
        )


def graph_of(outputs: Sequence[Tensor]) -> tuple[tuple[Node, ...], tuple[Tensor, ...]]:
    """The nodes behind some outputs in the order of the forward, and the leaves.

    Reading a saved tensor unpacks what saved-tensor hooks of others packed.
    """
    raws, leaves = walk(outputs)
    nodes = sorted(map(_node, raws), key=lambda node: node.number)
    return tuple(nodes), leaves


def walk(outputs: Sequence[Tensor]) -> tuple[list[Any], tuple[Tensor, ...]]:
    """Autograd's nodes behind some outputs, in no order, and the leaves."""
    nodes: list[Any] = []
    leaves: list[Tensor] = []
    first: list[Any] = [each.grad_fn or _leaf_node(each) for each in outputs]
    pending = list(dict.fromkeys(first))
    seen: set[Any] = set(pending)
    while pending:
        raw = pending.pop()
        if hasattr(raw, "variable"):
            leaves.append(raw.variable)
        else:
            nodes.append(raw)
        for below, _ in raw.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                pending.append(below)
    return nodes, tuple(leaves)


def _leaf_node(leaf: Tensor) -> Any:
    """The node that accumulates a leaf's gradient."""
    made = leaf.view_as(leaf).grad_fn
    assert made is not None
    return made.next_functions[0][0]


def _node(raw: Any) -> Node:
    call = getattr(raw, "call", None)
    call = call if isinstance(call, Call) else None
    saved = tuple(_saved_by(raw))
    if call is not None and isinstance(call.region, Swept):
        saved += call.region.held.tensors
    return Node(raw, autograd.node_number(raw), call, saved)


def _saved_by(raw: Any) -> Iterator[Tensor]:
    if hasattr(raw, "saved_tensors"):
        yield from (each for each in raw.saved_tensors if each is not None)
        return
    for name in dir(raw):
        if name.startswith("_saved_"):
            found = getattr(raw, name)
            several = (
                cast("list[Any]", found) if isinstance(found, list | tuple) else [found]
            )
            yield from (each for each in several if isinstance(each, Tensor))
