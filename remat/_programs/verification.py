"""`verify=True`: what was saved, against what the same operands give now."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from remat._errors import RecomputationError, refusal
from remat._graph.values import Ref, label
from remat._partition.analysis import Analysis
from remat._partition.cut import backward_graph, cut
from remat._programs.program import Program
from remat._torch import tracer
from remat._torch.tensors import same_bits

#: Takes (saved, operands, states, cotangents), and raises RecomputationError where the saved
#: values differ from their recomputation.
Verification = Callable[[Sequence[Tensor]], None]


def verification(
    analysis: Analysis, saved: tuple[int, ...], is_exact: Sequence[bool]
) -> Verification:
    """The comparison for the values that a region saves, bit by bit.

    `is_exact`: which of them come back from their storage to the last bit.
    """
    wanted = tuple(Ref(index) for index in saved)
    found = cut(analysis, frozenset(), wanted)
    graph = backward_graph(analysis.joint, found, saved, wanted)
    program = Program(graph, "verification")
    labels = [label(analysis.joint.graph, index) for index in saved]

    def verify(tensors: Sequence[Tensor]) -> None:
        if tracer.proxy_is_active():
            return
        # After them may come tangents.
        again = program(tensors[: graph.num_inputs])
        rows = zip(labels, is_exact, tensors, again, strict=False)
        for name, each_is_exact, first, second in rows:
            if each_is_exact and not same_bits(first, second):
                raise _differs(name, first, second)

    return verify


def _differs(name: str, first: Tensor, second: Tensor) -> RecomputationError:
    different = first != second
    count = int(different.sum())
    place = int(different.flatten().to(torch.uint8).argmax()) if count else 0
    was, now = (each.flatten()[place].item() for each in (first, second))
    return refusal(
        RecomputationError,
        where=name,
        what=f"the recomputation differs from the forward in {count} of "
        f"{first.numel()} elements, first in element {place}: {was!r} was saved, {now!r} is "
        "recomputed.",
        why="A tensor that the region reads was changed where autograd does not see it "
        "(through .data, or under no_grad in a custom operator), or the operator is not "
        "deterministic.",
        do="Change tensors in place only after backward(), and see "
        "torch.use_deterministic_algorithms.",
    )
