"""Regions that levels below differentiate by their programs (see `TracedRegion.opened`)."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from remat._graph import operators
from remat._graph.joint import Joint
from remat._graph.meta import TensorMeta
from remat._graph.numbering import same_outputs
from remat._graph.values import Graph, Ref, Value, prune
from remat._partition.budgets import is_recomputed
from remat._partition.cut import backward_graph, cut, forward_graph
from remat._partition.peak import peaks_of
from remat._partition.stages import Stages
from remat._regions.forwards import Forward
from remat._regions.functions import Function, Roots, if_derivable
from remat._regions.protocol import Call, Opened
from remat._torch import autograd, levels, schemas
from remat.policies import AbstractPolicy


def is_differentiated_alike(
    function: Function,
    roots: Roots,
    operands: tuple[TensorMeta, ...],
    forward: Forward,
    stages: Stages,
    policy: AbstractPolicy,
    *,
    is_pushed: bool,
) -> bool:
    """Whether the program of a function has the derivatives of the function.

    A user's `autograd.Function`, `no_grad` or `detach` shows in the gradients of the
    function, not in its program: both are traced, and compared value by value. Nor do
    regions inside show there. They bound the peak of what runs again (law 9), unless nothing does,
    or they have the policy of the whole, that saves something, and its backward holds about as
    much without them.
    """
    joint = stages.joint
    if is_pushed and not _shows_its_ends(joint):
        return False
    if forward.storages or forward.placements:
        return False
    repeats = any(value.rank >= 0 for value in joint.graph.values)
    is_bounded = not forward.shape[2] or joint.policies - {policy}
    runs_again = is_bounded and any(
        is_recomputed(stages.analysis, index) for index in stages.cut.steps
    )
    is_own = joint.is_custom or (repeats and runs_again)
    if is_own or joint.mutations or joint.states:
        return False
    graph = with_ends(forward_graph(joint, ())[0], joint.differentiable)
    program = function.of_program(graph)
    moved = operands
    if is_pushed and not all(meta.requires_grad for meta in operands):
        # Tangents come by all of them: gradients by all are compared.
        moved = tuple(meta.differentiated for meta in operands)
        found = _traced_by_all(function, roots, moved)
        if found is None:
            return False
        joint, stages = found[0], Stages.of(found, policy)
    layout = joint.layout
    again = if_derivable(lambda: program.traced(roots, moved, (), cotangents=layout))
    if again is None or (repeats and _bound_more(stages, Stages.of(again, policy))):
        return False
    own, of_program = (
        dataclasses.replace(each.graph, outputs=each.gradients)
        for each in (joint, again[0])
    )
    return same_outputs(own, of_program)


def _traced_by_all(
    function: Function, roots: Roots, operands: tuple[TensorMeta, ...]
) -> tuple[Joint, ...] | None:
    """The function where more requires grad than at its call; None where it refuses that."""
    try:
        return function.traced(roots, operands, ())
    except Exception:  # noqa: BLE001  # what the user's code raises may be any
        return None


def _shows_its_ends(joint: Joint) -> bool:
    """Whether the program shows why an output has no gradient, which its tangents may have.

    Any operand may have a tangent, also one that does not require grad.
    """
    values, reached = joint.graph.values, {*range(joint.num_operands)}
    ended: set[int] = set()
    for index, value in enumerate(values):
        if operators.ends_gradient(value):
            ended.update(value.uses)
        elif not reached.isdisjoint(value.uses):
            reached.add(index)
    metas = joint.graph.metas(joint.outputs)
    rows = zip(joint.outputs, metas, joint.differentiable, strict=True)
    return all(
        is_followed or not meta.is_differentiable or ref.index not in reached - ended
        for ref, meta, is_followed in rows
    )


def with_ends(graph: Graph, flows: Sequence[bool]) -> Graph:
    """The program of a forward, with gradients that end at outputs to which none `flows`.

    And at what waits, the outputs behind these, if it is read only where a gradient ends.
    """
    values, outputs = [*graph.values], [*graph.outputs]
    ended = set[int]()
    read = {
        ref.index for ref, _ in zip(outputs, flows, strict=False) if ref is not None
    }
    for value in graph.values:
        (ended if operators.ends_gradient(value) else read).update(value.uses)
    for place, ref in enumerate(outputs):
        meta = None if ref is None else values[ref.index].meta
        if ref is None or not (isinstance(meta, TensorMeta) and meta.is_differentiable):
            continue
        is_waiting = place >= len(flows)
        is_followed = ref.index not in ended - read if is_waiting else flows[place]
        if not is_followed:
            outputs[place] = Ref(len(values))
            values.append(Value(operators.UNRECORDED, (ref,), meta=meta))
    return dataclasses.replace(graph, values=tuple(values), outputs=tuple(outputs))


def _bound_more(own: Stages, whole: Stages) -> bool:
    """Whether regions inside take more than a quarter, a heuristic, off a backward's peak."""
    bounded, unbounded = (
        peaks_of(each.joint, each.cut, each.saved_bytes).backward
        for each in (own, whole)
    )
    return 4 * bounded < 3 * unbounded


