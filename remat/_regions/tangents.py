"""Forward mode of a region: which outputs have tangents, and one program for both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, final

from remat._graph.joint import View
from remat._graph.merging import merge
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph, Ref
from remat._regions.forwards import Forward


@final
@dataclasses.dataclass(frozen=True)
class Tangents:
    """The program of the tangents of a region's outputs."""

    #: (operands, generator states, tangents) -> what the tangents are made of.
    forward: Forward
    #: How each tangent is made from what it returns and from what it takes.
    views: tuple[View, ...]
    #: How many operands the region has.
    num_operands: int
    #: How many generator states its forward records.
    num_states: int

    @property
    def graph(self) -> Graph:
        """The program's graph without new values of buffers, which the region's forward makes."""
        graph = self.forward.program.graph
        return dataclasses.replace(graph, outputs=graph.outputs[: self.num_outputs])

    @property
    def num_outputs(self) -> int:
        """How many tensors it returns."""
        return self.forward.shape[0]

    @property
    def num_given(self) -> int:
        """How many tangents it takes."""
        known = self.num_operands + self.num_states
        return self.forward.program.graph.num_inputs - known

    def views_after(self, count: int) -> tuple[View, ...]:
        """The views where `count` outputs come first, and no states are among the inputs."""

        def shifted(view: View) -> View:
            if view.output is not None:
                return dataclasses.replace(view, output=view.output + count)
            if view.operand is None or view.operand < self.num_operands:
                return view
            return dataclasses.replace(view, operand=view.operand - self.num_states)

        return tuple(map(shifted, self.views))


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
    forward: Forward, tangents: Tangents, origins: Graph | None
) -> tuple[Forward, tuple[View, ...]]:
    """The forward that takes tangents last, and returns tangents after its outputs.

    Outputs, and what is saved, are the forward's to the last bit; what both programs compute
    is computed once (see `_graph.merging`).

    Args:
        forward: of the region.
        tangents: of its outputs.
        origins: what the tensors before the operands are made of (see `merge`).

    Returns:
        The forward, and how outputs and tangents are made from what it returns.
    """
    program, count = forward.program, forward.shape[0]
    merged = merge(program.graph, tangents.graph, _reads(forward, tangents), origins)
    firsts = len(program.graph.outputs)
    own, added = merged.outputs[:firsts], merged.outputs[firsts:]
    graph = dataclasses.replace(merged, outputs=(*own[:count], *added, *own[count:]))
    pushed = dataclasses.replace(
        forward,
        program=dataclasses.replace(
            program,
            graph=graph,
            title=f"pushed_{program.title}",
            # A compiler may move up neither what reads a cotangent nor what a tangent.
            num_cotangents=program.num_cotangents
            and program.num_cotangents + tangents.num_given,
        ),
        shape=(count + tangents.num_outputs, *forward.shape[1:]),
        flows=_flows(forward, tangents.forward),
        untracked=(
            *forward.untracked,
            *(count + place for place in tangents.forward.untracked),
        ),
        placements=_placements(forward, tangents.forward),
    )
    outputs = [View(place, None, None, False) for place in range(count)]
    return pushed, (*outputs, *tangents.views_after(count))


def _reads(forward: Forward, tangents: Tangents) -> list[Ref | None]:
    skip, outputs = forward.num_leading, forward.program.graph.outputs
    operands = [Ref(skip + index) for index in range(tangents.num_operands)]
    states = outputs[len(outputs) - tangents.num_states :]
    return [*operands, *states, *(None for _ in range(tangents.num_given))]


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
