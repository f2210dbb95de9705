"""A report as one HTML page that needs no network and no library.

Buttons in the heads of its tables sort them, and a search field filters them; both work
with the keyboard. Without scripts they are plain tables.
"""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from remat.reporting._records import Facts, HeldValue, RecomputedValue, RegionReport
from remat.reporting._show.svg import frontier_svg, timeline_svg
from remat.reporting._show.text import (
    counted_size,
    heading,
    made_by,
    notes,
    region_rows,
    show_flops,
    title,
    value_row,
)

_REGIONS = (
    "region", "calls", "held", "predicted", "working set", "predicted",
    "again (FLOP)", "again (time)",
)  # fmt: skip
_VALUES = ("value", "bytes", "waits", "again (FLOP)", "made by", "read by", "region")


def html_report(facts: Facts) -> str:
    """The whole page."""
    page = files("remat.reporting._show").joinpath("page.html").read_text("utf-8")
    regions = ""
    if facts.regions:
        rows = _html_table("regions", _REGIONS, map(_region_cells, facts.regions))
        regions = f"\n<h2>Regions</h2>\n{rows}\n"
        regions += "<h2>What saving more would cost and spare</h2>\n"
        regions += frontier_svg(facts.frontier)
    held = map(_held_cells, facts.values)
    again = map(_recomputed_cells, facts.recomputed)
    return Template(page.rstrip()).substitute(
        title=escape(f"remat report: {facts.function}"),
        summary=escape("\n".join([*heading(facts), "", *notes(facts)])),
        timeline=timeline_svg(facts.timeline),
        regions=regions,
        values=_html_table("values", _VALUES, [*held, *again]),
    )


_Cell = tuple[str, str]  # the words, and what they are sorted by


def _region_cells(region: RegionReport) -> Sequence[_Cell]:
    row = next(iter(region_rows(region)))
    keys: tuple[float | None, ...] = (
        region.calls,
        region.held_bytes,
        region.predicted_held_bytes,
        region.working_set_bytes,
        region.predicted_working_set_bytes,
        region.recompute_flops,
        None if region.recompute_s is None else round(region.recompute_s * 1e9),
    )
    sorted_by = ["" if key is None else str(key) for key in keys]
    return list(zip(row, [region.name, *sorted_by], strict=True))


def _held_cells(value: HeldValue) -> Sequence[_Cell]:
    waits = "held" if value.storage == "Keep()" else value.storage
    return _value_cells(value, waits, ("", "0"), value_row(value)[3])


def _recomputed_cells(value: RecomputedValue) -> Sequence[_Cell]:
    work = (show_flops(value.flops), str(value.flops))
    return _value_cells(value, "recomputed", work, "")


def _value_cells(
    value: HeldValue | RecomputedValue, waits: str, work: _Cell, read: str
) -> Sequence[_Cell]:
    name, made, region = title(value), made_by(value), value.region or "none"
    size = (counted_size(value), str(value.size_bytes))
    words = [(each, each) for each in (made, read, region)]
    return [(name, name), size, (waits, waits), work, *words]


def _html_table(
    name: str, heads: Sequence[str], rows: Iterable[Sequence[_Cell]]
) -> str:
    head = "".join(
        f'<th scope="col"><button type="button">{escape(head)}</button></th>'
        for head in heads
    )
    lines = [f'<table id="{name}"><thead><tr>', head, "</tr></thead><tbody>"]
    for row in rows:
        cells = "".join(
            f'<td data-key="{escape(key)}">{escape(words)}</td>' for words, key in row
        )
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table>"])
