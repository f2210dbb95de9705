"""`verify=True`: what was saved, against what the same operands give now."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from remat._errors import RecomputationError
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph, Value
from remat._programs.program import Program
from remat._torch import tracer
from remat._torch.tensors import same_bits

#: Takes (saved, operands, states, cotangents), and raises RecomputationError where the saved
#: values differ from their recomputation.
Verification = Callable[[Sequence[Tensor]], None]


def verification(graph: Graph, labels: Sequence[str]) -> Verification:
    """The comparison of saved values, so labelled, with the outputs of a graph, bit by bit.

    `graph` recomputes them; None among its outputs stands for one that its storage rounds.
    """
    program = Program(graph, "verification")
    # The workspace of a recurrent kernel, of whose size torch tells nothing, has bytes in it
    # that nothing writes: no two runs have the same.
    labels = [
        "" if ref is not None and _is_of_no_size(graph.values[ref.index]) else label
        for label, ref in zip(labels, graph.outputs, strict=False)
    ]

    def verify(tensors: Sequence[Tensor]) -> None:
        if tracer.proxy_is_active():
            return
        # After them may come tangents.
        again = program(tensors[: graph.num_inputs])
        for label, first, second in zip(labels, tensors, again, strict=False):
            if label and second is not None and not same_bits(first, second):
                raise _differs(label, first, second)

    return verify


def _is_of_no_size(value: Value) -> bool:
    return isinstance(value.meta, TensorMeta) and 0 in value.meta.shape


def _differs(label: str, first: Tensor, second: Tensor) -> RecomputationError:
    different = first != second
    count = int(different.sum())
    place = int(different.flatten().to(torch.uint8).argmax()) if count else 0
    was, now = (each.flatten()[place].item() for each in (first, second))
    return RecomputationError.of(
        where=label,
        what=f"the recomputation differs from the forward in {count} of "
        f"{first.numel()} elements, first in element {place}: {was!r} was saved, {now!r} is "
        "recomputed.",
        why="A tensor that the region reads was changed where autograd does not see it "
        "(through .data, or under no_grad in a custom operator), or the operator is not "
        "deterministic.",
        do="Change tensors in place only after backward(), and see "
        "torch.use_deterministic_algorithms.",
    )
