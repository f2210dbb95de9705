"""Figures of a report, by matplotlib: readable in grayscale, with units on the axes.

Owners also differ in hatches and lightness, and curves in line styles, so that no color
is needed. Figures are returned unsaved: `figure.savefig("step.svg")`, or `.png`.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from remat._errors import RematError, require_type
from remat.policies._sizes import unit_of
from remat.reporting._records import SavingPoint, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")
_COLORS = ("#c6dbef", "#f4a582", "#edf8e9", "#8c96c6", "#fee391", "#66a3a0", "#b3636b")
_STYLES = ("-", "--", ":", "-.")


def timeline_figure(
    timeline: Timeline, plain: Timeline | None = None, *, title: str = ""
) -> Figure:
    """The bytes over one step, stacked by owner.

    Args:
        timeline: the bytes over a step, `Report.timeline`.
        plain: the same step without remat; its total becomes a dashed line.
        title: what ran.

    Returns:
        A figure of matplotlib: `figure.savefig("step.svg")`.

    Raises:
        RematError: matplotlib is not installed.
    """
    for name, given in (("timeline", timeline), ("plain", plain)):
        if given is not None:
            wanted = "`Report.timeline`"
            require_type(f"timeline_figure({name})", given, Timeline, wanted=wanted)
    totals = [*timeline.total_bytes, *(() if plain is None else plain.total_bytes)]
    name, unit = unit_of(max(totals, default=0))
    words, second = timeline.axis
    figure, axes = _figure_and_axes(title, words, f"live bytes ({name})")
    times = [time_s / second for time_s in timeline.times_s]
    axes.stackplot(
        times,
        *([size / unit for size in row] for row in timeline.size_bytes),
        labels=timeline.groups,
        colors=_COLORS,
        hatch=_HATCHES,
        step="post",
        edgecolor="0.2",
        linewidth=0.5,
    )
    if plain is not None:
        steps = [time_s / second for time_s in plain.times_s]
        sizes = [size / unit for size in plain.total_bytes]
        look = {"where": "post", "color": "black", "linestyle": "--"}
        axes.step(steps, sizes, label="without remat", **look)
    if timeline.turn_s is not None:
        axes.axvline(timeline.turn_s / second, color="0.3", linestyle=":")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper")  # pyright: ignore[reportUnknownMemberType]
    return figure


def frontier_figure(
    points: Sequence[SavingPoint],
    others: Mapping[str, tuple[int, int]] | None = None,
    *,
    title: str = "",
) -> Figure:
    """Recomputed work against saved bytes.

    Args:
        points: what more could be saved, `Report.frontier`.
        others: single points (saved bytes, recomputed work), by what made them: policies,
            plans, peers.
        title: what was traced.

    Returns:
        A figure of matplotlib: `figure.savefig("step.svg")`.

    Raises:
        RematError: matplotlib is not installed.
    """
    for each in points:
        wanted = "the points of `Report.frontier`"
        require_type("frontier_figure(points)", each, SavingPoint, wanted=wanted)
    curve = [(point.saved_bytes, point.recompute_work / 1e9) for point in points]
    singles = {label: (size, n / 1e9) for label, (size, n) in (others or {}).items()}
    words = "saved bytes of the regions", "recomputed in one step (GFLOP)"
    line = {"marker": "o", "markersize": 3, "label": "the best value first"}
    figure, axes = _trade_off(title, words, curve, line, [(singles, "white")])
    axes.legend(loc="upper right")
    return figure


def comparison_figure(
    own: Mapping[str, tuple[int, float]],
    peers: Mapping[str, tuple[int, float]],
    *,
    spreads: Mapping[str, float] | None = None,
    title: str = "",
) -> Figure:
    """Seconds of a step against held bytes; a line joins what is fastest for its bytes.

    Args:
        own: (bytes, seconds), by policy.
        peers: likewise, by what another library calls it; drawn as filled markers.
        spreads: of the seconds, by policy; one that is faster by less than its own and the
            other's is not.
        title: what was measured.

    Returns:
        A figure of matplotlib: `figure.savefig("step.svg")`.

    Raises:
        RematError: matplotlib is not installed.
    """
    singles = [
        ({label: (size, s * 1e3) for label, (size, s) in points.items()}, face)
        for points, face in ((own, "white"), (peers, "0.4"))
    ]
    words = "held for the backward", "time of one step (ms)"
    line = {"linewidth": 1, "label": "the best for its bytes"}
    known = spreads or {}
    points = [(*point, known.get(name, 0.0)) for name, point in own.items()]
    best = [(size, time_s * 1e3) for size, time_s, _ in _fastest_for_bytes(points)]
    figure, axes = _trade_off(title, words, best, line, singles)
    axes.set_xlim(left=0)
    figure.legend(loc="outside right upper", fontsize="small")  # pyright: ignore[reportUnknownMemberType]
    return figure


_Timed = tuple[int, float, float]  # bytes, seconds, and the spread of these


def _fastest_for_bytes(points: Sequence[_Timed]) -> list[_Timed]:
    """The points of a figure that none beats in both size and time, the smallest first."""
    found: list[_Timed] = []
    for size, time_s, spread_s in sorted(points):
        if not found or time_s + spread_s < found[-1][1] - found[-1][2]:
            found.append((size, time_s, spread_s))
    return found


def batch_figure(
    curves: Mapping[str, Mapping[int, int]],
    limit_bytes: int | None = None,
    *,
    title: str = "",
) -> Figure:
    """Batch size against bytes, with the memory limit as a line.

    Args:
        curves: for each kind of step ("no remat"), its peak bytes by batch size.
        limit_bytes: what the device has.
        title: what was measured.

    Returns:
        A figure of matplotlib: `figure.savefig("step.svg")`.

    Raises:
        RematError: matplotlib is not installed.
    """
    wanted = "for each name, the peak bytes by batch size: {'no remat': {8: 2**20}}"
    require_type("batch_figure(curves)", curves, Mapping, wanted=wanted)
    for curve in curves.values():
        require_type("batch_figure(curves)", curve, Mapping, wanted=wanted)
    sizes = [size for curve in curves.values() for size in curve.values()]
    name, unit = unit_of(max([*sizes, limit_bytes or 0], default=0))
    y_words = f"peak bytes of one step ({name})"
    figure, axes = _figure_and_axes(title, "batch size (examples)", y_words)
    looks = map("".join, zip(itertools.cycle("osDv^"), itertools.cycle(_STYLES)))
    for (label, curve), look in zip(curves.items(), looks, strict=False):
        batches = sorted(curve)
        peaks = [curve[batch] / unit for batch in batches]
        axes.plot(batches, peaks, look, color="black", label=label)
    if limit_bytes is not None:
        axes.axhline(limit_bytes / unit, color="0.4", linewidth=2, label="limit")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    return figure


def _trade_off(
    title: str,
    words: tuple[str, str],
    curve: Sequence[tuple[int, float]],
    line: Mapping[str, Any],
    singles: Sequence[tuple[Mapping[str, tuple[int, float]], str]],
) -> tuple[Figure, Any]:
    """A figure of what fewer bytes cost: a curve, and single points filled with a color."""
    points = [point for several, _ in singles for point in several.values()]
    name, unit = unit_of(max((size for size, _ in [*curve, *points]), default=0))
    figure, axes = _figure_and_axes(title, f"{words[0]} ({name})", words[1])
    sizes, costs = [size / unit for size, _ in curve], [cost for _, cost in curve]
    axes.step(sizes, costs, where="post", color="black", **line)
    for several, face in singles:
        for place, (label, (size, cost)) in enumerate(several.items()):
            look = {"markerfacecolor": face, "markeredgecolor": "black", "label": label}
            marker = "osDv^P*X"[place % 8]
            axes.plot([size / unit], [cost], linestyle="none", marker=marker, **look)
    axes.set_ylim(bottom=0)
    return figure, axes


def _figure_and_axes(title: str, x_words: str, y_words: str) -> tuple[Figure, Any]:
    """A figure with one pair of axes, made without pyplot and its global state."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RematError.of(
            where="a figure",
            what="needs matplotlib, which is not installed.",
            why="It comes with the extra `cli`.",
            do="In a clone, run python -m pip install '.[cli]'.",
        )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes: Any = figure.add_subplot()  # pyright: ignore[reportUnknownMemberType]
    axes.set(title=title, xlabel=x_words, ylabel=y_words)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
