"""A joint graph and a cut -> the graph of the forward and that of the backward."""

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from remat._graph import operators
from remat._graph.building import Building, prune
from remat._graph.joint import Joint, View, view_path
from remat._graph.values import Graph, Ref, Value, check, has_effect, roots
from remat._partition.cut import Cut

_CLONE = torch.ops.aten.clone.default


def forward_graph(joint: Joint, saved: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """Operands -> outputs, new values of changed operands, saved values, states.

    Draws stay even if nothing reads them, because the generator must end in the same state.
    An output that shares storage with an earlier one is cloned, because the caller may change
    one of them in place. With the graph comes which outputs are views of something that nothing
    else holds: they must be returned as plain tensors, which the caller may change in place.
    """
    ranks = itertools.count()
    values = [
        value
        if value.op is None or value.is_backward
        else dataclasses.replace(value, rank=next(ranks))
        for value in joint.graph.values
    ]
    effects = [
        index
        for index, value in enumerate(values)
        if not value.is_backward and has_effect(value)
    ]
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
    freed before those of the next layer are computed.
    """
    values = joint.graph.values
    inputs = [
        *saved,
        *range(joint.num_operands),
        *(state.index for state in joint.states),
        *joint.cotangents,
    ]
    places = {index: position for position, index in enumerate(inputs)}
    places |= {index: places[stands] for index, stands in found.stand_ins.items()}
    new = Building(
        [
            Value(None, meta=values[index].meta, names=values[index].names)
            for index in inputs
        ],
        places,
    )
    for index in late(values, found.steps):
        value = values[index]
        is_draw = operators.draws(value) and not value.is_backward
        step = dataclasses.replace(
            value,
            is_backward=True,
            is_redraw=value.is_redraw or is_draw,
            rank=found.repeats.get(index, -1),
        )
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
            views.append(View(None, None, None, True))
            continue
        bases = [each for each, spread in unique if spread == placement]
        path = view_path(graph, bases, ref)
        # A DTensor is not a view: it is the same as another one, or an output of its own.
        if path is None or (placement is not None and path[1] is not None):
            path = ref, None
        base, steps = path
        if (base, placement) in unique:
            views.append(View(unique.index((base, placement)), None, steps, False))
        elif skip <= base.index < graph.num_inputs and (
            given.get(base.index) == placement
        ):
            views.append(View(None, base.index - skip, steps, False))
        else:
            views.append(View(len(unique), None, None, False))
            unique.append((ref, placement))
    checks = [
        index
        for index, value in enumerate(graph.values)
        if operators.is_check(value.op)
    ]
    refs = tuple(ref for ref, _ in unique)
    pruned = prune(dataclasses.replace(graph, outputs=refs), checks)
    return pruned, tuple(views), tuple(spread for _, spread in unique)
