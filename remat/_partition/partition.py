"""Joint graph + decisions -> forward program and backward program.

Walk back from the wanted gradients; stop at an operand or at a value that the policy
permits; recompute everything else. What the walk stops at is saved, nothing more (law 2),
and the backward runs only what the walk met (law 3).

A decision belongs to a *class* of equal values (see `_graph.values.value_numbers`), so that a
recomputation that an inner region left in the backward half stops at what an outer policy
saves; nothing else is merged, so that inner regions still bound the peak (law 9). Views
are never saved: the walk goes on to what they view.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, cast, final

import torch

from remat import policies
from remat._graph import operators
from remat._graph.values import (
    Graph,
    Meta,
    Ref,
    TensorMeta,
    Value,
    check,
    has_effect,
    prune,
    renumbered,
    replace_refs,
    roots,
    value_numbers,
)
from remat._torch import flops, sizes
from remat._tracing.importing import view_path
from remat._tracing.trace import Joint, View
from remat.policies import AbstractPolicy, Save

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_CLONE = torch.ops.aten.clone.default


@final
@dataclasses.dataclass(frozen=True)
class Analysis:
    """What the walk needs to know of a joint graph.

    Attributes:
        joint: the graph.
        numbers: the class of each value.
        members: for each class the first forward value in it.
        roots: for each value the one whose storage it shares.
        forward: the forward values that are not inputs, in order.
    """

    joint: Joint
    numbers: tuple[int, ...]
    members: dict[int, int]
    roots: tuple[int, ...]
    forward: tuple[int, ...]

    @functools.cached_property
    def views(self) -> dict[int, policies.Value]:
        """What a policy is asked about: class -> the value as the policy sees it."""
        graph = self.joint.graph
        names = _names(self)
        return {
            self.numbers[index]: _policy_value(graph, index, names[self.numbers[index]])
            for index in self.forward
            if self.is_saveable(index) and self.roots[index] == index
        }

    @property
    def named_operands(self) -> dict[int, policies.Value]:
        """The operands that have a name, as a policy sees them."""
        graph, names = self.joint.graph, _names(self)
        return {
            index: _policy_value(graph, index, names[self.numbers[index]])
            for index in range(self.joint.num_operands)
            if names[self.numbers[index]]
        }

    @functools.cached_property
    def ranks(self) -> dict[int, int]:
        """For each class the place of its first forward value among `forward`."""
        places = {index: rank for rank, index in enumerate(self.forward)}
        return {number: places[index] for number, index in self.members.items()}

    @functools.cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """For each value those that it reads: walked again for each cut."""
        return tuple(value.uses for value in self.joint.graph.values)

    @functools.cached_property
    def checks(self) -> tuple[int, ...]:
        """The operators of the backward that only check (is this matrix singular?)."""
        joint = self.joint
        known = {*range(joint.num_operands), *joint.cotangents}
        others = set(range(joint.graph.num_inputs)) - known
        found: list[int] = []
        for index, value in enumerate(joint.graph.values):
            if others.intersection(self.uses[index]):
                others.add(index)
            elif value.is_backward and operators.is_check(value.op):
                found.append(index)
        return tuple(found)

    def is_saveable(self, index: int) -> bool:
        """Whether a forward value may wait for the backward."""
        value = self.joint.graph.values[index]
        is_value = isinstance(value.meta, TensorMeta) and self._varies[index]
        return is_value and not operators.is_rng_state(value.op)

    @functools.cached_property
    def _varies(self) -> list[bool]:
        # Constants made inside are recomputed: they depend on no input. So are keyed
        # draws, which depend on a key alone.
        found: list[bool] = []
        for value in self.joint.graph.values:
            varies = value.op is None or operators.draws(value)
            varies = varies or any(found[use] for use in value.uses)
            found.append(varies and not operators.is_keyed(value.op))
        return found


def analyze(joint: Joint) -> Analysis:
    """Numbers the values of a joint graph and finds its classes."""
    values = joint.graph.values
    numbers = value_numbers(joint.graph)
    forward = tuple(
        index
        for index, value in enumerate(values)
        if value.op is not None and not value.is_backward
    )
    members: dict[int, int] = {}
    for index in forward:
        members.setdefault(numbers[index], index)
    return Analysis(joint, numbers, members, roots(joint.graph), forward)


def _names(analysis: Analysis) -> dict[int, tuple[str, ...]]:
    """The names of each class: its members', their views', and their siblings'."""
    found: dict[int, dict[str, None]] = {}
    values = analysis.joint.graph.values
    for index, value in enumerate(values):
        for alias in (index, analysis.roots[index]):
            number = analysis.numbers[alias]
            found.setdefault(number, {}).update(dict.fromkeys(value.names))
    for index, value in enumerate(values):
        # The outputs of one operator share their names, so that attention's
        # log-sum-exp is saved with its output.
        if value.op is operator.getitem:
            made_by = found[analysis.numbers[value.args[0].index]]
            made_by.update(found[analysis.numbers[index]])
    for index, value in enumerate(values):
        if value.op is operator.getitem and analysis.roots[index] == index:
            made_by = found[analysis.numbers[value.args[0].index]]
            found[analysis.numbers[index]].update(made_by)
    return {number: tuple(names) for number, names in found.items()}


