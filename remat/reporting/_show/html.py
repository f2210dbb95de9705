"""A report as one HTML page that needs no network and no library.

Buttons in the heads of its tables sort them, and a search field filters them; both work
with the keyboard. Without scripts they are plain tables. The bytes over the step are drawn as
SVG, of which `page.html` has the colors and patterns.
"""

import math
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from string import Template

import torch

from remat._version import __version__
from remat.policies._sizes import show_size, unit_of
from remat.reporting._records import (
    Facts,
    HeldValue,
    RecomputedValue,
    RegionReport,
    SavingPoint,
    Timeline,
)
from remat.reporting._show import text

_REGIONS = (
    "region", "layers", "calls", "held", "predicted", "working set", "predicted",
    "again (FLOP)", "again (time)",
)  # fmt: skip
_POINTS = ("saved as well", "saved bytes", "recomputed")
_VALUES = ("value", "bytes", "waits", "again (FLOP)", "made by", "read by", "region")


def html_report(facts: Facts) -> str:
    page = files("remat.reporting._show").joinpath("page.html").read_text("utf-8")
    regions = ""
    if facts.regions:
        rows = _html_table("regions", _REGIONS, map(_region_cells, facts.regions))
        regions = f"\n<h2>Regions</h2>\n{rows}\n"
        regions += "<h2>What saving more would cost and spare</h2>\n"
        regions += _html_table("frontier", _POINTS, map(_point_cells, facts.frontier))
    values = [*facts.values, *facts.recomputed]
    return Template(page.rstrip()).substitute(
        title=escape(f"remat report: {facts.function}"),
        made=escape(_how_it_was_made(facts)),
        arguments=escape("; ".join(facts.arguments) or "none"),
        summary=escape("\n".join([*text.heading(facts), "", *text.notes(facts)])),
        timeline=_drawn_timeline(facts.timeline),
        regions=regions,
        values=_html_table("values", _VALUES, map(_value_cells, values)),
    )


def _how_it_was_made(facts: Facts) -> str:
    """When, by which versions, on which device and by which command."""
    return (
        f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}; remat {__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}; on {facts.device} "
        f"({platform.machine()}); {shlex.join(['python', *sys.orig_argv[1:]])}"
    )


# Words, which are sorted by themselves, or words and the figure that they are sorted by.
_Cell = str | tuple[str, float | None]

_SORTED_BY = (
    "calls", "held_bytes", "predicted_held_bytes", "working_set_bytes",
    "predicted_working_set_bytes", "recompute_flops", "recompute_s",
)  # fmt: skip


def _region_cells(region: RegionReport) -> Sequence[_Cell]:
    name, *words = next(iter(text.region_rows(region)))
    layers = "; ".join(layer.label for layer in region.layers)
    figures = [getattr(region, each) for each in _SORTED_BY]
    return [name, layers, *zip(words, figures, strict=True)]


def _point_cells(point: SavingPoint) -> Sequence[_Cell]:
    size, work = point.saved_bytes, point.recompute_work
    sizes, works = (show_size(size), size), (text.show_flops(work), work)
    return [point.added or "nothing", sizes, works]


def _value_cells(value: HeldValue | RecomputedValue) -> Sequence[_Cell]:
    if isinstance(value, HeldValue):
        waits = "held" if value.storage == "Keep()" else value.storage
        work, read = ("", 0), text.value_row(value)[3]
    else:
        waits, read = "recomputed", ""
        work = (text.show_flops(value.flops), value.flops)
    name, made, region = text.title(value), text.made_by(value), value.region or "none"
    size = (text.counted_size(value), value.size_bytes)
    return [name, size, waits, work, made, read, region]


def _html_table(
    name: str, heads: Sequence[str], rows: Iterable[Sequence[_Cell]]
) -> str:
    lines = [f'<div class="wide"><table id="{name}"><thead><tr>']
    for head in map(escape, heads):
        lines.append(f'<th scope="col"><button type="button">{head}</button></th>')
    lines.append("</tr></thead><tbody>")
    lines += [f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in rows]
    return "\n".join([*lines, "</tbody></table></div>"])


def _html_cell(cell: _Cell) -> str:
    words, key = (cell, cell) if isinstance(cell, str) else cell
    if isinstance(key, float):
        key = round(key * 1e9)  # the page compares digits: nanoseconds
    shown = "" if key is None else escape(str(key))
    return f'<td data-key="{shown}">{escape(words)}</td>'


_WIDTH, _HEIGHT = 660, 240
_LOOKS = 6  # of areas, by the patterns of `page.html`


def _drawn_timeline(timeline: Timeline) -> str:
    """The bytes over one step, stacked by owner, with figures and what they are beside it."""
    end, most = timeline.times_s[-1], max(timeline.total_bytes)
    times = [_WIDTH * time / (end or 1) for time in timeline.times_s]
    below = [float(_HEIGHT)] * len(times)
    areas: list[str] = []
    legend: list[str] = []
    owners = zip(timeline.groups, timeline.size_bytes, strict=True)
    for place, (owner, sizes) in enumerate(owners):
        heights = [_HEIGHT * size / (most or 1) for size in sizes]
        above = [y - height for y, height in zip(below, heights, strict=True)]
        edge = " ".join(
            [*_step_corners(times, above), *reversed(_step_corners(times, below))]
        )
        look, name = f'class="look{place % _LOOKS}"', f"<title>{escape(owner)}</title>"
        areas.append(f'<polygon points="{edge}" {look}>{name}</polygon>')
        legend.append(f"<li><svg><rect {look}/></svg> {escape(owner)}</li>")
        below = above
    unit, unit_bytes = unit_of(most)
    words, second = timeline.axis
    turn, label = "", ""
    if timeline.turn_s is not None and end:
        part = timeline.turn_s / end
        x = f"{_WIDTH * part:.1f}"
        turn = f'<line class="turn" x1="{x}" x2="{x}" y1="0" y2="{_HEIGHT}"/>'
        label = f'<span>forward</span><span style="left:max({part:.1%},5em)">backward</span>'
    return (
        f'<figure><figcaption>live bytes ({unit})</figcaption><div class="phases">{label}'
        f"</div>{_ticks(most / unit_bytes, 'bottom')}"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="Live bytes over the time of one step, by owner">{"".join(areas)}{turn}'
        f"</svg>{_ticks(end / second, 'left')}<figcaption>{words}</figcaption></figure>"
        f'<ul class="legend">{"".join(legend)}</ul>'
    )


def _step_corners(xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    """The corners of a line that keeps each value until the next place."""
    before = [ys[0], *ys]
    return [f"{x:.1f},{y:.1f}" for k, x in enumerate(xs) for y in (before[k], ys[k])]


def _ticks(most: float, side: str) -> str:
    """At most six round figures along an axis of the drawing, from 0 on."""
    power = 10.0 ** math.floor(math.log10(most / 5)) if most else 1.0
    step = next(power * k for k in (1, 2, 5, 10) if power * k * 5 >= most)
    figures = "".join(
        f'<span style="{side}:{step * k / (most or 1):.2%}">{step * k:.4g}</span>'
        for k in range(int(most / step) + 1)
    )
    return f'<div class="ticks {side}">{figures}</div>'
