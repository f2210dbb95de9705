"""What a region holds between its forward and its backward, as a list."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from remat._calls.entry import Entry
from remat._errors import show_type
from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._partition.cut import Cut
from remat._regions.waiting import twin_key
from remat._torch import dtensor
from remat._torch.tensors import memory_of
from remat.storage import AbstractStorage, Keep, Place, densely
from remat.storage._contract import held_in


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Residual:
    """One tensor that waits for a backward.

    Attributes:
        name: what `checkpoint_name` called it; of an argument, or a copy of one, its path;
            or "".
        path: where in the call it comes from ("params.w", "self.weight"); "" for a value
            that the call made.
        op: the operator that made it, "aten.mm"; "input" for an argument.
        shape: the sizes of its dimensions.
        dtype: its dtype.
        size_bytes: bytes that it holds on its device while it waits, in the form that its
            storage gives it; the most that may be, if that depends on the numbers. Of an
            argument all of its memory, with the first that lies in it.
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
        what = self.path or f'"{self.name}"' if self.name else "unnamed"
        stored = "" if self.storage.keeps else f" in {self.storage!r}"
        source = f" at {self.source}" if self.source else ""
        return (
            f"{what}: {self.op} {show_type(self.dtype, self.shape)} "
            f"{self.size_bytes} bytes{stored}{source}, {self.reason}"
        )


_AGAIN = ", in memory that is counted with another"
_SECOND = ", held for a second derivative only"
_COPY = operators.short_name(torch.ops.aten.clone.default)
_COPIED = ", as a copy because the call changes it"
_STATE = "a generator state, from which a draw is repeated"


def residuals_of(
    entry: Entry, operands: Sequence[Tensor], read: Cut | None = None
) -> list[Residual]:
    """What is saved, generator states too, in the order of the forward, then the operands.

    `read`: of a plain function, where no policy decides, what its backward reads.
    """
    region, stages = entry.region, entry.stages
    analysis, values = stages.analysis, stages.joint.graph.values
    found = read or stages.cut
    reason = "a value that the backward reads" if read else region.policy.reason
    # A plain function writes to what it is given, and keeps no state of a draw.
    states = () if read else (state.index for state in stages.joint.states)
    copied = () if read else entry.written
    counted: set[Hashable] = set()

    def residual(
        index: int, storage: AbstractStorage, name: str, path: str, why: str
    ) -> Residual:
        value = values[index]
        meta = value.meta
        assert isinstance(meta, TensorMeta)
        op = _COPY if index in copied else operators.made_by(value, values)
        size_bytes = held_in(storage, meta).size_bytes
        if path:
            new = _memory(operands[index], storage, size_bytes)
            size_bytes = sum(new[key] for key in new.keys() - counted)
            counted.update(new)
            why += "" if size_bytes or not any(new.values()) else _AGAIN
        kind = (op, meta.shape, meta.dtype, size_bytes)
        return Residual(name, path, *kind, storage, value.source, why)

    residuals: list[Residual] = []
    for index in sorted({*found.saved, *states}):
        number = analysis.numbers[analysis.roots[index]]
        names = analysis.views[number].names if number in analysis.views else ()
        is_state = operators.is_rng_state(values[index].op)
        is_kept = read or is_state
        storage = Keep() if is_kept else stages.decisions[number].storage
        why = _STATE if is_state else reason
        residuals.append(residual(index, storage, ", ".join(names), "", why))
    for index, path in enumerate(entry.labels):
        if not read or index in read.operands:
            use = " that the backward reads" if index in found.operands else _SECOND
            storage = region.inputs.get(index, Keep())
            name = ", ".join(values[index].names) or path
            path, use = ("", use + _COPIED) if index in copied else (path, use)
            residuals.append(residual(index, storage, name, path, f"an argument{use}"))
    return residuals


def _memory(
    operand: Tensor, storage: AbstractStorage, size_bytes: int
) -> dict[Any, int]:
    """What an operand holds while it waits, by what others that hold the same have, too."""
    if storage.keeps:
        return memory_of([operand])
    is_spread = dtensor.placement(operand) is not None
    part = dtensor.local_part(operand) if is_spread else operand
    dense, place, order = densely(part, Place())
    key = None if order is None else twin_key(dense, storage, place)
    return {key or id(operand): size_bytes}