def may_read_constants(graph: Graph, operands: Sequence[TensorMeta]) -> bool:
    """Whether `reads_constants` may be true of a program."""
    return has_first_order_formulas(graph) or bool(parts_of_calls(graph, operands))


def has_first_order_formulas(graph: Graph) -> bool:
    """Whether gradients of a program's first order must not be differentiated."""
    return any(schemas.has_first_order_formula(value.op) for value in graph.values)


def reads_constants(
    function: Function, roots: Roots, operands: Sequence[TensorMeta], stages: Stages
) -> bool:
    """Whether gradients depend on numbers of the forward that torch gives no derivative.

    Such as the factors with which a system was solved: torch takes another formula for a
    gradient that is to be differentiated, and the program has the one that reads them.
    """
    joint, numbers = stages.joint, stages.analysis.numbers
    is_first = has_first_order_formulas(forward_graph(joint, ())[0])
    if is_first and not function.is_recorded:
        return True
    uses = (value.uses for value in joint.graph.values if value.is_backward)
    # By their numbers: what a region inside reads, it has computed again.
    read = {numbers[k] for each in uses for k in each}
    read.intersection_update(numbers[k] for k in parts_of_calls(joint.graph, operands))
    parts = sorted(stages.analysis.members[number] for number in read)
    if not parts:
        return False
    graph = dataclasses.replace(joint.graph, outputs=tuple(map(Ref, parts)))
    program = function.of_program(prune(graph, (), joint.num_operands))
    made, *_ = program.traced(roots, tuple(operands), (), gradients=False)
    constant = [
        part
        for part, view in zip(parts, made.views, strict=True)
        if view.output is not None and not made.differentiable[view.output]
    ]
    if not constant:
        return False
    found = cut(stages.analysis, frozenset(constant), joint.gradients)
    graph = backward_graph(joint, found, constant, joint.gradients)
    program = function.of_program(graph)
    return any(_has_derivative(program, roots, graph, k) for k in range(len(constant)))


def _has_derivative(program: Function, roots: Roots, graph: Graph, place: int) -> bool:
    """Whether what a program returns has a derivative by the operand at a place.

    Where it is no number of its own to an operator, as the mean is to the backward of a
    norm, autograd has no derivative by it, and says so each time: what it has said is known.
    """
    uses = [
        (value.op, index)
        for value in graph.values
        for index, arg in enumerate(value.args)
        if arg == Ref(place)
    ]
    if not _constants.isdisjoint(uses):
        return False
    operands = operands_of(graph, tuple(k == place for k in range(graph.num_inputs)))
    try:
        joint, *_ = program.traced(roots, operands, ())
    except RuntimeError as error:
        if autograd.has_no_formula(error) or autograd.must_be_constant(error):
            _constants.update(u for u in uses if autograd.takes_for_constant(error, *u))
            return False
        raise
    return any(joint.gradients)


