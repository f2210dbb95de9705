"""What a region holds between its forward and its backward, as a list."""

import dataclasses
from collections.abc import Sequence
from typing import final

import torch

from remat._calls.entry import Entry
from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph
from remat._partition.analysis import Analysis, Decisions
from remat.storage import AbstractStorage, Keep


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Residual:
    """One tensor that waits for a backward.

    Attributes:
        name: what `checkpoint_name` called it; of an argument its path; or "".
        path: where in the call it comes from ("params.w", "self.weight"); "" for a value
            that the function made.
        op: the operator that made it, "aten.mm"; "input" for an argument.
        shape: the sizes of its dimensions.
        dtype: its dtype.
        size_bytes: bytes that it holds on its device while it waits, in the form that its
            storage gives it; the most that may be, if that depends on the numbers.
        storage: how it waits.
        source: the user's "file.py:line" that made it, "" for an argument.
        reason: why it is held.
    """

    name: str
    path: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    size_bytes: int
    storage: AbstractStorage
    source: str
    reason: str

    def __str__(self) -> str:
        """One line: path or name, operator, dtype[shape], bytes, storage, source, reason."""
        dtype = str(self.dtype).removeprefix("torch.")
        what = self.path or f'"{self.name}"' if self.name else "unnamed"
        shape = f"{dtype}[{', '.join(map(str, self.shape))}]"
        stored = "" if self.storage.keeps else f" in {self.storage!r}"
        source = f" at {self.source}" if self.source else ""
        return (
            f"{what}: {self.op} {shape} {self.size_bytes} bytes{stored}{source}, "
            f"{self.reason}"
        )


SECOND = "an argument, held for a second derivative only"


def residuals_of_region(entry: Entry) -> list[Residual]:
    """The saved values in the order of the forward, then the operands."""
    region, stages = entry.region, entry.stages
    analysis, found = stages.analysis, stages.cut
    values = made_values(analysis, found.saved, region.policy.reason, stages.decisions)
    operands = [
        operand_residual(
            analysis.joint.graph,
            index,
            path,
            index in found.operands,
            region.inputs.get(index, Keep()),
        )
        for index, path in enumerate(entry.labels)
    ]
    return values + operands


def operand_residual(
    graph: Graph, index: int, path: str, is_read: bool, storage: AbstractStorage
) -> Residual:
    """An operand, read by the backward or held for a second derivative only."""
    meta = graph.values[index].meta
    assert isinstance(meta, TensorMeta)
    name = ", ".join(graph.values[index].names)
    reason = "an argument that the backward reads" if is_read else SECOND
    return Residual(
        name or path, path, "input", meta.shape, meta.dtype,
        storage.held(meta).size_bytes, storage, "", reason,
    )  # fmt: skip


def made_values(
    analysis: Analysis,
    saved: Sequence[int],
    reason: str,
    decisions: Decisions | None = None,
) -> list[Residual]:
    """Values that a function made; outside any policy there are no decisions on them."""
    graph = analysis.joint.graph
    found: list[Residual] = []
    for index in saved:
        number, value = analysis.numbers[analysis.roots[index]], graph.values[index]
        view, meta = analysis.views.get(number), value.meta
        assert isinstance(meta, TensorMeta)
        storage = Keep() if decisions is None else decisions[number].storage
        found.append(Residual(
            ", ".join(view.names) if view else "", "",
            operators.made_by(value, graph.values), meta.shape, meta.dtype,
            storage.held(meta).size_bytes, storage, value.source, reason,
        ))  # fmt: skip
    return found
