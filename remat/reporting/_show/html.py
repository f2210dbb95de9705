"""A report as one HTML page that needs no network and no library.

Buttons in the heads of its tables sort them, and a search field filters them; both work
with the keyboard. Without scripts they are plain tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

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

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem;
  padding: 0 1rem; color: #111; background: #fff; }
pre { white-space: pre-wrap; background: #f4f4f4; padding: 1rem; }
svg { max-width: 100%; font-size: 12px; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 1.5rem; }
th, td { border-bottom: 1px solid #bbb; padding: 0.3rem 0.6rem; text-align: left;
  vertical-align: top; }
th button { font: inherit; font-weight: bold; border: 0; background: none; padding: 0;
  cursor: pointer; text-align: left; }
th button:focus-visible, input:focus-visible { outline: 3px solid #004488; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
.legend { list-style: none; padding: 0; display: flex; gap: 1.5rem; flex-wrap: wrap; }
"""

_SCRIPT = """
"use strict";
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, place) => row.cells[place].dataset.key ?? row.cells[place].textContent;
  heads.forEach((head, place) => head.firstElementChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const sign = down ? -1 : 1;
    const order = (a, b) => sign * key(a, place).localeCompare(
      key(b, place), undefined, { numeric: true });
    body.append(...[...body.rows].sort(order));
  }));
}
const field = document.querySelector("input[type=search]");
const count = document.querySelector("output");
field.addEventListener("input", () => {
  const words = field.value.toLowerCase().split(/\\s+/);
  let shown = 0;
  for (const row of document.querySelector("#values").tBodies[0].rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    shown += row.hidden ? 0 : 1;
  }
  count.textContent = shown + " shown";
});
"""

_REGIONS = (
    "region", "calls", "held", "predicted", "working set", "predicted",
    "again (FLOP)", "again (time)",
)  # fmt: skip
_VALUES = ("value", "bytes", "waits", "again (FLOP)", "made by", "read by", "region")


def html_report(facts: Facts) -> str:
    """The whole page."""
    return "\n".join(_html_page(facts))


def _html_page(facts: Facts) -> Iterator[str]:
    name = escape(f"remat report: {facts.function}")
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield (
        '<meta http-equiv="Content-Security-Policy" content="default-src '
        "'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
    )
    yield '<meta name="viewport" content="width=device-width">'
    yield f"<title>{name}</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{name}</h1>"
    lines = [*heading(facts), "", *notes(facts)]
    yield f"<pre>{escape(chr(10).join(lines))}</pre>"
    yield "<h2>Bytes over the step</h2>"
    yield timeline_svg(facts.timeline)
    if facts.regions:
        yield "<h2>Regions</h2>"
        yield from _html_table("regions", _REGIONS, map(_region_cells, facts.regions))
        yield "<h2>What saving more would cost and spare</h2>"
        yield frontier_svg(facts.frontier)
    yield "<h2>All values: held for the backward, or computed again in it</h2>"
    yield (
        '<p><label>Search <input type="search" aria-controls="values"></label> '
        '<output aria-live="polite"></output></p>'
    )
    rows = [*map(_held_cells, facts.values), *map(_recomputed_cells, facts.recomputed)]
    yield from _html_table("values", _VALUES, iter(rows))
    yield f"<script>{_SCRIPT}</script></body></html>"


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
    name: str, heads: Sequence[str], rows: Iterator[Sequence[_Cell]]
) -> Iterator[str]:
    yield f'<table id="{name}"><thead><tr>'
    yield "".join(
        f'<th scope="col"><button type="button">{escape(head)}</button></th>'
        for head in heads
    )
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = "".join(
            f'<td data-key="{escape(key)}">{escape(words)}</td>' for words, key in row
        )
        yield f"<tr>{cells}</tr>"
    yield "</tbody></table>"
