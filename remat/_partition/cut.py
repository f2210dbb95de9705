"""Where forward and backward part, and the graph of each.

Walk back from the wanted gradients; stop at an operand or at a value that the policy permits;
recompute everything else. What the walk stops at is saved, nothing more (law 2), and the backward
runs only what the walk met (law 3). Views are never saved: the walk goes on to what they view.
"""

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any, cast, final

import torch

from remat._graph import operators
from remat._graph.joint import Joint, View, view_path
from remat._graph.meta import TensorMeta
from remat._graph.values import (
    Building,
    Graph,
    Ref,
    Value,
    check,
    prune,
    roots,
    without_numbers,
)
from remat._partition.analysis import Analysis, Decisions

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_CLONE = torch.ops.aten.clone.default


@final
@dataclasses.dataclass(frozen=True)
class Cut:
    """What is saved between forward and backward, and what the backward runs."""

    saved: tuple[int, ...]  # the forward values that wait, in order
    steps: tuple[int, ...]  # what the backward runs, in order
    #: For a value that the backward would compute, the saved one it equals.
    stand_ins: dict[int, int]
    operands: frozenset[int]  # the operands that the backward reads
    #: For each of the steps the values of which it reads the sizes alone.
    sized: dict[int, frozenset[int]]
    #: For each step that computes what the forward computed, the rank of that value:
    #: recomputation, that of inner regions included.
    repeats: dict[int, int]


def product_of(values: Sequence[Value], member: int) -> int:
    """What a cut saves for a value: of a view of a product the product, else the value itself.

    matmul of more dimensions than two ends with `_unsafe_view`: a view in all but name.
    """
    while values[member].op is _UNSAFE_VIEW:
        member = values[member].args[0].index
    return member


def permitted_members(analysis: Analysis, permitted: Decisions) -> frozenset[int]:
    """The forward values that may be saved, given the permitted classes."""
    values = analysis.joint.graph.values
    found: set[int] = set()
    for member in filter(analysis.is_saveable, analysis.members.values()):
        root = product_of(values, member)
        is_own = analysis.roots[root] == root
        if is_own and analysis.numbers[root] in permitted:
            found.add(member)
    return frozenset(found)


def cut(
    analysis: Analysis, members: frozenset[int], wanted: Sequence[Ref | None]
) -> Cut:
    """Walks back from the wanted gradients and stops at `members` (law 2).

    Generator states are not a choice, because a draw without its recorded state cannot be
    repeated. They are operands of the backward, like the inputs.
    """
    joint = analysis.joint
    given = {state.index for state in joint.states}
    stand_ins: dict[int, int] = {}
    steps: set[int] = set()
    operands: set[int] = set()
    seen: set[int] = set()
    pending = starts(analysis, wanted)
    while pending:
        index = pending.pop()
        if index in seen or index in given:
            continue
        seen.add(index)
        member = analysis.members.get(analysis.numbers[index])
        if index < joint.graph.num_inputs:
            operands.update({index} if index < joint.num_operands else ())
        elif member in members:
            assert member is not None
            stand_ins[index] = member
        else:
            steps.add(index)
            pending.extend(analysis.uses[index])
    saved = tuple(sorted(set(stand_ins.values())))
    numbers, ranks = analysis.numbers, analysis.ranks
    repeats = {k: ranks[numbers[k]] for k in steps if numbers[k] in ranks}
    sized = {index: analysis.sized[index] for index in steps}
    ordered = tuple(sorted(steps))
    return Cut(saved, ordered, stand_ins, frozenset(operands), sized, repeats)


def starts(analysis: Analysis, wanted: Sequence[Ref | None]) -> list[int]:
    """Where the walk starts: the wanted gradients, and checks that raise."""
    found = [ref.index for ref in wanted if ref is not None]
    return [*found, *analysis.checks] if found else []


