"""The records of a report, bytes, FLOPs and seconds, and how they are written as JSON."""

import dataclasses
import json
from typing import Any, final

import torch


@final
@dataclasses.dataclass(frozen=True, slots=True)
class HeldValue:
    """A value that waits for the backward, or several equal ones of folded layers."""

    name: str  # what `checkpoint_name` called it, or the path of a region's argument
    op: str  # the operator that made it
    shape: tuple[int, ...]
    dtype: torch.dtype
    size_bytes: int  # of its storage, wherever that is, summed over its `count` calls
    count: int  # how many calls hold one like it
    source: str  # the user's "file.py:line" that made it
    region: str  # which region holds it; "" if plain autograd does
    storage: str  # how it waits, as code; "Keep()" means unchanged
    consumers: tuple[str, ...]  # the backward operators that read it


@final
@dataclasses.dataclass(frozen=True, slots=True)
class RecomputedValue:
    """A value that a region's backward computes again, in all calls alike."""

    name: str  # what `checkpoint_name` called it
    op: str  # the operator that makes it
    shape: tuple[int, ...]
    dtype: torch.dtype
    size_bytes: int  # what saving it would take in all `count` calls
    count: int  # how many calls recompute one like it
    flops: int  # to make it again in all calls, by torch's formulas
    source: str  # the user's "file.py:line" that made it
    region: str  # which region it is a value of


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Equal calls of one region."""

    first: int  # the place of the first of them among the calls of the region, from 0
    count: int  # how many there are
    held_bytes: int  # what each holds
    recompute_flops: int | None  # again in each; None if unknown (engine="rerun")
    # their paths in the model that ran; () where the regions are no modules of one
    modules: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What tables call them."""
        if not self.modules:
            return f"each, x {self.count}"
        ends = dict.fromkeys([self.modules[0], self.modules[-1]])
        several = f", x {self.count}" if self.count > 1 else ""
        return f"{' ... '.join(ends)}{several}"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class RegionReport:
    """One region, all its calls together.

    What is predicted is known from the trace and the storages; None if there is no trace.
    For a value whose bytes depend on its numbers (`Sparse`), or that waits in a storage of
    the user's own, it has the measured bytes.
    """

    name: str  # the function's name
    policy: str  # as code
    calls: int  # how many calls the step made
    layers: tuple[Layer, ...]  # equal calls folded, in the order of the first of each
    # measured bytes that its calls hold, each storage counted once, with the first call
    # that holds it; what waits elsewhere is not among them
    held_bytes: int
    predicted_held_bytes: int | None
    # measured bytes that wait in host memory, on another device than the value's, or in
    # files
    elsewhere_bytes: int
    predicted_elsewhere_bytes: int | None
    working_set_bytes: int  # the most that one backward had made and not yet freed
    predicted_working_set_bytes: int | None  # by its program
    # run again, by torch's formulas (matmuls, convolutions, attention); None if unknown
    recompute_flops: int | None
    recompute_s: float | None  # in the operators run again; None if unknown
    # in the operators of its backwards, these included; None on the meta device
    backward_s: float | None


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which most bytes lived, without arguments and parameters."""

    size_bytes: int  # what lived
    phase: str  # "forward" or "backward"
    region: str  # whose forward or backward ran; "" outside of regions
    call: int | None  # which call of it, from 0; None outside of regions
    # the operator that reached it; in a backward outside of regions, the autograd node
    op: str
    source: str  # the user's line, "" in a backward
    # the bytes by owner: a region, "outside of regions", "gradients"
    groups: tuple[tuple[str, int], ...]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """The bytes that live over one step."""

    # seconds spent in operators until each point; on the meta device the number of the
    # event
    times_s: tuple[float, ...]
    groups: tuple[str, ...]  # the owners: regions, "outside of regions", "gradients"
    size_bytes: tuple[tuple[int, ...], ...]  # for each owner, at each point
    num_forward: int  # how many of the points lie in the forward
    is_timed: bool  # whether the times are seconds

    @property
    def axis(self) -> tuple[str, float]:
        """What the times count, in words, and how many of it are one on an axis."""
        if not self.is_timed:
            return "storages made and freed", 1.0
        units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
        reached = [each for each in units if self.times_s[-1] >= each[1]]
        name, unit = (reached or units[-1:])[0]
        return f"time in operators ({name})", unit

    @property
    def turn_s(self) -> float | None:
        """Where the backward begins; None if one of the two is empty."""
        is_inside = 0 < self.num_forward < len(self.times_s)
        return self.times_s[self.num_forward] if is_inside else None

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """The bytes of all owners at each point."""
        return tuple(map(sum, zip(*self.size_bytes, strict=True)))


@final
@dataclasses.dataclass(frozen=True, slots=True)
class SavingPoint:
    """What saving some values of the regions would cost and save."""

    added: str  # the value that this point saves beyond the one before, in words
    # what the regions would save, without arguments and what lives anyway (an output
    # that the next region holds)
    saved_bytes: int
    # what would be recomputed, in FLOPs: by torch's formula where there is one, else
    # one for each element that a step makes
    recompute_work: int


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Suggestion:
    """One next step."""

    kind: str  # "save" a value, "drop" one, "wrap" code in a region, or "none"
    value: str  # the value, in words
    source: str  # the line to change
    # by how much the held bytes change; an upper bound for "wrap", because the new
    # region still holds its inputs
    size_bytes: int
    fraction: float  # by which part of the recomputation's work it changes
    text: str  # all of this in a sentence


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """The figures of a report; see `Report`."""

    function: str
    device: str
    arguments: tuple[str, ...]  # tensors by their paths: "x: float32[8, 256]"
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
    entries = {"schema": schema, **dataclasses.asdict(record)}
    # What JSON does not know are dtypes.
    return json.dumps(
        entries, indent=2, default=lambda each: str(each).removeprefix("torch.")
    )
