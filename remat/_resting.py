"""What the outputs of a run rest on, by the graph that autograd recorded of it.

A run is given stand-ins, the leaves. An output that rests on any other tensor would lose a
gradient, and so would a backward that came to the leaves by another way than an output.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor

from remat import _sharded
from remat._errors import CapturedTensorError, explain
from remat._graph import TensorMeta

#: The bits of all outputs.
ALL = -1


def resting(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    engine: _sharded.Engine | None = None,
) -> tuple[int, ...]:
    """For each leaf the outputs that rest on it, a bit for each; all where none can.

    The last leaf stands for the parameters that an engine has gathered.

    Raises:
        CapturedTensorError: some output rests on a tensor that is no leaf of the run.
    """
    found: dict[int, int] = {}
    known = set(map(id, leaves))
    for variable, bits in variables(outputs):
        if engine and engine.stands_for(variable):
            variable = leaves[-1]
        if id(variable) not in known:
            raise _other(variable)
        found[id(variable)] = found.get(id(variable), 0) | bits
    return tuple(
        found.get(id(leaf), 0) if leaf.requires_grad else ALL for leaf in leaves
    )


def variables(outputs: Sequence[Tensor]) -> Generator[tuple[Tensor, int]]:
    """What the outputs rest on, by autograd's own graph, each with the bits of these."""
    bits: dict[Any, int] = {}
    for index, each in enumerate(outputs):
        if each.grad_fn is not None:
            bits[each.grad_fn] = bits.get(each.grad_fn, 0) | 1 << index
        elif each.requires_grad:
            yield each, 1 << index
    for node in nodes_behind([*bits]):
        own = bits[node]
        for edge in _edges(node):
            bits[edge] = bits.get(edge, 0) | own
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable, own


def nodes_behind(roots: Sequence[Any]) -> list[Any]:
    """These nodes of autograd and those behind them, each before those it leads to."""
    ended: list[Any] = []
    seen: set[Any] = set()
    pending = [(node, False) for node in roots]
    while pending:
        node, has_led = pending.pop()
        if has_led:
            ended.append(node)
        elif node not in seen:
            seen.add(node)
            pending.append((node, True))
            pending.extend((edge, False) for edge in _edges(node))
    return ended[::-1]


def _edges(node: Any) -> list[Any]:
    return [edge for edge, _ in node.next_functions if edge is not None]


def guard_against_others(leaves: Sequence[Tensor]) -> None:
    """Fails in a backward that reaches a run from elsewhere than through its outputs.

    A tensor that the function left somewhere (a hook that collects) holds the graph of the
    run, which ends in leaves that nobody reads.
    """
    for leaf in leaves:
        if leaf.requires_grad:
            leaf.register_hook(_lost)  # pyright: ignore[reportUnknownMemberType]


def _lost(gradient: Tensor) -> Tensor:
    raise CapturedTensorError(
        explain(
            where=f"a gradient {TensorMeta.of(gradient)}",
            what="arrives at a region by a tensor that the function left somewhere, and "
            "did not return.",
            why="The region's inputs are not reached from there: the gradient would be "
            "lost.",
            do="Return the tensor from the function.",
        )
    )


def _other(variable: Tensor) -> CapturedTensorError:
    return CapturedTensorError(
        explain(
            where=f"a tensor {TensorMeta.of(variable)} that requires grad",
            what="is reached by a way that cannot be followed at the next run.",
            why="Its gradient would be lost.",
            do="Pass it as an argument, or keep it in a closure, a global, a list, "
            "a dict or an attribute that the function names.",
        )
    )
