"""Forward mode of a region: dual tensors, which outputs have tangents, one program for both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from remat._graph.joint import View
from remat._graph.merging import merge
from remat._graph.meta import TensorMeta
from remat._graph.values import Ref
from remat._regions.derived_forwards import outputs_alone
from remat._regions.forwards import Forward
from remat._torch import isolation, levels
from remat._torch.levels import dual_level_is_active

# Public, but torch has not annotated them.
unpack_dual: Callable[[Tensor], forward_ad.UnpackedDualTensor] = forward_ad.unpack_dual  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_make_dual: Callable[[Tensor, Tensor], Tensor] = forward_ad.make_dual  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def unpacked(tensors: Sequence[Tensor]) -> list[forward_ad.UnpackedDualTensor]:
    """The primals and tangents of the innermost level."""
    with isolation.without_inference_mode():
        return [unpack_dual(tensor) for tensor in tensors]


def primal_of(tensor: Tensor) -> Tensor:
    """The tensor without its tangent."""
    return unpack_dual(tensor).primal if dual_level_is_active() else tensor


def dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """An output with its tangent; torch gives the tangent the memory layout of the output."""
    if levels.repeats_itself(primal):
        primal = primal.clone()
    return _make_dual(primal, tangent)


def moved_outputs(forward: Forward) -> tuple[int, ...]:
    """Which outputs of a region with this forward have tangents."""
    graph = forward.program.graph
    outputs = graph.outputs[: forward.shape[0]]
    metas = [graph.values[ref.index].meta for ref in outputs if ref]
    found = [meta for meta in metas if isinstance(meta, TensorMeta)]
    return tuple(place for place, meta in enumerate(found) if meta.is_differentiable)


def tangent_metas(
    operands: Sequence[TensorMeta], has_tangent: Sequence[bool]
) -> list[TensorMeta]:
    """The metadata of the operands' tangents."""
    pairs = zip(operands, has_tangent, strict=True)
    return [
        dataclasses.replace(meta, requires_grad=meta.is_differentiable)
        for meta, has in pairs
        if has
    ]


def push(
    forward: Forward,
    tangents: Forward,
    views: Sequence[View],
    num_operands: int,
) -> Forward:
    """The forward that takes tangents last, and returns tangents after its outputs.

    Outputs, and what is saved, are the forward's to the last bit; what both programs compute
    is computed once (see `_graph.merging`). `tangents` takes operands, generator states and
    tangents, and returns that of which `views` make the tangents of the outputs.
    """
    program, (count, *_, num_states) = forward.program, forward.shape
    firsts, skip = program.graph.outputs, forward.num_leading
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

    return dataclasses.replace(
        forward,
        program=dataclasses.replace(
            program,
            graph=dataclasses.replace(
                merged, outputs=(*own[:count], *added, *own[count:])
            ),
            title=f"pushed_{program.title}",
            # A compiler may move up neither what reads a cotangent nor what a tangent.
            num_cotangents=program.num_cotangents
            and program.num_cotangents + num_given,
        ),
        shape=(count + num_added, *forward.shape[1:]),
        flows=_flows(forward, tangents),
        untracked=(
            *forward.untracked,
            *(count + place for place in tangents.untracked),
        ),
        placements=_placements(forward, tangents),
        views=(*outputs_alone(count), *map(shifted, views)),
    )


def _flows(forward: Forward, tangents: Forward) -> tuple[bool, ...] | None:
    if forward.flows is None and tangents.flows is None:
        return None
    each = [one.flows or (True,) * one.shape[0] for one in (forward, tangents)]
    return (*each[0], *each[1])


def _placements(forward: Forward, tangents: Forward) -> tuple[Any, ...] | None:
    if forward.placements is None and tangents.placements is None:
        return None
    first, second = (
        one.placements or (None,) * (one.shape[0] + one.shape[1])
        for one in (forward, tangents)
    )
    count = forward.shape[0]
    return (*first[:count], *second[: tangents.shape[0]], *first[count:])