# Operators, and which of their arguments are constants to their derivatives.
_constants: set[tuple[Any, int]] = set()


def parts_of_calls(graph: Graph, operands: Sequence[TensorMeta]) -> tuple[int, ...]:
    """The values that are one of an operator's outputs, own memory, and may have a derivative."""
    values = graph.values
    made_from = {index for index, meta in enumerate(operands) if meta.requires_grad}
    for index, value in enumerate(values):
        if not value.is_backward and not made_from.isdisjoint(value.uses):
            meta = value.meta
            if not isinstance(meta, TensorMeta) or meta.is_differentiable:
                made_from.add(index)
    return tuple(
        index
        for index in sorted(made_from)
        if values[index].op is operator.getitem
        and all(operators.viewed(values[k]) is None for k in values[index].uses)
    )


def unmapped_outputs(
    graph: Graph, count: int, dims: Sequence[int | None]
) -> frozenset[int]:
    """Which of the first outputs a map over these dimensions of the inputs leaves as they are."""
    reached = {index for index, dim in enumerate(dims) if dim is not None}
    for index, value in enumerate(graph.values):
        if reached.intersection(value.uses) or operators.draws(value):
            reached.add(index)
    return frozenset(
        place
        for place, ref in enumerate(graph.outputs[:count])
        if ref is not None and ref.index not in reached
    )


def operands_of(graph: Graph, wants: tuple[bool, ...]) -> tuple[TensorMeta, ...]:
    """The metadata of what a program takes, where these are to be differentiated."""
    inputs = [value.meta for value in graph.values[: graph.num_inputs]]
    metas = [meta for meta in inputs if isinstance(meta, TensorMeta)]
    return tuple(
        dataclasses.replace(meta, requires_grad=wanted and meta.is_differentiable)
        for meta, wanted in zip(metas, wants, strict=True)
    )


def opened_for(
    call: Call,
    tensors: Sequence[Tensor],
    save: bool,
    tangents: Sequence[Tensor | None] = (),
) -> tuple[Call, Opened | None]:
    """The region of the program to call instead, where this level differentiates it.

    That is a forward whose backward some level above will run, or a backward. Where it stays
    closed, the derivatives of both run one after the other too: the call lends and borrows.
    """
    region, found = call.region, levels.current_interpreter()
    level = 0 if found is None else found[1].level()
    if level >= call.connected_below:
        return call, None
    if region.keeps and not save:
        is_reverse = found is not None and found[0] == "grad"
        below = [levels.unwrap_at(each, level) for each in tensors]
        # With autograd alone below, as for a loss of gradients, bits are those of `.backward()`.
        wants = levels.is_pushed_below() or any(map(levels.is_wanted_by_func, below))
        if is_reverse and wants:
            region = region.recorded(call.roots)
        if is_reverse and region.rules and levels.is_mapped():
            region = region.saving_nothing(call.roots)
        return call if region is call.region else call.of(region), None
    wants = tuple(map(levels.requires_grad_anywhere, tensors))
    has_tangent = tuple(tangent is not None for tangent in tangents)
    if levels.is_pushed_below():
        # Which tensors have a tangent there is not known here.
        has_tangent = tuple(tensor.is_floating_point() for tensor in tensors)
    opened = region.opened(call.roots, wants, has_tangent)
    return (call if opened else call._replace(is_borrowing=True)), opened


def opened_for_autograd(
    call: Call, tensors: Sequence[Tensor]
) -> tuple[Call, Opened | None]:
    """`opened_for` plain autograd, whose one level serves all orders.

    For a region of which it has recorded a backward. One that returns all that it saves is open.
    """
    if not autograd.is_plain_autograd():
        return call, None
    if call.region.shows_saved(call.roots):
        return call._replace(is_borrowing=True), None
    return opened_for(call, tensors, save=True)
