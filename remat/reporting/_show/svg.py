"""Drawings of a report as SVG text, for a page without any library.

Owners differ in pattern as well as color; axes have units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from remat.policies._sizes import unit_of
from remat.reporting._records import SavingPoint, Timeline

_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 20, 12, 46
_COLORS = ("#c6dbef", "#f4a582", "#e5f5e0", "#8c96c6", "#fee391", "#66a3a0")
_LINES = ("", "M0 8L8 0", "M0 0L8 8", "M4 0V8", "M0 4H8", "M0 0L8 8M0 8L8 0")


def timeline_svg(timeline: Timeline) -> str:
    """The bytes over one step, stacked by owner."""
    total = timeline.total_bytes
    name, unit = unit_of(max(total, default=1))
    scale = 1e3 if timeline.is_timed else 1.0
    times = [time * scale for time in timeline.times_s]
    across = _Scale(max(times, default=1.0), _LEFT, _WIDTH - _RIGHT)
    up = _Scale(max(total, default=1) / unit, _HEIGHT - _BOTTOM, _TOP)
    parts = ["<defs>", *map(_pattern, range(len(timeline.groups))), "</defs>"]
    below = [0.0] * len(times)
    for place, sizes in enumerate(timeline.size_bytes):
        above = [low + size / unit for low, size in zip(below, sizes, strict=True)]
        edge = _steps(times, above, across, up)
        back = reversed(_steps(times, below, across, up))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*edge, *back])
        parts.append(
            f'<polygon points="{points}" fill="url(#p{place})" stroke="#333" '
            f'stroke-width="0.5"><title>{escape(timeline.groups[place])}</title>'
            "</polygon>"
        )
        below = above
    parts += _axes(across, up, timeline.time_words, f"live bytes ({name})")
    return _svg("Live bytes over the time of one step, by owner", parts) + _legend(
        timeline.groups
    )


def frontier_svg(points: Sequence[SavingPoint]) -> str:
    """Recomputed work against saved bytes."""
    name, unit = unit_of(max((point.saved_bytes for point in points), default=1))
    sizes = [point.saved_bytes / unit for point in points]
    works = [point.recompute_work / 1e9 for point in points]
    across = _Scale(max(sizes, default=1.0), _LEFT, _WIDTH - _RIGHT)
    up = _Scale(max(works, default=1.0), _HEIGHT - _BOTTOM, _TOP)
    curve = " ".join(f"{x:.1f},{y:.1f}" for x, y in _steps(sizes, works, across, up))
    parts = [f'<polyline points="{curve}" fill="none" stroke="black"/>']
    for point, size, work in zip(points, sizes, works, strict=True):
        said = point.added or "nothing saved"
        parts.append(
            f'<circle cx="{across(size):.1f}" cy="{up(work):.1f}" r="4" fill="white" '
            f'stroke="black"><title>{escape(said)}: {size:.3g} {name}, '
            f"{work:.3g} GFLOP</title></circle>"
        )
    parts += _axes(across, up, f"saved bytes ({name})", "recomputed (GFLOP)")
    return _svg("What saving more values costs and spares", parts)


class _Scale:
    """From a figure to a place on the page."""

    def __init__(self, most: float, start: float, end: float) -> None:
        self.most = most or 1.0
        self.start, self.end = start, end

    def __call__(self, figure: float) -> float:
        return self.start + (self.end - self.start) * figure / self.most


def _steps(
    xs: Sequence[float], ys: Sequence[float], across: _Scale, up: _Scale
) -> list[tuple[float, float]]:
    """The corners of a line that keeps each value until the next place."""
    found: list[tuple[float, float]] = []
    for place, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if place:
            found.append((across(x), found[-1][1]))
        found.append((across(x), up(y)))
    return found


def _axes(across: _Scale, up: _Scale, x_words: str, y_words: str) -> Iterator[str]:
    yield (
        f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}" '
        'fill="none" stroke="black"/>'
    )
    for quarter in range(5):
        x, y = across.most * quarter / 4, up.most * quarter / 4
        yield _text(across(x), _HEIGHT - _BOTTOM + 16, f"{x:.3g}", "middle")
        yield _text(_LEFT - 6, up(y) + 4, f"{y:.3g}", "end")
    yield _text((_LEFT + _WIDTH) / 2, _HEIGHT - 8, x_words, "middle")
    middle = (_HEIGHT - _BOTTOM + _TOP) / 2
    yield (
        f'<text transform="translate(16 {middle:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_words)}</text>'
    )


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def _pattern(place: int) -> str:
    color, line = _COLORS[place % len(_COLORS)], _LINES[place % len(_LINES)]
    return (
        f'<pattern id="p{place}" width="8" height="8" '
        f'patternUnits="userSpaceOnUse"><rect width="8" height="8" fill="{color}"/>'
        f'<path d="{line}" stroke="#333" stroke-width="0.7"/></pattern>'
    )


def _legend(groups: Sequence[str]) -> str:
    items = "".join(
        f'<li><svg width="24" height="14" aria-hidden="true"><rect width="24" '
        f'height="14" fill="url(#p{place})" stroke="#333"/></svg> {escape(group)}</li>'
        for place, group in enumerate(groups)
    )
    return f'<ul class="legend">{items}</ul>'


def _svg(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
