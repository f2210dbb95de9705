"""Drawings of a report as SVG text, for a page without any library.

Owners differ in pattern as well as color; axes have units.
"""

from collections.abc import Iterator, Sequence
from html import escape
from typing import final

from remat.policies._sizes import unit_of
from remat.reporting._records import SavingPoint, Timeline

_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 740, 12, 254  # the corners of what the axes enclose
_COLORS = ("#c6dbef", "#f4a582", "#e5f5e0", "#8c96c6", "#fee391", "#66a3a0")
_LINES = ("", "M0 8L8 0", "M0 0L8 8", "M4 0V8", "M0 4H8", "M0 0L8 8M0 8L8 0")


def timeline_svg(timeline: Timeline) -> str:
    """The bytes over one step, stacked by owner, as a drawing in SVG."""
    total = timeline.total_bytes
    name, unit = unit_of(max(total, default=1))
    scale = 1e3 if timeline.is_timed else 1.0
    times = [time * scale for time in timeline.times_s]
    axes = _Axes(max(times, default=1.0), max(total, default=1) / unit)
    parts = ["<defs>", *map(_svg_pattern, range(len(timeline.groups))), "</defs>"]
    below = [0.0] * len(times)
    for place, sizes in enumerate(timeline.size_bytes):
        above = [low + size / unit for low, size in zip(below, sizes, strict=True)]
        edge = [*axes.steps(times, above), *reversed(axes.steps(times, below))]
        parts.append(
            f'<polygon points="{" ".join(edge)}" fill="url(#p{place})" stroke="#333" '
            f'stroke-width="0.5"><title>{escape(timeline.groups[place])}</title>'
            "</polygon>"
        )
        below = above
    parts += axes.drawn(timeline.time_words, f"live bytes ({name})")
    title = "Live bytes over the time of one step, by owner"
    return _svg(title, parts) + _svg_legend(timeline.groups)


def frontier_svg(points: Sequence[SavingPoint]) -> str:
    """Recomputed work against saved bytes, as a drawing in SVG."""
    name, unit = unit_of(max((point.saved_bytes for point in points), default=1))
    sizes = [point.saved_bytes / unit for point in points]
    works = [point.recompute_work / 1e9 for point in points]
    axes = _Axes(max(sizes, default=1.0), max(works, default=1.0))
    curve = " ".join(axes.steps(sizes, works))
    parts = [f'<polyline points="{curve}" fill="none" stroke="black"/>']
    for point, size, work in zip(points, sizes, works, strict=True):
        said = point.added or "nothing saved"
        parts.append(
            f'<circle cx="{axes.x(size):.1f}" cy="{axes.y(work):.1f}" r="4" fill="white" '
            f'stroke="black"><title>{escape(said)}: {size:.3g} {name}, '
            f"{work:.3g} GFLOP</title></circle>"
        )
    parts += axes.drawn(f"saved bytes ({name})", "recomputed (GFLOP)")
    return _svg("What saving more values costs and spares", parts)


@final
class _Axes:
    """From figures, which begin at 0, to places on the page."""

    def __init__(self, most_x: float, most_y: float) -> None:
        self._most_x, self._most_y = most_x or 1.0, most_y or 1.0

    def x(self, figure: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * figure / self._most_x

    def y(self, figure: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * figure / self._most_y

    def steps(self, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
        """The corners of a line that keeps each value until the next place."""
        corners: list[str] = []
        for place, (x, y) in enumerate(zip(xs, ys, strict=True)):
            if place:
                corners.append(f"{self.x(x):.1f},{self.y(ys[place - 1]):.1f}")
            corners.append(f"{self.x(x):.1f},{self.y(y):.1f}")
        return corners

    def drawn(self, x_words: str, y_words: str) -> Iterator[str]:
        """Two lines, five figures at each, and what they are."""
        yield (
            f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="black"/>'
        )
        for quarter in range(5):
            x, y = self._most_x * quarter / 4, self._most_y * quarter / 4
            yield _svg_text(self.x(x), _BOTTOM + 16, f"{x:.3g}", "middle")
            yield _svg_text(_LEFT - 6, self.y(y) + 4, f"{y:.3g}", "end")
        yield _svg_text((_LEFT + _WIDTH) / 2, _HEIGHT - 8, x_words, "middle")
        yield (
            f'<text transform="translate(16 {(_BOTTOM + _TOP) / 2:.0f}) rotate(-90)" '
            f'text-anchor="middle">{escape(y_words)}</text>'
        )


def _svg_text(x: float, y: float, words: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def _svg_pattern(place: int) -> str:
    color, line = _COLORS[place % len(_COLORS)], _LINES[place % len(_LINES)]
    return (
        f'<pattern id="p{place}" width="8" height="8" '
        f'patternUnits="userSpaceOnUse"><rect width="8" height="8" fill="{color}"/>'
        f'<path d="{line}" stroke="#333" stroke-width="0.7"/></pattern>'
    )


def _svg_legend(groups: Sequence[str]) -> str:
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
