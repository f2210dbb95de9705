"""A report in words: tables of text, a rich form of the same, and two side by side."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from remat._errors import show_type
from remat.policies._sizes import show_size
from remat.reporting._records import (
    Facts,
    HeldValue,
    Peak,
    RecomputedValue,
    RegionReport,
)

_Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

_REGIONS = (
    "region", "calls", "held", "predicted", "working set", "predicted", "again", "",
)  # fmt: skip
_MOST_VALUES = 10
_VALUES = ("value", "held", "made by", "read by", "region")


def text_report(facts: Facts) -> str:
    parts = [*heading(facts)]
    for heads, rows in _tables(facts):
        parts += ["", *table(heads, rows)]
    parts += ["", *notes(facts)]
    return "\n".join(parts)


def rich_report(facts: Facts) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [Text("\n".join(heading(facts)))]
    for heads, rows in _tables(facts):
        made = Table()
        for head in heads:
            # A figure that is cut short is another.
            made.add_column(head, overflow="fold")
        for row in rows:
            made.add_row(*map(Text, row))  # a name may look like rich's markup
        parts.append(made)
    return Group(*parts, Text("\n".join(notes(facts))))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines, with a rule under the heads."""
    lines = aligned([heads, *rows])
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, the first of which has the heads; numbers stand to the right."""
    columns: list[list[str]] = []
    for column in zip(*cells, strict=True):
        width = max(map(len, column))
        is_numeric = all(not c or c[0] in "-+0123456789" for c in column[1:])
        columns.append(
            [c.rjust(width) if is_numeric else c.ljust(width) for c in column]
        )
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def heading(facts: Facts) -> Iterator[str]:
    """The figures of the whole step, a line each."""
    yield f"{facts.function} on {facts.device}: one forward and its backward"
    yield ""
    outside = f"; {show_size(facts.outside_bytes)} of them outside any region"
    held = f"held    {show_size(facts.held_bytes)} wait for the backward"
    yield held + (outside if facts.outside_bytes else "")
    if facts.elsewhere_bytes:
        size = show_size(facts.elsewhere_bytes)
        yield f"        {size} beside that in host memory, on other devices or in files"
    yield f"peak    {show_size(facts.peak.size_bytes)} {peak_text(facts.peak)}:"
    if facts.allocator_peak_bytes is not None:
        size = show_size(facts.allocator_peak_bytes)
        yield f"        {size} by the device's allocator, what one kernel keeps for itself included"
    groups = facts.peak.groups
    yield "        " + ", ".join(f"{show_size(size)} {name}" for name, size in groups)
    optimizer = _words_if_known(show_size, facts.optimizer_bytes)
    yield (
        f"apart   parameters {show_size(facts.parameter_bytes)}, "
        f"gradients {show_size(facts.gradient_bytes)}, "
        f"other arguments {show_size(facts.argument_bytes)}, "
        f"optimizer state {optimizer or 'not counted (with_optimizer adds it)'}"
    )
    yield f"again   {_recomputed_text(facts)}"


def _recomputed_text(facts: Facts) -> str:
    if facts.recompute_flops is None:
        what = 'engine="rerun", a schedule, or a transform inside the function'
        return f"unknown: {what}, does not tell"
    flops = show_flops(facts.recompute_flops)
    whole = facts.forward_flops + facts.backward_flops - facts.recompute_flops
    share = f", {facts.recompute_flops / whole:.0%} of the rest" if whole else ""
    if facts.recompute_s is None or facts.forward_s is None or facts.backward_s is None:
        return f"{flops}{share}"
    rest = facts.forward_s + facts.backward_s - facts.recompute_s
    part = f" ({facts.recompute_s / rest:.0%})" if rest else ""
    return f"{flops}{share}; {show_time(facts.recompute_s)}{part} measured"


def peak_text(peak: Peak) -> str:
    """What made the peak."""
    where = f" of {peak.region}, call {peak.call}" if peak.region else ""
    made = f", at {peak.op}" if peak.op else ""
    line = f" ({peak.source})" if peak.source else ""
    return f"in the {peak.phase}{where}{made}{line}"


def _tables(facts: Facts) -> Iterator[_Table]:
    if facts.regions:
        rows = [row for region in facts.regions for row in region_rows(region)]
        yield _REGIONS, rows
    if facts.values:
        yield _VALUES, [value_row(value) for value in facts.values[:_MOST_VALUES]]


def region_rows(region: RegionReport) -> Iterator[tuple[str, ...]]:
    """A row of the table for a region, then one for each kind of its layers."""
    yield (
        region.name,
        str(region.calls),
        _held_text(region.held_bytes, region.elsewhere_bytes),
        _held_text(region.predicted_held_bytes, region.predicted_elsewhere_bytes),
        show_size(region.working_set_bytes),
        _words_if_known(show_size, region.predicted_working_set_bytes),
        _words_if_known(show_flops, region.recompute_flops),
        _words_if_known(show_time, region.recompute_s),
    )
    for layer in region.layers:
        name, held = f"  {layer.label}", show_size(layer.held_bytes)
        flops = _words_if_known(show_flops, layer.recompute_flops)
        yield name, "", held, "", "", "", flops, ""


def _held_text(here: int | None, elsewhere: int | None) -> str:
    """Bytes on the device, and those that wait elsewhere if there are any."""
    size = _words_if_known(show_size, here)
    return f"{size} + {show_size(elsewhere)} elsewhere" if elsewhere else size


def title(value: HeldValue | RecomputedValue) -> str:
    """A value's name, dtype and shape."""
    return f"{value.name} {show_type(value.dtype, value.shape)}".lstrip()


