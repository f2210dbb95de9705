"""A scheduled stack as a region: the rules of differentiation of `_regions.rules`, by replay.

The forward carries out the sweep of a schedule, and its backward the rest. Both run below every
transform, and are mapped where a vmap level is met. The backward is a region too, so that nothing
of it is recorded under `torch.func.grad`; what is derived from it, and forward mode, comes from
the stack of plain regions (`Rerun`), which holds one state a stage.

Held tensors are kept outside of autograd, which frees what it saved only at the end of
a backward: here they are freed while the backward proceeds. Another backward through
the same graph runs the sweep again. An empty tensor stands for the held ones, and is saved
as regions save values: if vmap has mapped that one, it has mapped the held tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from remat._errors import SavedTensorModifiedError
from remat._graph.joint import View
from remat._regions.forwards import Results
from remat._regions.functions import Batch, Roots, mapped
from remat._regions.protocol import Asked, Batched, Region, WithoutProgram
from remat._regions.rules import without_none
from remat._rerun.region import rerun_of
from remat._switches.numerics import Numerics
from remat.layers._executor import Executor
from remat.layers._stack import Stack
from remat.schedules import Action, Advance, Backward, Ledger

#: (operands, whether to hold what the backward needs) -> outputs, new values of buffers,
#: and with it a mark and what waits.
Sweep = Callable[[Sequence[Tensor], bool, Numerics], list[Tensor]]
#: (what waits, or None if it is gone; operands and cotangents) -> gradients.
Replayed = Callable[[list[Tensor] | None, Sequence[Tensor], Numerics], list[Tensor]]


@final
class Held:
    """What one sweep holds for its backward, to be taken once; a ledger of where it ended."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._tensors: list[Tensor] | None = None
        self._versions: list[int] = []
        self._is_filled = False

    def put(self, tensors: list[Tensor]) -> None:
        """Keeps what a sweep holds; drops it if there is a second, as both look alike."""
        self._tensors = None if self._is_filled else tensors
        self._versions = [each._version for each in tensors]
        self._is_filled = True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that wait, without taking them."""
        return tuple(self._tensors or ())

    def take(self) -> list[Tensor] | None:
        """What waits; None the second time.

        Raises:
            SavedTensorModifiedError: some of it was changed in place meanwhile.
        """
        tensors, self._tensors = self._tensors, None
        pairs = zip(tensors or (), self._versions, strict=False)
        if any(each._version != version for each, version in pairs):
            raise SavedTensorModifiedError.of(
                where="the backward of a scheduled scan or chain",
                what="an output that waits for it was changed in place.",
                why="The backward of the last stage would start from other numbers.",
                do="Change a copy (y = y + 1 instead of y += 1), or do it after "
                "backward().",
            )
        return tensors


@final
@dataclasses.dataclass(frozen=True)
class Swept(WithoutProgram):
    """The region of a scheduled stack."""

    parts: _SplitSchedule
    sweep: Sweep
    #: The function of the stack as a region that runs again.
    plain: Region
    held: Held
    #: Whether its backward reads what the forward saved: no other level of reverse mode has it.
    keeps: bool = True
    num_leading: int = 0

    # Without annotations, so that these are no fields. The outputs are what is returned.
    views = None
    policy_text = "a schedule"

    @property
    def is_derivative(self) -> bool:
        """Whether another level of reverse mode has the backward."""
        return not self.keeps

    @property
    def held_apart(self) -> tuple[Tensor, ...]:
        """What waits for the rest of the schedule."""
        return self.held.tensors

    def forward(
        self, roots: Roots, save: bool
    ) -> Callable[[Sequence[Tensor], Numerics], Results]:
        def run(tensors: Sequence[Tensor], numerics: Numerics) -> Results:
            with torch.no_grad():
                found = self.sweep(tensors, save, numerics)
            flows = self.parts.flows
            count = len(flows)
            last = count + len(self.parts.stack.written)
            outputs, mutations, rest = found[:count], found[count:last], found[last:]
            if save:
                self.held.put(rest[1:])
            return Results(outputs, mutations, saved=rest[:1], flows=flows)

        return run

    def vjp(self, roots: Roots, asked: Asked) -> Region:
        """The region that carries out the rest of the schedule."""
        again = self.plain.vjp(roots, asked)
        replay = functools.partial(self.parts.replay, asked, self.held.ledger)
        return Pulled(replay, again, self.held) if self.keeps else again

    def jvp(
        self, roots: Roots, has_tangent: tuple[bool, ...], num_states: int
    ) -> tuple[Region, tuple[int, ...] | None]:
        return self.plain.jvp(roots, has_tangent, num_states)

    def batched(self, roots: Roots, batch: Batch, save: bool) -> Batched:
        """The region of the mapped stack; if `save`, reverse mode is above, per example."""
        if not save and self.keeps:
            stack, flows = self.parts.stack, self.parts.flows
            actions = (*self.parts.forward, *self.parts.backward)
            region = scheduled(stack.batched(batch), actions, flows)
            dims = (0,) * (len(flows) - stack.num_rows) + (1,) * stack.num_rows
            return Batched(region, (*dims, *(batch.dims[k] for k in stack.written)))
        plain = self.plain.batched(roots, batch, save=False).region

        def sweep(
            tensors: Sequence[Tensor], hold: bool, numerics: Numerics
        ) -> list[Tensor]:
            over = mapped(lambda each: self.sweep(each, hold, numerics), None, batch, 0)
            return without_none(over(tensors))

        region = dataclasses.replace(self, sweep=sweep, plain=plain, keeps=False)
        return Batched(region, None)


@final
@dataclasses.dataclass(frozen=True)
class Pulled(WithoutProgram):
    """The region of a scheduled stack's gradients."""

    replay: Replayed
    #: The gradients as a region that runs again: what is derived comes from it.
    again: Region
    held: Held
    num_leading: int = 1  # the mark comes before the operands

    # Without annotations, so that these are no fields. What waits is the other region's.
    keeps = False
    policy_text = "a schedule"
    is_derivative = True

    @property
    def views(self) -> Sequence[View] | None:
        """Which of the wanted gradients there are."""
        return self.again.views

    def forward(
        self, roots: Roots, save: bool
    ) -> Callable[[Sequence[Tensor], Numerics], Results]:
        def run(tensors: Sequence[Tensor], numerics: Numerics) -> Results:
            with torch.no_grad():
                return Results(self.replay(self.held.take(), tensors[1:], numerics))

        return run

    def vjp(self, roots: Roots, asked: Asked) -> Region:
        return self.again.vjp(roots, asked)

    def jvp(
        self, roots: Roots, has_tangent: tuple[bool, ...], num_states: int
    ) -> tuple[Region, tuple[int, ...] | None]:
        return self.again.jvp(roots, has_tangent, num_states)

    def batched(self, roots: Roots, batch: Batch, save: bool) -> Batched:
        mark_dim = batch.dims[0]
        rest = batch._replace(dims=batch.dims[1:], metas=batch.metas[1:])
        again = self.again.batched(roots, rest, save=False).region

        def replay(
            held: list[Tensor] | None, tensors: Sequence[Tensor], numerics: Numerics
        ) -> list[Tensor]:
            waiting = held or []
            count = len(waiting)
            dims = (*(mark_dim for _ in waiting), *rest.dims)
            over = mapped(
                lambda each: self.replay(
                    None if held is None else [*each[:count]], each[count:], numerics
                ),
                None,
                rest._replace(dims=dims),
                0,
            )
            return without_none(over([*waiting, *tensors]))

        return Batched(dataclasses.replace(self, replay=replay, again=again), None)


