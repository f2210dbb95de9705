"""A forward and its backward in one graph, and how what is returned is made from it."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, final

from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._graph.values import Building, Graph, Ref, Value


@final
@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """How one returned tensor is made from an output or an operand."""

    #: Which output it is or shares its storage with; None for an operand.
    output: int | None = None
    operand: int | None = None  # which operand, likewise
    #: The view operators in between, as a graph with one input; None if it is the output or
    #: operand itself.
    path: Graph | None = None
    #: Whether no gradient flows although one flows to the base.
    is_detached: bool = False
    #: Whether the function detached it from the base: no tangent flows either.
    is_cut: bool = False


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Joint:
    """A forward and its backward, in one graph."""

    graph: Graph  # inputs are the operands, then cotangents
    #: Which inputs are the cotangents of this backward, in the order of the outputs that have one.
    cotangents: tuple[int, ...]
    #: Their metadata, None for an output without one.
    layout: tuple[TensorMeta | None, ...]
    num_operands: int  # how many inputs are operands
    chosen: tuple[int, ...]  # which of the returned tensors are outputs of the forward
    outputs: tuple[Ref, ...]  # these
    #: For each output how it is spread, as a DTensor; None for a plain one.
    placements: tuple[Any, ...]
    #: For each output, whether a cotangent can come back for it.
    differentiable: tuple[bool, ...]
    #: For each tensor that the function returned, how to make it again from an output or an
    #: operand (see `View`).
    views: tuple[View, ...]
    #: One Ref an operand, None where no gradient flows.
    gradients: tuple[Ref | None, ...]
    #: How each of these is spread, as a DTensor; None for a plain one.
    spread: tuple[Any, ...]
    #: (operand, its new value) of operands that the function changed.
    mutations: tuple[tuple[int, Ref], ...]
    #: Arguments that get a gradient by what the function writes to them: their new values are the
    #: last of the outputs.
    changed: tuple[int, ...]
    #: Generator states that the forward's draws started from, in order.
    states: tuple[Ref, ...]
    #: Whether a user's `autograd.Function` or hook says how to differentiate a part of it.
    is_custom: bool = False
    #: Where one has a rule of its own for vmap, "forward" or "backward"; no operator tells it.
    rules: frozenset[str] = frozenset()
    #: Of the regions inside.
    policies: frozenset[Any] = frozenset()

    @property
    def mutated(self) -> tuple[int, ...]:
        """The operands that the function changed."""
        return tuple(operand for operand, _ in self.mutations)

    @property
    def written(self) -> tuple[int, ...]:
        """The operands that a call writes to, of which the region gets copies."""
        return *self.mutated, *self.changed

    @property
    def output_metas(self) -> tuple[TensorMeta, ...]:
        pairs = zip(self.graph.metas(self.outputs), self.placements, strict=True)
        return tuple(dataclasses.replace(m, placement=spread) for m, spread in pairs)

    @property
    def state_metas(self) -> list[TensorMeta]:
        return self.graph.metas(self.states)


def view_path(
    graph: Graph, bases: Sequence[Ref], ref: Ref
) -> tuple[Ref, Graph | None] | None:
    """What a value is a view of, a base or an input, and the view operators in between, if any."""
    steps: list[int] = []
    index = ref.index
    while Ref(index) not in bases and index >= graph.num_inputs:
        value = graph.values[index]
        steps.append(index)
        if value.op is operator.getitem:
            index = value.args[0].index
            continue
        base = operators.viewed(value)
        if base is None:
            return None
        index = base
    if not steps:
        return Ref(index), None
    path = Building([Value(None, meta=graph.values[index].meta)], {index: 0})
    for step in reversed(steps):
        path.copy(step, dataclasses.replace(graph.values[step], is_backward=False))
    return Ref(index), path.graph(1, [ref])
