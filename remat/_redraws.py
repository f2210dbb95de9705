"""Redraws that go on from where the one before them ended.

Most redraws of a backward follow one another as their draws did in the forward. Then one
generator state is enough for a run of them: each starts from the state at which the one
before it ended, and what waits for it is empty. The forward hands a state out nevertheless
where it finds that somebody else has drawn in between (another thread, an operator that
does not say that it draws), and the redraw starts from that one. States of accelerators
are 16 bytes: each of theirs waits.

A redraw that goes on reads the draw before it (`Value.after`), in every program: a draw
that would be dead otherwise runs for the state at which it ends, and none before its turn.
`torch.utils.checkpoint` likewise holds one state a call, and runs all of the function again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat import _operators as operators, _rng
from remat._graph import Graph, Ref, TensorMeta, Value, check, renumbered
from remat._trace import Joint

Links = tuple[int | None, ...]
"""For each draw the place of the one from whose end it goes on; None: from its own state."""


def linked(joint: Joint, states: Sequence[Ref], links: Links) -> Joint:
    """The joint graph whose draws know from whose ends they go on.

    Args:
        joint: the joint graph.
        states: from which states its draws start, in order.
        links: whose ends these are, if they are left out.
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
    """Each draw from a state, after the last draw that starts from the state before.

    Inner regions' redraws are among them.
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
    """The program in which states are read where draws end, and picked where they start."""
    ended = {value.after.index for value in graph.values if value.after is not None}
    return _Writing(graph, ended).run() if ended else graph


class _Writing:
    """A program as it is being written again, with steps of its own for ends of draws."""

    def __init__(self, graph: Graph, ended: set[int]) -> None:
        self._old = graph
        self._ended = ended
        # A draw of the forward is preceded by the state that is handed out.
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
            return dataclasses.replace(new, op=_rng.SINCE, args=(end, *new.args))
        if after is None or not value.is_redraw:
            return new
        picked = dataclasses.replace(
            self._state(value),
            op=_rng.GOING_ON,
            args=(new.state, self._ends[after.index]),
        )
        return dataclasses.replace(new, state=self._add(picked))

    def _end(self, index: int, value: Value) -> Value:
        """The step that hands out the state at which a draw has ended."""
        if value.is_redraw:
            args, op = (self._places[index],), operators.rng_end
        else:
            args, op = self._device(value), _rng.STATE
        return dataclasses.replace(self._state(value), op=op, args=args)

    def _state(self, value: Value) -> Value:
        """A step that hands out a state, without its operator and arguments."""
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
