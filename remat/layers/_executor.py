"""Carries out a schedule's actions: the one place where they meet tensors.

The ledger of `remat.schedules` judges each action before it is done. The sweep runs what
comes before the first `Backward`; what is held then waits as plain tensors, in an order
that the ledger knows, until the rest is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from remat._numerics import Numerics
from remat.layers._links import Link, added, present, pulled
from remat.layers._stack import Stack
from remat.schedules import (
    Action,
    Advance,
    Backward,
    Drop,
    Ledger,
    Record,
    Restore,
    Snapshot,
)


@final
class Executor:
    """One run of a stack by a schedule.

    Attributes:
        stack: what is run.
        ledger: where the run stands.
        mutations: the new values of what the stages changed, when they first ran.
    """

    def __init__(
        self, stack: Stack, operands: Sequence[Tensor], numerics: Numerics
    ) -> None:
        self.stack = stack
        self.ledger = Ledger()
        self._numerics = numerics
        self._operands = operands
        entered = stack.entered(operands)
        self._captured = operands[stack.num_entered :]
        self._first = entered[: stack.num_state]
        self._slices = stack.slices(entered[stack.num_state :])
        self._state: list[Tensor] = self._first
        self._states: dict[int, list[Tensor]] = {}
        self._records: dict[int, list[Tensor]] = {}
        self._rows: list[list[Tensor]] = []
        self.mutations: list[Tensor] = []
        self._gradients: _Gradients | None = None

    def run(self, actions: Iterable[Action]) -> None:
        """Does what is told, one after the other."""
        for action in actions:
            self.ledger.enter(action)
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Advance(start, stop):
                for stage in range(start, stop):
                    self._advance(stage)
            case Record(stage):
                self._record(stage)
            case Snapshot(state):
                self._states[state] = self._state
            case Restore(state):
                self._state = self._states[state]
            case Drop(state):
                self._forget(state)
            case Backward(stage):
                self._pull(stage)

    def outputs(self) -> list[Tensor]:
        """What the stack returns, once the last state is current."""
        return [*self._state, *self.stack.stacked(self._rows)]

    def held(self) -> list[Tensor]:
        """What waits for the backward, the stack's operands left out."""
        states = [each for k, each in sorted(self._states.items()) if k > 0]
        records = [each for _, each in sorted(self._records.items())]
        return [tensor for each in [*states, *records] for tensor in each]

    def resume(self, ledger: Ledger, held: list[Tensor]) -> None:
        """Takes up a sweep where it ended; `held` is emptied, to let go of it in time."""
        held.reverse()
        self.ledger = ledger
        links = self.stack.links
        for state in sorted({*ledger.kept, *ledger.recorded}):
            count = links[state].num_state
            self._states[state] = (
                [held.pop() for _ in range(count)]
                if state > 0
                else links[0].laid(self._first)
            )
        for stage in sorted(ledger.recorded):
            self._records[stage] = [held.pop() for _ in range(links[stage].num_saved)]
        self._state = []

    def start_backward(
        self, cotangents: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> None:
        """Says with which cotangents the outputs are pulled back, and to what."""
        self._state = []
        self._rows = []
        self._gradients = _Gradients(self.stack, cotangents, wanted)

    def gradients(self) -> list[Tensor | None]:
        """Of the operands, None where none is wanted or none comes."""
        assert self._gradients is not None
        return self._gradients.found(self._operands)

    def _operands_of(self, stage: int, link: Link) -> list[Tensor]:
        self._state = link.laid(self._state)
        own = [self._captured[place] for place in link.captured]
        return [*self._state, *self._slices[stage], *own]

    def _advance(self, stage: int) -> None:
        link = self.stack.links[stage]
        operands = self._operands_of(stage, link)
        returned, mutations = link.advance(operands, self._numerics)
        self._go_on(stage, link, returned, mutations)

    def _record(self, stage: int) -> None:
        link = self.stack.links[stage]
        operands = self._operands_of(stage, link)
        self._states[stage] = self._state
        found = link.record(operands, self._numerics)
        returned, mutations, self._records[stage] = found
        self._go_on(stage, link, returned, mutations)

    def _go_on(
        self,
        stage: int,
        link: Link,
        returned: list[Tensor],
        mutations: Sequence[Tensor],
    ) -> None:
        count = self.stack.num_after(link)
        self._state = returned[:count]
        if self._gradients is None and len(self._rows) == stage:
            # What runs again reads the buffers as they were, and changes none.
            self._rows.append(returned[count:])
            self.mutations += mutations

    def _pull(self, stage: int) -> None:
        assert self._gradients is not None
        link = self.stack.links[stage]
        self._state = self._states[stage]
        operands = self._operands_of(stage, link)
        saved = self._records.pop(stage)
        self._forget(stage)
        self._state = []
        self._gradients.pull(stage, link, saved, operands, self._numerics)

    def _forget(self, state: int) -> None:
        if state not in self.ledger.kept and state not in self.ledger.recorded:
            del self._states[state]


@final
class _Gradients:
    """The cotangent of the current state, and what the operands have got so far."""

    def __init__(
        self, stack: Stack, cotangents: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> None:
        self.stack = stack
        self.wanted = wanted
        self.state: list[Tensor | None] = [*cotangents[: stack.num_last]]
        self.rows = [
            None if each is None else each.unbind(0)
            for each in cotangents[stack.num_last :]
        ]
        self.slices: list[list[Tensor | None]] = [
            [None] * len(stack.links) for _ in range(stack.num_slices)
        ]
        self.captured: list[Tensor | None] = [None] * (len(wanted) - stack.num_entered)

    def pull(
        self,
        stage: int,
        link: Link,
        saved: list[Tensor],
        operands: list[Tensor],
        numerics: Numerics,
    ) -> None:
        """Takes the cotangent of a stage's state back to the state before."""
        stack, place = self.stack, self.stack.place(stage)
        rows = [None if each is None else each[place] for each in self.rows]
        wanted = [
            *(stage > 0 or each for each in self._wanted_state(link)),
            *self.wanted[stack.num_state : stack.num_entered],
            *(self.wanted[stack.num_entered + k] for k in link.captured),
        ]
        found = link.pull(saved, operands, [*self.state, *rows], wanted, numerics)
        self.state = found[: link.num_state]
        scanned = found[link.num_state : link.num_state + stack.num_slices]
        for column, gradient in zip(self.slices, scanned, strict=True):
            column[place] = gradient
        own = found[link.num_state + stack.num_slices :]
        for k, gradient in zip(link.captured, own, strict=True):
            self.captured[k] = added(self.captured[k], gradient)

    def _wanted_state(self, link: Link) -> Sequence[bool]:
        if link is self.stack.links[0]:
            return self.wanted[: self.stack.num_state]
        return [True] * link.num_state

    def found(self, operands: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the stack's operands."""
        stack = self.stack
        entered = [*self.state, *map(_stacked, self.slices)]
        if stack.enter is not None and present(entered):
            entered = pulled(stack.enter, operands[: stack.num_entered], entered)
        return [
            gradient if is_wanted else None
            for gradient, is_wanted in zip(
                [*entered, *self.captured], self.wanted, strict=True
            )
        ]


def _stacked(column: list[Tensor | None]) -> Tensor | None:
    """One gradient from those of the slices; a slice that has none gets zeros."""
    like = next((each for each in column if each is not None), None)
    if like is None:
        return None
    zeros = torch.zeros_like(like) if any(each is None for each in column) else like
    return torch.stack([zeros if each is None else each for each in column])
