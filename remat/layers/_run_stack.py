"""Shared by `scan` and `chain`: what a stage costs, and how a stack of them runs."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, final

from torch import Tensor

from remat._captures.walk import Survey
from remat._errors import MutationError
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph
from remat._partition.analysis import bytes_of, forward_flops
from remat._regions.protocol import Call
from remat._regions.rules import bind_all, without_none
from remat._rerun.dependence import require_nothing_hidden
from remat._switches.blocks import is_inert
from remat._switches.numerics import Numerics
from remat._torch import levels
from remat._tracing.thread import is_lifting, is_running, lift
from remat._user_lines import warn_once
from remat.layers._links import Link, once_a_region
from remat.layers._scheduled import scheduled
from remat.layers._stack import Stack
from remat.schedules import AbstractSchedule, Action, Restore, Stage
from remat.schedules._replay import require_legal
from remat.storage import Keep
from remat.storage._contract import held_in

_T = TypeVar("_T")

#: A heuristic: the FLOPs that a processor computes while it moves one byte.
FLOPS_A_BYTE = 8


def wants_gradient(functions: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Whether a stack is to record: some reverse mode wants a gradient of what it reaches."""
    if is_inert():
        return False
    # Inside a trace, looking at the captured tensors would capture all of them.
    if is_running() or any(map(levels.requires_grad_anywhere, tensors)):
        return True
    reached = Survey(tuple(functions)).reached
    return any(map(levels.requires_grad_anywhere, reached))


def run_as_it_is(function: Callable[[], _T], functions: Sequence[Any]) -> _T:
    """Runs a stack of these functions when nothing of it needs to be recorded."""
    returned = function()
    if not is_inert():
        require_nothing_hidden(returned, tuple(functions))
    return returned


def given_after(link: Link, given: Sequence[bool]) -> list[bool]:
    """Which returned tensors the stack was given: those of its state that pass through."""
    passed = [*given, *[False] * (len(link.region.operands) - link.num_state)]
    return [
        view.operand is not None and view.path is None and passed[view.operand]
        for view in link.region.every_view
    ]


def stage_of(link: Link, after: Sequence[TensorMeta], given: Sequence[bool]) -> Stage:
    """A stage's cost and bytes; `after` is the metadata of the state that the next one takes.

    What that takes as it is returned is kept with all the memory behind it. Of the rest, a
    copy is kept, and the record holds the memory. What the stack was `given` is held anyway.
    """
    costs = _costs_of(link)
    made = [*zip(after, link.returned(), costs.owners, given, strict=False)]
    kept = {
        each
        for taken, meta, each, _ in made
        if each is not None and taken.stride == meta.stride
    }
    copied_bytes = sum(
        meta.size_bytes
        for meta, _, each, is_given in made
        if each not in kept and not is_given
    )
    return Stage(
        costs.cost,
        state_bytes=sum(meta.size_bytes for meta in link.state),
        output_bytes=bytes_of(costs.graph, kept) + copied_bytes,
        record_bytes=bytes_of(costs.graph, costs.saved - kept) + costs.stored_bytes,
    )


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Costs:
    """What is known of a stage whatever comes after it."""

    cost: int  # by what it computes and writes
    graph: Graph  # of its forward and backward
    saved: frozenset[int]  # the values of the graph that wait as they are
    stored_bytes: int  # of those that wait in another form
    #: Of each returned tensor the value whose memory it is; None where an operand's.
    owners: tuple[int | None, ...]


@once_a_region
def _costs_of(link: Link) -> _Costs:
    stages = link.region.stages(link.roots)
    analysis, roots = stages.analysis, stages.analysis.roots
    graph, outputs = analysis.joint.graph, analysis.joint.outputs
    written = bytes_of(graph, (k for k in analysis.forward if roots[k] == k))
    indices = stages.cut.saved
    saved = {
        (roots[k], storage)
        for k, storage in zip(
            indices, stages.storages or [Keep()] * len(indices), strict=True
        )
    }
    return _Costs(
        forward_flops(analysis) + FLOPS_A_BYTE * written,
        graph,
        frozenset(k for k, storage in saved if storage.keeps),
        sum(
            held_in(storage, cast("TensorMeta", graph.values[k].meta)).size_bytes
            for k, storage in saved
            if not storage.keeps
        ),
        tuple(
            None if view.output is None else roots[outputs[view.output].index]
            for view in link.region.every_view
        ),
    )


@functools.lru_cache(maxsize=64)
def _actions_of(
    schedule: AbstractSchedule, stages: tuple[Stage, ...]
) -> tuple[Action, ...]:
    actions, count = require_legal(schedule.actions(stages), len(stages)), len(stages)
    runs_again = any(isinstance(action, Restore) for action in actions)
    if count > 1 and not (schedule.may_keep_all or runs_again):
        warn_once(
            ("schedule", schedule, count),
            where=f"a stack of {count} stages",
            what=f"the schedule {schedule!r} saves no memory.",
            why="It records all stages in the sweep, and runs none of them again.",
            do="Choose one that records fewer, such as schedules.Sqrt(), or leave it out.",
        )
    return actions


def run_scheduled(
    stack: Stack,
    schedule: AbstractSchedule,
    stages: tuple[Stage, ...],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """Runs the stack by a schedule, and writes its buffers back once."""
    shared = [place for place, n in Counter(stack.written).items() if n > 1]
    if shared:
        raise MutationError.of(
            where="a scheduled stack",
            what="changes a buffer in more than one stage: "
            f"{TensorMeta.of(tensors[shared[0]])}.",
            why="A stage that runs again must find the buffer unchanged.",
            do="Put the module into eval mode, move the changing state into the "
            "carry, or leave the schedule out.",
        )
    operands = tuple(map(TensorMeta.of_operand, tensors))
    stack = dataclasses.replace(stack, operands=operands)
    flows = tuple(meta.requires_grad for meta in stack.links[-1].returned())
    region = scheduled(stack, _actions_of(schedule, stages), flows)
    if is_lifting():
        tensors = list(map(lift, tensors))
    given = list(tensors)
    for index in stack.written:
        given[index] = given[index].clone()
    # The stack is called after its first stage, in reports and where memory runs out.
    call = Call(region, stack.links[0].roots, Numerics.current(), ())
    outputs, mutations = bind_all(call, given)
    for index, new in zip(stack.written, mutations, strict=True):
        levels.write_back(tensors[index], new)
    return without_none(outputs)