def scheduled(
    stack: Stack, actions: Sequence[Action], flows: tuple[bool, ...]
) -> Swept:
    """The region of a stack that is run by a schedule."""
    first = next(k for k, each in enumerate(actions) if isinstance(each, Backward))
    forward, backward = actions[:first], actions[first:]
    parts = _SplitSchedule(stack, forward, backward, flows, stack.dependent_outputs())
    held = Held()
    for action in forward:
        held.ledger.enter(action)

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return parts.sweep(tensors, False, Numerics.current())[: len(flows)]

    requires_grad = tuple(meta.requires_grad for meta in stack.operands)
    plain = rerun_of(run, requires_grad, parts.dependent_outputs)
    return Swept(parts, parts.sweep, plain, held)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class _SplitSchedule:
    """A stack, and the actions of its forward and of its backward."""

    stack: Stack
    forward: Sequence[Action]
    backward: Sequence[Action]
    #: For each output whether a cotangent can come back.
    flows: tuple[bool, ...]
    #: For each operand, as bits, the outputs that may depend on it.
    dependent_outputs: tuple[int, ...]

    def sweep(
        self, tensors: Sequence[Tensor], hold: bool, numerics: Numerics
    ) -> list[Tensor]:
        executor = Executor(self.stack, tensors, numerics)
        executor.run(self.forward if hold else [Advance(0, len(self.stack.links))])
        outputs = [*executor.outputs(), *executor.mutations]
        return [*outputs, torch.empty(0), *executor.held()] if hold else outputs

    def replay(
        self,
        asked: Asked,
        ledger: Ledger,
        waiting: list[Tensor] | None,
        tensors: Sequence[Tensor],
        numerics: Numerics,
    ) -> list[Tensor]:
        """`Replayed`, for what is asked of the backward of a sweep that ended there."""
        pulled = sum(1 << k for k, each in enumerate(asked.layouts) if each is not None)
        wanted = [
            each and bool(bits & pulled)
            for each, bits in zip(asked.wanted, self.dependent_outputs, strict=True)
        ]
        count = len(self.stack.operands)
        operands, given = tensors[:count], iter(tensors[count:])
        cotangents = [None if each is None else next(given) for each in asked.layouts]
        executor = Executor(self.stack, operands, numerics)
        if waiting is None:
            executor.run(self.forward)
        else:
            executor.resume(copy.deepcopy(ledger), waiting)
        gradients = executor.pull(self.backward, cotangents, wanted)
        return [
            torch.zeros_like(operand) if gradient is None else gradient
            for gradient, operand, is_wanted in zip(
                gradients, operands, wanted, strict=True
            )
            if is_wanted
        ]
