"""`verify=True`: what was saved, against what the same operands give now."""

import dataclasses
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from remat._errors import RecomputationError, refusal
from remat._graph.values import Ref, label
from remat._partition.analysis import Analysis
from remat._partition.cut import cut
from remat._partition.halves import backward_graph
from remat._programs.program import Program
from remat._torch import tracer
from remat._torch.tensors import same_bits


@final
@dataclasses.dataclass(frozen=True)
class Verification:
    """Compares what was saved with what the same operands give now, bit by bit."""

    #: (saved, operands, states, cotangents) -> the saved values, recomputed.
    program: Program
    labels: tuple[str, ...]  # what to call them
    #: Which of them come back from their storage to the last bit.
    is_exact: tuple[bool, ...]

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Raises RecomputationError at the first value that differs."""
        if tracer.proxy_is_active():
            return
        # After them may come tangents.
        again = self.program(tensors[: self.program.graph.num_inputs])
        saved = tensors[: len(again)]
        rows = zip(self.labels, self.is_exact, saved, again, strict=True)
        for name, is_exact, first, second in rows:
            if is_exact and not same_bits(first, second):
                different = first != second
                count = int(different.sum())
                place = (
                    int(different.flatten().to(torch.uint8).argmax()) if count else 0
                )
                was, now = (each.flatten()[place].item() for each in (first, second))
                raise refusal(
                    RecomputationError,
                    where=name,
                    what=f"the recomputation differs from the forward in {count} of "
                    f"{first.numel()} elements, first in element {place}: {was!r} was "
                    f"saved, {now!r} is recomputed.",
                    why="A tensor that the region reads was changed where autograd does not "
                    "see it (through .data, or under no_grad in a custom operator), or the "
                    "operator is not deterministic.",
                    do="Change tensors in place only after backward(), and see "
                    "torch.use_deterministic_algorithms.",
                )


def verification(
    analysis: Analysis, saved: tuple[int, ...], is_exact: Sequence[bool]
) -> Verification:
    """The comparison for the values that a region saves, given by their indices."""
    wanted = tuple(Ref(index) for index in saved)
    found = cut(analysis, frozenset(), wanted)
    graph = backward_graph(analysis.joint, found, saved, wanted)
    labels = tuple(label(analysis.joint.graph, index) for index in saved)
    return Verification(Program(graph, "verification"), labels, tuple(is_exact))