def made_by(value: HeldValue | RecomputedValue) -> str:
    """The operator, and the user's line if it is known."""
    return f"{value.op} {value.source}".rstrip()


def counted_size(value: HeldValue | RecomputedValue) -> str:
    """The bytes of one call's value, and of how many calls: "2 x 1.0 KiB"."""
    count = f"{value.count} x " if value.count > 1 else ""
    return f"{count}{show_size(value.size_bytes // value.count)}"


def value_row(value: HeldValue) -> tuple[str, ...]:
    waits = "" if value.storage == "Keep()" else f", {value.storage}"
    return (
        title(value),
        f"{counted_size(value)}{waits}",
        made_by(value),
        ", ".join(value.consumers[:2]) + (" ..." if len(value.consumers) > 2 else ""),
        value.region or "none",
    )


def notes(facts: Facts) -> Iterator[str]:
    """What the tables leave out, names that match nothing, and what to try next."""
    left = facts.values[_MOST_VALUES:]
    if left:
        size = show_size(sum(value.size_bytes for value in left))
        yield f"and {len(left)} smaller ones, {size} together (all: to_html, to_json)"
    for policy, glob in facts.unmatched:
        yield f'no value has the name "{glob}" of {policy}'
    yield f"next: {facts.suggestion.text}"


def _words_if_known(show: Callable[[Any], str], figure: Any) -> str:
    return "" if figure is None else show(figure)


def show_flops(flops: int) -> str:
    """FLOPs as people read them: "1.5 GFLOP"."""
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if flops >= size:
            return f"{flops / size:.1f} {unit}FLOP"
    return f"{flops} FLOP"


def show_time(time_s: float) -> str:
    """Seconds as people read them: "12.3 ms"."""
    return f"{time_s:.2f} s" if time_s >= 1 else f"{time_s * 1e3:.2f} ms"


def show_ratio(figure: float | None, plain: float | None) -> str:
    """How many times as much as without remat, or as before; "" where that is unknown."""
    return f"{figure / plain:.2f} x" if plain and figure is not None else ""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One figure of two reports."""

    figure: str  # its name
    before: float | None  # in the first report; None where it has none
    after: float | None  # in the second
    unit: str  # "B", "FLOP" or "s"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Diff:
    """Two reports side by side."""

    # the figures of the step, then the held bytes of each region
    rows: tuple[Change, ...]

    def __str__(self) -> str:
        """A table: figure, before, after, and the ratio."""
        rows: list[tuple[str, ...]] = []
        for row in self.rows:
            show = {"B": show_size, "FLOP": show_flops, "s": show_time}[row.unit]
            before = _words_if_known(show, row.before) or "-"
            after = _words_if_known(show, row.after) or "-"
            rows.append((row.figure, before, after, show_ratio(row.after, row.before)))
        return "\n".join(table(("figure", "before", "after", "ratio"), rows))


_FIGURES = {
    "B": ("held_bytes", "elsewhere_bytes", "outside_bytes", "parameter_bytes", "gradient_bytes"),
    "FLOP": ("forward_flops", "backward_flops", "recompute_flops"),
    "s": ("forward_s", "backward_s", "recompute_s"),
}  # fmt: skip


def diff(one: Facts, other: Facts) -> Diff:
    """The figures of two reports."""
    rows = [Change("peak_bytes", one.peak.size_bytes, other.peak.size_bytes, "B")]
    rows += [
        Change(name, getattr(one, name), getattr(other, name), unit)
        for unit, names in _FIGURES.items()
        for name in names
    ]
    before = {each.name: each.held_bytes for each in one.regions}
    after = {each.name: each.held_bytes for each in other.regions}
    rows += [
        Change(f"held by {name}", before.get(name), after.get(name), "B")
        for name in before | after
    ]
    return Diff(tuple(rows))
