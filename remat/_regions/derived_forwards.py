"""Forwards of derived regions, made from the programs of the original region; dual tensors.

These are pure functions of what the original region has found: its joint graph, its saved
values, its forward. `_regions.traced` says which derived regions get them.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from remat._errors import RecomputationError, TraceError
from remat._graph.joint import Joint, View
from remat._graph.merging import merge
from remat._graph.meta import TensorMeta, is_spread
from remat._graph.values import Graph, Ref, Value, label, needed_for
from remat._partition.analysis import Analysis, analyze
from remat._partition.cut import backward_graph, cut, unique_outputs
from remat._partition.stages import Stages
from remat._programs.program import Program
from remat._programs.verification import verification
from remat._regions.forwards import Forward
from remat._regions.functions import Batch, Function
from remat._regions.protocol import Asked
from remat._torch import isolation, levels
from remat._torch.levels import dual_level_is_active
from remat._torch.taking_functions import Applied
from remat._tracing.trace import record
from remat.storage import AbstractStorage


class Saved(NamedTuple):
    """What waits for a backward."""

    analysis: Analysis  # the joint graph for the cotangents that come
    saved: tuple[int, ...]  # where in it the saved values are
    storages: tuple[AbstractStorage, ...]  # how each of them waits
    verify: bool  # whether the backward compares them with recomputed ones


def backward_forward(
    function: Function, operands: Sequence[TensorMeta], kept: Saved, asked: Asked
) -> Forward:
    """The backward: (saved, operands, generator states, cotangents) -> gradients."""
    joint, count = kept.analysis.joint, len(kept.saved)
    rows = zip(joint.gradients, joint.spread, asked.wanted, strict=True)
    wanted = [(ref, spread) for ref, spread, each in rows if each]
    cotangents = [meta for meta in asked.cotangents if meta is not None]
    inputs = [*operands, *joint.state_metas, *cotangents]
    placements = [meta.placement for meta in inputs]
    graph = _recomputing(kept, [ref for ref, _ in wanted], is_cut=True)
    unique, views, spread = unique_outputs(
        graph, count, placements, [spread for _, spread in wanted]
    )
    is_spread = any(each is not None for each in (*placements, *spread))
    program = Program(
        unique,
        "backward",
        function.backend,
        num_saved=count,
        num_cotangents=len(cotangents),
        is_borrowing=asked.is_borrowing,
        rules=joint.rules,
    )
    # Recomputes what is saved, except values that their storage rounds.
    pairs = zip(kept.saved, kept.storages, strict=True)
    exact = [Ref(index) if storage.is_exact else None for index, storage in pairs]
    origins = _recomputing(kept, exact, is_cut=False) if any(exact) else None
    verify = None
    if kept.verify and origins is not None:
        labels = [label(joint.graph, index) for index in kept.saved]
        verify = verification(origins, labels)
    return Forward(
        program,
        (len(unique.outputs), 0, 0, 0),
        function.numerics,
        count,
        verification=verify,
        placements=spread if is_spread else None,
        views=views,
        origins=origins,
    )


def backward_from_operands(analysis: Analysis, wanted: Sequence[bool]) -> Graph:
    """(operands, generator states, cotangents) -> the wanted gradients, None included."""
    refs = [*itertools.compress(analysis.joint.gradients, wanted)]
    return _recomputing(Saved(analysis, (), (), False), refs, is_cut=True)


def takes_functions(graph: Graph) -> bool:
    """Whether an operator of a program takes functions."""
    return any(isinstance(value.op, Applied) for value in graph.values)


def has_derivative(graph: Graph) -> bool:
    """Whether torch has one of what the operators that take functions run there."""
    taken = [each.op for each in graph.values if isinstance(each.op, Applied)]
    return not any(each.without_derivative for each in taken)


def _recomputing(kept: Saved, wanted: Sequence[Ref | None], *, is_cut: bool) -> Graph:
    """A program for the wanted values; if `is_cut`, it starts from what is saved."""
    stops = frozenset(kept.saved) if is_cut else frozenset[int]()
    found = cut(kept.analysis, stops, wanted)
    return backward_graph(kept.analysis.joint, found, kept.saved, wanted)


def mapped_forward(
    forward: Forward, batch: Batch
) -> tuple[Forward, tuple[int | None, ...]]:
    """The mapped forward, over physical tensors, and the mapped dimension of each result."""
    dims: list[int | None] = []
    count = forward.shape[0]

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        how = batch.dims, batch.size, batch.randomness
        over = levels.restore_vmap(lambda *each: tuple(forward.program(each)), *how)
        found, found_dims = over(*tensors)
        outputs = [
            tensor if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(found[:count], found_dims, strict=False)
        ]
        first = [None if dim is None else 0 for dim in found_dims[:count]]
        dims[:] = [*first, *found_dims[count:]]
        return [*outputs, *found[count:]]

    graph = record(run, batch.metas)
    first = count + forward.shape[1]
    added = dims[first : first + forward.shape[2]]
    before = forward.mapped or ((),) * len(added)
    title = f"mapped_{forward.program.title}"
    over = dataclasses.replace(
        forward,
        program=dataclasses.replace(forward.program, graph=graph, title=title),
        untracked=(),
        verification=None,
        mapped=tuple(map(_with_mapped, before, added)),
        views=identity_views(count),
        origins=None,
    )
    return over, tuple(dims)


def _with_mapped(dims: tuple[int, ...], new: int | None) -> tuple[int, ...]:
    """The mapped dimensions of a value when one more has been put in front of `new`."""
    return dims if new is None else (new, *[dim + (dim >= new) for dim in dims])


def are_identity_views(views: tuple[View, ...]) -> bool:
    """Whether the function returns exactly the outputs, in order."""
    return views == identity_views(len(views))


def identity_views(count: int) -> tuple[View, ...]:
    """The views of a region that returns exactly its outputs."""
    return tuple(View(place) for place in range(count))


def require_parts(placements: Sequence[Any], asked: Asked) -> None:
    """Refuses a cotangent of a DTensor that is given as a whole: its parts are unknown."""
    for layout, placement in zip(asked.layouts, placements, strict=False):
        if placement is not None and not (layout is None or is_spread(layout)):
            raise mapped_in_parts()


def mapped_in_parts() -> TraceError:
    """The error of a region that is mapped after its DTensors were traced."""
    return TraceError.of(
        where="a region that computes with DTensors",
        what="is mapped by vmap, or its backward is, after it was traced outside vmap.",
        why="vmap's wrappers hide the placements of a DTensor.",
        do='Use engine="rerun", or call the region inside the mapped function.',
    )


def analysis_for(
    stages: Stages | None, asked: Asked, trace: Callable[[], tuple[Joint, ...]]
) -> tuple[Analysis, tuple[int, ...]]:
    """The joint graph for these cotangents, and where in it the saved values are.

    What is saved was settled by the forward, for cotangents laid out like outputs.
    """
    if stages is None:
        return analyze(trace()[0]), ()
    analysis, saved = stages.analysis, stages.cut.saved
    if asked.numerics.autocast == ():
        for joint in stages.joints:
            if joint.layout == asked.cotangents:
                return dataclasses.replace(analysis, joint=joint), saved
    again = analyze(trace()[0])
    return again, _locate_saved(analysis, again, saved)


def _locate_saved(
    first: Analysis, again: Analysis, saved: tuple[int, ...]
) -> tuple[int, ...]:
    """Finds the saved values of one trace in another; refuses one whose forward differs."""
    # The one trace may have steps that nobody reads, such as zeros for what has no tangent.
    for steps in (_steps, _steps_to_outputs):
        ran, ran_again = map(steps, (first, again))
        is_same = [*ran.values()] == [*ran_again.values()]
        if is_same and ran.keys() >= set(saved):
            place = dict(zip(ran, ran_again, strict=True))
            return tuple(place[index] for index in saved)
    raise RecomputationError.of(
        where="a region's backward",
        what="the function ran other operators than when it was first traced.",
        why="The backward for these cotangents is traced anew, and must find "
        "the forward that ran.",
        do="Make the function depend on nothing but its arguments and the state "
        "that the documentation lists as covered.",
    )


def _steps(analysis: Analysis) -> dict[int, Any]:
    """The operators of the forward, by value; a slice of all is only in a trace of open sizes."""
    values = analysis.joint.graph.values

    def is_whole(value: Value) -> bool:
        if value.op is not _SLICE:
            return False
        sliced: Ref = value.args[0]
        return value.meta == values[sliced.index].meta

    return {k: values[k].op for k in analysis.forward if not is_whole(values[k])}


def _steps_to_outputs(analysis: Analysis) -> dict[int, Any]:
    """Those that lead to what the function returns or changes, and other parts of such steps."""
    joint = analysis.joint
    returned = (*joint.outputs, *(new for _, new in joint.mutations))
    needed = needed_for(joint.graph, (ref.index for ref in returned))
    return {
        index: op
        for index, op in _steps(analysis).items()
        if index in needed
        or (op is operator.getitem and joint.graph.values[index].uses[0] in needed)
    }


_SLICE: Any = torch.ops.aten.slice.Tensor


# Public, but torch has not annotated them.
_unpack_dual: Callable[[Tensor], forward_ad.UnpackedDualTensor] = forward_ad.unpack_dual  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_make_dual: Callable[[Tensor, Tensor], Tensor] = forward_ad.make_dual  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def unpack_dual(tensor: Tensor) -> forward_ad.UnpackedDualTensor:
    """The primal and the tangent of the innermost level."""
    return _unpack_dual(tensor)


def unpack_duals(tensors: Sequence[Tensor]) -> list[forward_ad.UnpackedDualTensor]:
    """The primals and tangents of the innermost level."""
    with isolation.without_inference_mode():
        return [unpack_dual(tensor) for tensor in tensors]


def primal_of(tensor: Tensor) -> Tensor:
    return unpack_dual(tensor).primal if dual_level_is_active() else tensor


def dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """An output with its tangent; torch gives the tangent the memory layout of the output."""
    if levels.repeats_itself(primal):
        primal = primal.clone()
    return _make_dual(primal, tangent)


def moved_outputs(
    forward: Forward, has_tangent: Sequence[bool] | None = None
) -> tuple[int, ...]:
    """Which outputs of a region with this forward have tangents, where these operands have; or all.

    What waited for it counts as moved: it was made of operands.
    """
    graph, skip = forward.program.graph, forward.num_leading
    outputs = graph.outputs[: forward.shape[0]]
    given = has_tangent or [True] * (graph.num_inputs - skip)
    reached = {*range(skip), *(skip + k for k, has in enumerate(given) if has)}
    for index, value in enumerate(graph.values):
        if not reached.isdisjoint(value.uses):
            reached.add(index)
    return tuple(
        place
        for place, (ref, meta) in enumerate(
            zip(outputs, graph.metas(outputs), strict=True)
        )
        if meta.is_differentiable and ref is not None and ref.index in reached
    )


def tangent_metas(
    operands: Sequence[TensorMeta], has_tangent: Sequence[bool]
) -> list[TensorMeta]:
    return [meta.differentiated for meta in itertools.compress(operands, has_tangent)]


def pushed_forward(
    forward: Forward, tangents: Forward, views: Sequence[View]
) -> Forward:
    """The forward that takes tangents last, and returns tangents after its outputs.

    Outputs, and what is saved, are the forward's to the last bit; what both programs compute
    is computed once (see `_graph.merging`). `tangents` takes operands, generator states and
    tangents, and returns that of which `views` make the tangents of the outputs.
    """
    program, (count, *_, num_states) = forward.program, forward.shape
    firsts, skip = program.graph.outputs, forward.num_leading
    num_operands = program.graph.num_inputs - skip
    second, num_added = tangents.program.graph, tangents.shape[0]
    # Without new values of buffers, which the region's forward makes.
    second = dataclasses.replace(second, outputs=second.outputs[:num_added])
    num_given = second.num_inputs - num_operands - num_states
    reads = [
        *(Ref(skip + index) for index in range(num_operands)),
        *firsts[len(firsts) - num_states :],
        *(None for _ in range(num_given)),
    ]
    merged = merge(program.graph, second, reads, forward.origins)
    own, added = merged.outputs[: len(firsts)], merged.outputs[len(firsts) :]

    def shifted(view: View) -> View:
        """A tangent's, where the outputs come first, and no states are among the inputs."""
        if view.output is not None:
            return dataclasses.replace(view, output=view.output + count)
        if view.operand is None or view.operand < num_operands:
            return view
        return dataclasses.replace(view, operand=view.operand - num_states)

    outputs = (*own[:count], *added, *own[count:])
    num_cotangents = program.num_cotangents
    return dataclasses.replace(
        forward,
        program=dataclasses.replace(
            program,
            graph=dataclasses.replace(merged, outputs=outputs),
            title=f"pushed_{program.title}",
            # A compiler may move up neither what reads a cotangent nor what a tangent.
            num_cotangents=num_cotangents and num_cotangents + num_given,
            rules=program.rules | tangents.program.rules,
        ),
        shape=(count + num_added, *forward.shape[1:]),
        flows=_flows(forward, tangents),
        untracked=(*forward.untracked, *(count + k for k in tangents.untracked)),
        placements=_placements(forward, tangents),
        views=(*identity_views(count), *map(shifted, views)),
    )


def _flows(*forwards: Forward) -> tuple[bool, ...] | None:
    each = [one.flows or (True,) * one.shape[0] for one in forwards]
    found = tuple(itertools.chain(*each))
    return None if all(found) else found


def _placements(forward: Forward, tangents: Forward) -> tuple[Any, ...] | None:
    if forward.placements is None and tangents.placements is None:
        return None
    first, second = (
        one.placements or (None,) * (one.shape[0] + one.shape[1])
        for one in (forward, tangents)
    )
    count = forward.shape[0]
    return (*first[:count], *second[: tangents.shape[0]], *first[count:])