def _policy_value(graph: Graph, index: int, names: tuple[str, ...]) -> policies.Value:
    value = graph.values[index]
    meta = value.meta
    assert isinstance(meta, TensorMeta)
    maker = value
    if value.op is operator.getitem:
        made_at: int = value.args[0].index
        maker = graph.values[made_at]
    return policies.Value(
        op=maker.op,
        names=names,
        shape=meta.hints,
        dtype=meta.dtype,
        size_bytes=meta.size_bytes,
        flops=step_flops(graph, maker),
        source=value.source,
        function=value.function,
        args=_taken(graph, maker.args),
        kwargs=_taken(graph, maker.kwargs),
    )


def _taken(graph: Graph, tree: Any) -> Any:
    """An operator's arguments as a policy sees them."""
    if isinstance(tree, Ref):
        return _operands(graph.values[tree.index].meta)
    if isinstance(tree, (tuple, list)):
        return tuple(_taken(graph, item) for item in cast("list[Any]", tree))
    return sizes.hint(tree)


def _operands(meta: Meta) -> Any:
    if isinstance(meta, TensorMeta):
        return policies.Operand(meta.hints, meta.dtype, meta.device)
    return None if meta is None else tuple(map(_operands, meta))


def _shapes(meta: Meta) -> object:
    if isinstance(meta, TensorMeta):
        return torch.Size(meta.hints)
    return None if meta is None else tuple(_shapes(each) for each in meta)


def step_flops(graph: Graph, value: Value) -> int:
    """FLOPs of one step by torch's own formulas, 0 where it has none."""
    if value.op is None:
        return 0

    def shape(index: int) -> object:
        meta = graph.values[index].meta
        return _shapes(meta)

    args, kwargs = replace_refs((value.args, value.kwargs), shape)
    return flops.flops_of(value.op, args, dict(kwargs), _shapes(value.meta))


def forward_flops(analysis: Analysis) -> int:
    """Floating point operations of the forward, by torch's own formulas."""
    graph = analysis.joint.graph
    return sum(step_flops(graph, graph.values[index]) for index in analysis.forward)


Decisions = dict[int, Save]


def decide(analysis: Analysis, policy: AbstractPolicy) -> Decisions:
    """The classes that a policy permits to be saved, and how."""
    return _permitted(analysis.views, policy)


def decide_of_operands(analysis: Analysis, policy: AbstractPolicy) -> Decisions:
    """How the policy saves named operands, by index; an operand is held in any case."""
    if isinstance(policy, policies.WholeProgram):
        return {}
    return _permitted(analysis.named_operands, policy)


def _permitted(
    values: dict[int, policies.Value], policy: AbstractPolicy
) -> dict[int, Save]:
    answers = {key: policies.decide(policy, value) for key, value in values.items()}
    return {key: answer for key, answer in answers.items() if isinstance(answer, Save)}


@final
@dataclasses.dataclass(frozen=True)
class Cut:
    """What is saved between forward and backward, and what the backward runs.

    Attributes:
        saved: the forward values that wait, in order.
        steps: what the backward runs, in order.
        stand_ins: for a value that the backward would compute, the saved one it equals.
        operands: the operands that the backward reads.
        repeats: for each step that computes what the forward computed, the rank of that
            value: recomputation, that of inner regions included.
    """

    saved: tuple[int, ...]
    steps: tuple[int, ...]
    stand_ins: dict[int, int]
    operands: frozenset[int]
    repeats: dict[int, int]


def permitted_members(analysis: Analysis, permitted: Decisions) -> frozenset[int]:
    """The forward values that may be saved, given the permitted classes."""
    values = analysis.joint.graph.values
    found: set[int] = set()
    for member in analysis.members.values():
        # matmul of more dimensions than two ends with `_unsafe_view`: a view in all but name.
        root = member
        while values[root].op is _UNSAFE_VIEW:
            root = values[root].args[0].index
        is_own = analysis.roots[root] == root
        if is_own and analysis.numbers[root] in permitted:
            found.add(member)
    return frozenset(index for index in found if analysis.is_saveable(index))


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
    ranks = analysis.ranks
    repeats = {
        index: ranks[analysis.numbers[index]]
        for index in steps
        if analysis.numbers[index] in ranks
    }
    return Cut(saved, tuple(sorted(steps)), stand_ins, frozenset(operands), repeats)


def starts(analysis: Analysis, wanted: Sequence[Ref | None]) -> list[int]:
    """Where the walk starts: the wanted gradients, and checks that raise."""
    found = [ref.index for ref in wanted if ref is not None]
    return [*found, *analysis.checks] if found else []


