"""The records of a report, bytes, FLOPs and seconds, and how they are written as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, final

import torch


@final
@dataclasses.dataclass(frozen=True, slots=True)
class HeldValue:
    """A value that waits for the backward, or several equal ones of folded layers.

    Attributes:
        name: what `checkpoint_name` called it, or the path of an argument of a region.
        op: the operator that made it.
        shape: the sizes of its dimensions.
        dtype: its dtype.
        size_bytes: bytes of its storage, wherever that is, summed over its `count`
            calls.
        count: how many calls hold one like it.
        source: the user's "file.py:line" that made it.
        region: which region holds it; "" if plain autograd does.
        storage: how it waits, as code; "Keep()" means unchanged.
        consumers: the backward operators that read it.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    size_bytes: int
    count: int
    source: str
    region: str
    storage: str
    consumers: tuple[str, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class RecomputedValue:
    """A value that a region's backward computes again, in all calls alike.

    Attributes:
        name: what `checkpoint_name` called it.
        op: the operator that makes it.
        shape: the sizes of its dimensions.
        dtype: its dtype.
        size_bytes: what saving it would take in all `count` calls.
        count: how many calls recompute one like it.
        flops: FLOPs to make it again in all calls, by torch's formulas.
        source: the user's "file.py:line" that made it.
        region: which region it is a value of.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    size_bytes: int
    count: int
    flops: int
    source: str
    region: str


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Equal calls of one region.

    Attributes:
        first: the place of the first of them among the calls of the region, from 0.
        count: how many there are.
        held_bytes: what each holds.
        recompute_flops: FLOPs that each runs again; None if unknown (engine="rerun").
    """

    first: int
    count: int
    held_bytes: int
    recompute_flops: int | None


@final
@dataclasses.dataclass(frozen=True, slots=True)
class RegionReport:
    """One region, all its calls together.

    Attributes:
        name: the function's name.
        policy: the policy, as code.
        calls: how many calls the step made.
        layers: equal calls folded, in the order of the first of each kind.
        held_bytes: measured bytes that its calls hold, each storage counted once, with
            the first call that holds it; what waits elsewhere is not among them.
        predicted_held_bytes: the same as predicted from the trace and the storages;
            None if there is no trace. For a value whose bytes depend on its numbers
            (`Sparse`), or that waits in a storage of the user's own, this has the
            measured bytes.
        elsewhere_bytes: measured bytes that wait in host memory, on another device than
            the value's, or in files.
        predicted_elsewhere_bytes: the same as predicted.
        working_set_bytes: the most that one backward had made and not yet freed.
        predicted_working_set_bytes: the same by its program; None if there is none.
        recompute_flops: FLOPs run again, by torch's formulas (matmuls, convolutions,
            attention); None if unknown.
        recompute_s: seconds in the operators run again; None if unknown.
        backward_s: seconds in the operators of its backwards, these included; None on
            the meta device.
    """

    name: str
    policy: str
    calls: int
    layers: tuple[Layer, ...]
    held_bytes: int
    predicted_held_bytes: int | None
    elsewhere_bytes: int
    predicted_elsewhere_bytes: int | None
    working_set_bytes: int
    predicted_working_set_bytes: int | None
    recompute_flops: int | None
    recompute_s: float | None
    backward_s: float | None


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which most bytes lived, without arguments and parameters.

    Attributes:
        size_bytes: what lived.
        phase: "forward" or "backward".
        region: whose forward or backward ran; "" outside of regions.
        call: which call of it, from 0; None outside of regions.
        op: the operator that reached the peak; in a backward outside of regions, the
            autograd node.
        source: the user's line, "" in a backward.
        groups: the bytes by owner: a region, "outside of regions", "gradients".
    """

    size_bytes: int
    phase: str
    region: str
    call: int | None
    op: str
    source: str
    groups: tuple[tuple[str, int], ...]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """The bytes that live over one step.

    Attributes:
        times_s: seconds spent in operators until each point; on the meta device the
            number of the event.
        groups: the owners: regions, "outside of regions", "gradients".
        size_bytes: for each owner, the bytes at each point.
        num_forward: how many of the points lie in the forward.
        is_timed: whether the times are seconds.
    """

    times_s: tuple[float, ...]
    groups: tuple[str, ...]
    size_bytes: tuple[tuple[int, ...], ...]
    num_forward: int
    is_timed: bool

    @property
    def time_words(self) -> str:
        """What the times count, for an axis."""
        return "time in operators (ms)" if self.is_timed else "storages made and freed"

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """The bytes of all owners at each point."""
        return tuple(map(sum, zip(*self.size_bytes, strict=True)))


@final
@dataclasses.dataclass(frozen=True, slots=True)
class SavingPoint:
    """What saving some values of the regions would cost and save.

    Attributes:
        added: the value that this point saves beyond the one before, in words.
        saved_bytes: bytes that the regions would save, without arguments and what lives
            anyway (an output that the next region holds).
        recompute_work: what would be recomputed, in FLOPs: by torch's formula where there
            is one, else one for each element that a step makes.
    """

    added: str
    saved_bytes: int
    recompute_work: int


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Suggestion:
    """One next step.

    Attributes:
        kind: "save" a value, "drop" one, "wrap" code in a region, or "none".
        value: the value, in words.
        source: the line to change.
        size_bytes: by how much the held bytes change; an upper bound for "wrap",
            because the new region still holds its inputs.
        fraction: by which part of the recomputation's work it changes.
        text: all of this in a sentence.
    """

    kind: str
    value: str
    source: str
    size_bytes: int
    fraction: float
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """The figures of a report; see `Report`."""

    function: str
    device: str
    held_bytes: int
    elsewhere_bytes: int
    outside_bytes: int
    output_bytes: int
    peak: Peak
    allocator_peak_bytes: int | None
    parameter_bytes: int
    argument_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None
    forward_flops: int
    backward_flops: int
    recompute_flops: int | None
    forward_s: float | None
    backward_s: float | None
    recompute_s: float | None
    regions: tuple[RegionReport, ...]
    values: tuple[HeldValue, ...]
    recomputed: tuple[RecomputedValue, ...]
    unmatched: tuple[tuple[str, str], ...]
    suggestion: Suggestion
    frontier: tuple[SavingPoint, ...]
    timeline: Timeline


def to_json(schema: str, record: Any) -> str:
    """A dataclass as a JSON object; the schema's name is its first entry."""

    def dtype_name(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    entries = {"schema": schema, **dataclasses.asdict(record)}
    return json.dumps(entries, indent=2, default=dtype_name)
