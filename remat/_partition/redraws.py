"""Redraws that continue from where the redraw before them ended.

Most redraws of a backward come in the order of the draws in the forward. Then one generator
state is enough for a whole row of redraws: each starts from the state at which the redraw
before it ended, and the state saved for it is empty. The forward still saves a state if it
finds that something else has drawn in between (another thread, an operator that does not
declare its draws), and the redraw starts from that state. The states of accelerators take 16
bytes: each is saved.

A redraw that continues reads the draw before it (`Value.after`) in every program. So a draw
that is dead otherwise still runs, for the state at which it ends, and the order of the draws
is kept. `torch.utils.checkpoint` also holds one state a call, and runs the whole function
again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat._generators import recorded
from remat._graph import operators
from remat._graph.values import Graph, Ref, TensorMeta, Value, check, renumbered
from remat._tracing.trace import Joint

Links = tuple[int | None, ...]
"""For each draw the place of the draw at whose end it starts; None: it has its own state."""


def linked(joint: Joint, states: Sequence[Ref], links: Links) -> Joint:
    """The joint graph with `after` set on the draws that continue others.

    Args:
        joint: the joint graph.
        states: from which states its draws start, in order.
        links: see `Links`.
    """
    if not any(link is not None for link in links):
        return joint
    values = list(joint.graph.values)
    for state, link in zip(states, links, strict=True):
        if link is not None:
            for before, index in pairs_of(joint.graph, state, states[link]):
                values[index] = dataclasses.replace(values[index], after=Ref(before))
    graph = dataclasses.replace(joint.graph, values=tuple(values))
    return dataclasses.replace(joint, graph=check(graph))


def pairs_of(graph: Graph, state: Ref, before: Ref) -> list[tuple[int, int]]:
    """Pairs (the last draw from the state before, a draw from this state).

    The redraws of inner regions are among them.
    """
    found: list[tuple[int, int]] = []
    latest = -1
    for index, value in enumerate(graph.values):
        if value.state == before:
            latest = index
        elif value.state == state:
            found.append((latest, index))
    return found


def written_out(graph: Graph) -> Graph:
    """The program with steps that read the state at a draw's end and choose the next start."""
    ended = {value.after.index for value in graph.values if value.after is not None}
    return _Writing(graph, ended).run() if ended else graph


class _Writing:
    """Writes a program again, with a step for the end of each draw that is continued."""

    def __init__(self, graph: Graph, ended: set[int]) -> None:
        self._old = graph
        self._ended = ended
        # Before a draw of the forward comes the step that records its state.
        self._since = {
            value.state.index: value.after.index
            for value in graph.values
            if value.state and value.after and not value.is_redraw
        }
        self._lines: list[Value] = []
        self._places: dict[int, Ref] = {}
        self._ends: dict[int, Ref] = {}

    def run(self) -> Graph:
        for index, value in enumerate(self._old.values):
            self._places[index] = self._add(self._renamed(index, value))
            if index in self._ended:
                self._ends[index] = self._add(self._end(index, value))
        outputs = tuple(ref and self._places[ref.index] for ref in self._old.outputs)
        return check(Graph(tuple(self._lines), self._old.num_inputs, outputs))

    def _renamed(self, index: int, value: Value) -> Value:
        after = value.after
        new = renumbered(
            dataclasses.replace(value, after=None), self._places.__getitem__
        )
        if index in self._since:
            end = self._ends[self._since[index]]
            return dataclasses.replace(new, op=recorded.SINCE, args=(end, *new.args))
        if after is None or not value.is_redraw:
            return new
        picked = dataclasses.replace(
            self._state(value),
            op=recorded.GOING_ON,
            args=(new.state, self._ends[after.index]),
        )
        return dataclasses.replace(new, state=self._add(picked))

    def _end(self, index: int, value: Value) -> Value:
        """The step that gives the state at which a draw has ended."""
        if value.is_redraw:
            args, op = (self._places[index],), operators.rng_end
        else:
            args, op = self._device(value), recorded.STATE
        return dataclasses.replace(self._state(value), op=op, args=args)

    def _state(self, value: Value) -> Value:
        """A step that gives a state; its operator and arguments are still to be set."""
        assert value.state is not None, "a draw that ends without having started"
        meta = self._old.values[value.state.index].meta
        assert isinstance(meta, TensorMeta)
        return Value(
            None, meta=meta, is_backward=value.is_backward, source=value.source
        )

    def _device(self, value: Value) -> tuple[object, ...]:
        assert value.state is not None
        return self._old.values[value.state.index].args

    def _add(self, value: Value) -> Ref:
        self._lines.append(value)
        return Ref(len(self._lines) - 1)