def forward_graph(joint: Joint, saved: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """Operands -> outputs, new values of changed operands, saved values, states.

    Draws stay even if nothing reads them, because the generator must end in the same state.
    An output that shares storage with an earlier one is cloned, because the caller may change
    one of them in place.

    Returns:
        The graph, and which outputs are views of something that nothing else holds. They
        must be returned as plain tensors, which the caller may change in place.
    """
    graph = _ranked(joint.graph)
    effects = [
        index
        for index, value in enumerate(graph.values)
        if not value.is_backward and has_effect(value)
    ]
    graph, outputs = _with_clones(graph, joint.outputs)
    held = (*(new for _, new in joint.mutations), *(Ref(index) for index in saved))
    graph = dataclasses.replace(graph, outputs=(*outputs, *held, *joint.states))
    owners = roots(graph)
    shared = {owners[ref.index] for ref in held}
    untracked = tuple(
        place
        for place, ref in enumerate(outputs)
        if owners[ref.index] != ref.index and owners[ref.index] not in shared
    )
    pruned = _with_inputs(prune(graph, effects), joint.num_operands)
    return pruned, untracked


def _ranked(graph: Graph) -> Graph:
    """The graph whose forward values say which they are."""
    ranks = itertools.count()
    values = [
        value
        if value.op is None or value.is_backward
        else dataclasses.replace(value, rank=next(ranks))
        for value in graph.values
    ]
    return dataclasses.replace(graph, values=tuple(values))


def _with_clones(
    graph: Graph, outputs: tuple[Ref, ...]
) -> tuple[Graph, tuple[Ref, ...]]:
    owners = roots(graph)
    values = list(graph.values)
    seen: dict[int, int | None] = {}
    cloned: list[Ref] = []
    for ref in outputs:
        owner, split = owners[ref.index], _split_of(values[ref.index])
        if owner not in seen:
            seen[owner] = split
        elif split is None or split != seen[owner] or ref in cloned:
            value = values[ref.index]
            values.append(dataclasses.replace(value, op=_CLONE, args=(ref,), kwargs=()))
            ref = Ref(len(values) - 1)
        cloned.append(ref)
    return dataclasses.replace(graph, values=tuple(values)), tuple(cloned)


def _split_of(value: Value) -> int | None:
    # The outputs of one split, chunk or unbind do not overlap.
    return value.args[0].index if value.op is operator.getitem else None


def _with_inputs(graph: Graph, count: int) -> Graph:
    """The graph without its inputs after the first `count`, which it does not read."""
    dropped = graph.num_inputs - count
    number = {
        index: index if index < count else index - dropped
        for index in range(len(graph.values))
    }
    values = tuple(
        renumbered(value, lambda use: Ref(number[use]))
        for index, value in enumerate(graph.values)
        if not count <= index < graph.num_inputs
    )
    outputs = tuple(
        None if ref is None else Ref(number[ref.index]) for ref in graph.outputs
    )
    return check(Graph(values, count, outputs))


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
    number = {index: position for position, index in enumerate(inputs)}
    number |= {index: number[stands] for index, stands in found.stand_ins.items()}
    lines = [
        Value(None, meta=values[index].meta, names=values[index].names)
        for index in inputs
    ]
    for index in late(values, found.steps):
        value = values[index]
        number[index] = len(lines)
        is_redraw = value.is_redraw or (
            operators.draws(value) and not value.is_backward
        )
        value = dataclasses.replace(
            value,
            is_backward=True,
            is_redraw=is_redraw,
            rank=found.repeats.get(index, -1),
        )
        lines.append(renumbered(value, lambda use: Ref(number[use])))
    outputs = tuple(None if ref is None else Ref(number[ref.index]) for ref in wanted)
    return check(Graph(tuple(lines), len(inputs), outputs))


def late(values: Sequence[Value], steps: Sequence[int]) -> list[int]:
    """The steps, with each step of the forward moved to just before its first reader.

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
    graph: Graph,
    skip: int,
    inputs: Sequence[Any] = (),
    outputs: Sequence[Any] = (),
) -> tuple[Graph, tuple[View, ...], tuple[Any, ...]]:
    """Each output once, and none that is only a view of an input after the first `skip`.

    `autograd.Function` can return neither a tensor twice nor one of its inputs.

    Args:
        graph: whose outputs to change.
        skip: how many inputs none may be a view of.
        inputs: how each input after these is spread, as a DTensor; empty if none is.
        outputs: how each output is, likewise.

    Returns:
        The graph, how each of its former outputs is made, and how the new ones are spread.
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


def recomputed(found: Cut, joint: Joint) -> tuple[str, ...]:
    """The operators of the forward that the backward runs again, views left out."""
    values = joint.graph.values
    return tuple(
        operators.short_name(values[index].op)
        for index in found.steps
        if not values[index].is_backward
        and values[index].op is not operator.getitem
        and operators.viewed(values[index]) is None
    )
