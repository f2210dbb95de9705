"""Regions that levels below differentiate by their programs (see `TracedRegion.opened`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from remat._graph import operators
from remat._graph.joint import Joint
from remat._graph.meta import TensorMeta
from remat._graph.numbering import same_outputs
from remat._graph.values import Graph
from remat._partition.halves import forward_graph
from remat._regions.protocol import Call
from remat._regions.retraceable import Function, Roots
from remat._torch import autograd, levels


def is_differentiated_alike(
    function: Function, roots: Roots, operands: tuple[TensorMeta, ...], joint: Joint
) -> bool:
    """Whether the program of a function has the derivatives of the function.

    A user's `autograd.Function`, `no_grad` or `detach` shows in the gradients of the
    function, not in its program: both are traced, and compared value by value. Nor do
    regions inside show there, which bound the peak of what runs again (law 9).

    Args:
        function: the user's.
        roots: of the call that asks.
        operands: the metadata of what it takes.
        joint: its joint graph.
    """
    has_regions = any(value.rank >= 0 for value in joint.graph.values)
    if joint.is_custom or has_regions:
        return False
    program = function.of_program(forward_graph(joint, ())[0])
    try:
        again, *_ = program.traced(roots, operands, (), cotangents=joint.layout)
    except RuntimeError as error:
        if not autograd.has_no_formula(error):
            raise
        return False
    own, of_program = (
        dataclasses.replace(each.graph, outputs=each.gradients)
        for each in (joint, again)
    )
    return same_outputs(own, of_program)


def unmapped_outputs(joint: Joint, dims: Sequence[int | None]) -> frozenset[int]:
    """Which outputs a map over these dimensions of the operands leaves as they are."""
    graph = joint.graph
    reached = {index for index, dim in enumerate(dims) if dim is not None}
    for index, value in enumerate(graph.values):
        if reached.intersection(value.uses) or operators.draws(value):
            reached.add(index)
    return frozenset(
        place for place, ref in enumerate(joint.outputs) if ref.index not in reached
    )


def operands_of(graph: Graph, wants: tuple[bool, ...]) -> tuple[TensorMeta, ...]:
    """The metadata of what a program takes, where these are to be differentiated."""
    inputs = [value.meta for value in graph.values[: graph.num_inputs]]
    metas = [meta for meta in inputs if isinstance(meta, TensorMeta)]
    return tuple(
        dataclasses.replace(meta, requires_grad=wanted and meta.is_differentiable)
        for meta, wanted in zip(metas, wants, strict=True)
    )


class OpenedCall(NamedTuple):
    """The call of an opened region, and how many outputs come before what is saved."""

    call: Call
    #: None for a region that saves nothing, which is opened as it is.
    num_outputs: int | None


def opened_call(
    call: Call,
    tensors: Sequence[Tensor],
    save: bool,
    tangents: Sequence[Tensor | None] = (),
) -> OpenedCall | None:
    """The call of the program instead, where this level differentiates it.

    That is a forward whose backward some level above will run, or a backward.
    """
    region, found = call.region, levels.current_interpreter()
    level = 0 if found is None else found[1].level()
    if level >= call.connected_below or (region.keeps and not save):
        return None
    wants = tuple(map(levels.requires_grad_anywhere, tensors))
    has_tangent = tuple(tangent is not None for tangent in tangents)
    if levels.is_pushed_below():
        # Which tensors have a tangent there is not known here.
        has_tangent = tuple(tensor.is_floating_point() for tensor in tensors)
    opened = region.opened(call.roots, wants, has_tangent)
    if opened is None:
        return None
    return OpenedCall(call.of(opened.region), opened.num_outputs)