def forward_graph(joint: Joint, saved: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """Operands -> outputs, new values of changed operands, saved values, states.

    Draws stay even if nothing reads them, because the generator must end in the same state.
    An output that shares storage with an earlier one is cloned, because the caller may change
    one of them in place. With the graph comes which outputs are views of something that nothing
    else holds: they must be returned as plain tensors, which the caller may change in place.
    """
    ranks, effects, values = itertools.count(), list[int](), [*joint.graph.values]
    for index, value in enumerate(values):
        if value.op is not None and not value.is_backward:
            values[index] = dataclasses.replace(value, rank=next(ranks))
            if value.has_effect:
                effects.append(index)
    outputs = _clone_shared(joint, values)
    graph = dataclasses.replace(joint.graph, values=tuple(values))
    held = (*(new for _, new in joint.mutations), *(Ref(index) for index in saved))
    graph = dataclasses.replace(graph, outputs=(*outputs, *held, *joint.states))
    owners = roots(graph)
    shared = {owners[ref.index] for ref in held}
    untracked = tuple(
        place
        for place, ref in enumerate(outputs)
        if owners[ref.index] != ref.index and owners[ref.index] not in shared
    )
    return check(prune(graph, effects, joint.num_operands)), untracked


def _clone_shared(joint: Joint, values: list[Value]) -> list[Ref]:
    """The outputs, with a step added for each that shares storage with an earlier one."""
    owners = roots(joint.graph)
    seen: dict[int, int | None] = {}
    cloned: list[Ref] = []
    for ref in joint.outputs:
        owner, value = owners[ref.index], values[ref.index]
        # The outputs of one split, chunk or unbind do not overlap.
        split = value.args[0].index if value.op is operator.getitem else None
        if owner not in seen:
            seen[owner] = split
        elif split is None or split != seen[owner] or ref in cloned:
            values.append(dataclasses.replace(value, op=_CLONE, args=(ref,), kwargs=()))
            ref = Ref(len(values) - 1)
        cloned.append(ref)
    return cloned


def backward_graph(
    joint: Joint, found: Cut, saved: Sequence[int], wanted: Sequence[Ref | None]
) -> Graph:
    """Saved values, operands, states, cotangents -> the wanted gradients.

    A draw of the forward that the backward repeats reads its recorded state. Each value is
    recomputed just before the first step that reads it, so that the values of one layer are
    freed before those of the next layer are computed. For a tensor of which a step reads the
    sizes alone stands one without numbers, unless it is there anyway.
    """
    values = joint.graph.values
    unread = frozenset(range(joint.num_operands)) - found.operands
    inputs = [
        *saved,
        *range(joint.num_operands),
        *(state.index for state in joint.states),
        *joint.cotangents,
    ]
    places = {index: position for position, index in enumerate(inputs)}
    places |= {index: places[stands] for index, stands in found.stand_ins.items()}
    given = [Value(None, meta=values[k].meta, names=values[k].names) for k in inputs]
    new = Building(given, places)
    for index in late(values, found.steps):
        value = values[index]
        is_draw = operators.draws(value) and not value.is_backward
        step = dataclasses.replace(
            value,
            is_backward=True,
            is_redraw=value.is_redraw or is_draw,
            rank=found.repeats.get(index, -1),
        )
        for use in found.sized[index]:
            if use in unread or use not in new.places:
                new.places[use] = len(new.values)
                new.values.append(without_numbers(cast("TensorMeta", values[use].meta)))
        new.copy(index, step)
    return check(new.graph(len(inputs), wanted))


def late(values: Sequence[Value], steps: Sequence[int]) -> list[int]:
    """The steps of a backward, each of the forward's moved to just before its first reader.

    The outputs of one operator are unpacked where it runs: their tuple would keep each
    alive until the last of them is read.
    """
    order: list[int] = []
    waiting = {index for index in steps if not values[index].is_backward}
    parts: dict[int, set[int]] = {}
    for index in waiting:
        if values[index].op is operator.getitem:
            parts.setdefault(values[index].args[0].index, set()).add(index)
    for step in steps:
        if not values[step].is_backward:
            continue
        needed, pending = set[int](), [step]
        while pending:
            uses = waiting.intersection(values[pending.pop()].uses)
            uses.update(*(parts.get(index, ()) for index in uses))
            waiting -= uses
            needed |= uses
            pending += uses
        order += [*sorted(needed), step]
    # No step reads a value that is only returned.
    return order + sorted(waiting)


def unique_outputs(
    graph: Graph, skip: int, inputs: Sequence[Any] = (), outputs: Sequence[Any] = ()
) -> tuple[Graph, tuple[View, ...], tuple[Any, ...]]:
    """Each output of a half once, and none that is only a view of an input after `skip`.

    `autograd.Function` can return neither a tensor twice nor one of its inputs. `inputs` says how
    each input after `skip` is spread, as a DTensor (empty if none is), and `outputs` how each
    output is. With the graph come how each of its former outputs is made, and how the new ones
    are spread.
    """
    unique: list[tuple[Ref, Any]] = []
    views: list[View] = []
    given = {skip + k: each for k, each in enumerate(inputs) if each is not None}
    placements = outputs or [None] * len(graph.outputs)
    for ref, placement in zip(graph.outputs, placements, strict=True):
        if ref is None:
            views.append(View(is_detached=True))
            continue
        bases = [each for each, spread in unique if spread == placement]
        path = view_path(graph, bases, ref)
        # A DTensor is not a view: it is the same as another one, or an output of its own.
        if path is None or (placement is not None and path[1] is not None):
            path = ref, None
        base, steps = path
        if (base, placement) in unique:
            views.append(View(unique.index((base, placement)), path=steps))
        elif skip <= base.index < graph.num_inputs and (
            given.get(base.index) == placement
        ):
            views.append(View(operand=base.index - skip, path=steps))
        else:
            views.append(View(len(unique)))
            unique.append((ref, placement))
    graph = dataclasses.replace(graph, outputs=tuple(ref for ref, _ in unique))
    return prune(graph), tuple(views), tuple(spread for _, spread in unique)
