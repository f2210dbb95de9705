"""Carries out a schedule's actions on tensors.

The ledger of `remat.schedules` checks each action before it runs. The sweep runs the
actions before the first `Backward`. The states and records that are held then wait as
plain tensors, in an order that the ledger knows, until the remaining actions run.
"""

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from remat import schedules
from remat._regions.rules import without_none
from remat._switches.numerics import Numerics
from remat._torch import guards
from remat.layers._links import Pass, pull_back
from remat.layers._stack import Stack, slices_of, stacked_rows


@final
class Executor:
    """One run of a stack by a schedule; the ledger says where it stands.

    `mutations` are the new values of what the stages changed when they first ran.
    """

    def __init__(
        self, stack: Stack, operands: Sequence[Tensor], numerics: Numerics
    ) -> None:
        self.stack = stack
        self.ledger = schedules.Ledger()
        self._pass = Pass(numerics)
        self._operands = operands
        self._captured = operands[stack.num_entered :]
        entered = stack.entered(operands)
        self._first = entered[: stack.num_state]
        scanned, count = entered[stack.num_state :], len(stack.links)
        self._slices = slices_of(scanned, count, stack.is_reversed)
        self._state: list[Tensor] = self._first
        self._states: dict[int, list[Tensor]] = {}
        self._records: dict[int, list[Tensor]] = {}
        self._rows: list[list[Tensor]] = []
        self.mutations: list[Tensor] = []
        self._gradients: _Gradients | None = None

    def run(self, actions: Iterable[schedules.Action]) -> None:
        for action in actions:
            self.ledger.enter(action)
            match action:
                case schedules.Advance(start, stop):
                    for stage in range(start, stop):
                        self._run_stage(stage, is_recorded=False)
                case schedules.Record(stage):
                    self._run_stage(stage, is_recorded=True)
                case schedules.Snapshot(state):
                    # Laid now, so that no memory of what the stage computed waits with it.
                    self._state = self.stack.links[state].laid(self._state)
                    self._states[state] = self._state
                case schedules.Restore(state):
                    self._state = self._states[state]
                case schedules.Drop(state):
                    self._free_state(state)
                case schedules.Backward(stage):
                    self._pull_stage(stage)

    def outputs(self) -> list[Tensor]:
        """What the stack returns, once the last state is current."""
        return [*self._state, *stacked_rows(self._rows, self.stack.is_reversed)]

    def held(self) -> list[Tensor]:
        """The tensors that wait for the backward, without the stack's operands."""
        states = [each for k, each in sorted(self._states.items()) if k > 0]
        records = [each for _, each in sorted(self._records.items())]
        return [tensor for each in [*states, *records] for tensor in each]

    def resume(self, ledger: schedules.Ledger, held: list[Tensor]) -> None:
        """Continues a sweep where it ended; empties `held`, so that it is freed in time."""
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
            saved = links[stage].region.stages(links[stage].roots).cut.saved
            self._records[stage] = [held.pop() for _ in saved]

    def pull(
        self,
        actions: Iterable[schedules.Action],
        cotangents: Sequence[Tensor | None],
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """Runs the backward: the operands' gradients, None if not wanted or none flows."""
        self._state = []
        self._rows = []
        self._gradients = _Gradients(self.stack, cotangents, wanted)
        self.run(actions)
        return self._gradients.found(self._operands)

    def _operands_of(self, stage: int) -> list[Tensor]:
        link = self.stack.links[stage]
        self._state = link.laid(self._state)
        captured = [self._captured[place] for place in link.captured]
        return [*self._state, *self._slices[stage], *captured]

    def _run_stage(self, stage: int, *, is_recorded: bool) -> None:
        link, operands = self.stack.links[stage], self._operands_of(stage)
        returned, mutations, saved = self._pass.run(
            link, link.region, operands, save=is_recorded
        )
        if is_recorded:
            self._states[stage] = self._state
            self._records[stage] = [*saved]
        self._state, row = self.stack.parted(without_none(returned))
        if self._gradients is None and len(self._rows) == stage:
            # A stage that runs again reads the buffers as they were, and changes none.
            self._rows.append(row)
            self.mutations += mutations

    def _pull_stage(self, stage: int) -> None:
        assert self._gradients is not None
        self._state = self._states[stage]
        operands = self._operands_of(stage)
        saved = self._records.pop(stage)
        self._free_state(stage)
        self._state = []
        self._gradients.pull(stage, saved, operands, self._pass)

    def _free_state(self, state: int) -> None:
        if state not in self.ledger.kept and state not in self.ledger.recorded:
            del self._states[state]


@final
class _Gradients:
    """The cotangent of the current state, and the operands' gradients so far."""

    def __init__(
        self, stack: Stack, cotangents: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> None:
        self.stack = stack
        self.wanted = wanted
        self.state, rows = stack.parted(cotangents)
        self.rows = [None if each is None else each.unbind(0) for each in rows]
        self.slices: list[list[Tensor | None]] = [
            [None] * len(stack.links) for _ in range(stack.num_slices)
        ]
        is_quiet = guards.is_quiet()
        self.captured = [_GradientSum(is_quiet) for _ in wanted[stack.num_entered :]]

    def pull(
        self,
        stage: int,
        saved: Sequence[Tensor],
        operands: Sequence[Tensor],
        under: Pass,
    ) -> None:
        link, place = self.stack.links[stage], self.stack.place(stage)
        rows = [None if each is None else each[place] for each in self.rows]
        first, entered = self.stack.num_state, self.stack.num_entered
        wanted = [
            *([True] * link.num_state if stage else self.wanted[:first]),
            *self.wanted[first:entered],
            *(self.wanted[entered + place] for place in link.captured),
        ]
        wanted = tuple(
            each and meta.requires_grad
            for each, meta in zip(wanted, link.region.operands, strict=True)
        )
        gradients = link.pull(saved, operands, [*self.state, *rows], wanted, under)
        count = link.num_state
        self.state = gradients[:count]
        for column in self.slices:
            column[place] = gradients[count]
            count += 1
        for k, gradient in zip(link.captured, gradients[count:], strict=True):
            self.captured[k].add(gradient)

    def found(self, operands: Sequence[Tensor]) -> list[Tensor | None]:
        stack = self.stack
        entered = [*self.state, *map(_stacked_column, self.slices)]
        if stack.enter is not None and without_none(entered):
            entered = pull_back(stack.enter, operands[: stack.num_entered], entered)
        gradients = [*entered, *(each.tensor for each in self.captured)]
        return [
            gradient if is_wanted else None
            for gradient, is_wanted in zip(gradients, self.wanted, strict=True)
        ]


@final
class _GradientSum:
    """A sum of gradients; None before the first one.

    In place only if `is_quiet`: tensors of a transform may not be added to others in place.
    """

    def __init__(self, is_quiet: bool) -> None:
        self.tensor: Tensor | None = None
        self._is_quiet = is_quiet
        self._is_own = False

    def add(self, gradient: Tensor | None) -> None:
        """Adds a gradient, in place if the sum is this object's own tensor."""
        if gradient is None:
            return
        if self.tensor is None:
            self.tensor = gradient  # not this object's own: it may be a cotangent
        elif self._is_own:
            self.tensor.add_(gradient)
        else:
            self.tensor = self.tensor + gradient
            is_dense = self.tensor.layout is torch.strided
            self._is_own = self._is_quiet and is_dense and guards.is_plain(self.tensor)


def _stacked_column(column: list[Tensor | None]) -> Tensor | None:
    """One gradient from those of the slices; a slice that has none gets zeros."""
    like = next((each for each in column if each is not None), None)
    if like is None:
        return None
    zeros = torch.zeros_like(like) if any(each is None for each in column) else like
    return torch.stack([zeros if each is None else each for each in column])
