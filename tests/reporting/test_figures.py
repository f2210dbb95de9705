"""Figures: what is on the axes, not pixels.

"bytes over the time of one step, coloured by region, with and without remat; the bytes-time
frontier with peers' points on it; batch size against bytes with the memory limit as a line.
SVG and PNG, readable in grey, axes with units."
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from remat import RematError, Report, disabled, remat, report
from remat.reporting import batch_figure, comparison_figure, frontier_figure
from tests.reporting.models import batch, block, loss_of, parameters


def measured(x: Tensor | None = None) -> Report:
    """The report of three layers under nothing_saveable."""
    return report(loss_of(remat(block)), parameters(3), batch() if x is None else x)


@pytest.fixture(scope="module")
def reports() -> tuple[Report, Report]:
    """With remat and without."""
    with disabled():
        plain = measured()
    return measured(), plain


def legend(figure: Any) -> list[str]:
    """The words of the legend, wherever it is."""
    legends = [*figure.legends, *[axes.get_legend() for axes in figure.axes]]
    return [text.get_text() for each in legends if each for text in each.get_texts()]


def test_timeline_stacks_the_bytes_of_each_owner(
    reports: tuple[Report, Report],
) -> None:
    """The top of the stack is the report's peak, the dashed line that of no remat."""
    found, plain = reports

    figure: Any = found.figure(plain)

    (axes,) = figure.axes
    tops = [patch.get_paths()[0].vertices[:, 1].max() for patch in axes.collections]
    assert max(tops) * 2**10 == pytest.approx(found.peak.size_bytes)
    line = axes.lines[0]
    assert max(line.get_ydata()) * 2**10 == pytest.approx(plain.peak.size_bytes)
    assert line.get_linestyle() == "--"
    assert axes.get_xlabel() == "time in operators (ms)"
    assert axes.get_ylabel() == "live bytes (KiB)"
    assert legend(figure) == [
        "block",
        "outside of regions",
        "gradients",
        "without remat",
    ]
    assert len({patch.get_hatch() for patch in axes.collections}) == 3


def test_timeline_on_the_meta_device_counts_events() -> None:
    """Where no time is known the axis says what it counts."""
    given = [{k: v.to("meta") for k, v in p.items()} for p in parameters(1)]

    figure = report(loss_of(remat(block)), given, batch(device="meta")).figure()

    assert figure.axes[0].get_xlabel() == "storages made and freed"


def test_frontier(reports: tuple[Report, Report]) -> None:
    """The curve is the report's frontier; each other point has a marker and a name."""
    points = reports[0].frontier

    figure: Any = frontier_figure(points, {"a peer": (2**20, 10**6)}, title="block")

    (axes,) = figure.axes
    curve, peer = axes.lines
    assert list(curve.get_xdata()) == [each.saved_bytes / 2**20 for each in points]
    assert list(curve.get_ydata()) == [each.recompute_work / 1e9 for each in points]
    assert (peer.get_xdata()[0], peer.get_ydata()[0]) == (1.0, 1e-3)
    assert axes.get_xlabel() == "saved bytes of the regions (MiB)"
    assert axes.get_ylabel() == "recomputed in one step (GFLOP)"
    assert legend(figure) == ["the best value first", "a peer"]


def test_batch_sizes() -> None:
    """Each curve in order of the batch size, in its own style; the limit is a line."""
    curves = {"no remat": {2: 3 * 2**20, 1: 2**20}, "remat": {1: 2**20, 2: 2**20}}

    figure: Any = batch_figure(curves, 2 * 2**20)

    (axes,) = figure.axes
    plain, region, limit = axes.lines
    assert list(plain.get_xdata()) == [1, 2]
    assert list(plain.get_ydata()) == [1.0, 3.0]
    assert list(limit.get_ydata()) == [2.0, 2.0]
    assert plain.get_linestyle() != region.get_linestyle()
    assert axes.get_xlabel() == "batch size (examples)"
    assert axes.get_ylabel() == "peak bytes of one step (MiB)"
    assert legend(figure) == ["no remat", "remat", "limit"]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_figures_are_saved(
    suffix: str, reports: tuple[Report, Report], tmp_path: Path
) -> None:
    """As SVG and as PNG."""
    path = tmp_path / f"step.{suffix}"

    reports[0].figure().savefig(path)

    start = path.read_bytes()[:200]
    assert (b"<?xml" in start) if suffix == "svg" else start.startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(
    reports: tuple[Report, Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(RematError, match=r"pip install '\.\[cli\]'"):
        reports[0].figure()


def test_comparison_joins_what_is_best_for_its_bytes() -> None:
    """The line leaves out a policy that another beats; peers are markers, filled."""
    own = {"least": (1024, 0.3), "worse": (3072, 0.4), "most": (4096, 0.1)}

    figure: Any = comparison_figure(own, {"peer": (2048, 0.5)})

    (axes,) = figure.axes
    line, *markers = axes.lines
    assert list(line.get_xdata()) == [1.0, 4.0]
    assert list(line.get_ydata()) == pytest.approx([300, 100])
    assert [each.get_label() for each in markers] == ["least", "worse", "most", "peer"]
    faces = {each.get_label(): each.get_markerfacecolor() for each in markers}
    assert faces["peer"] != faces["least"] == faces["most"]
    assert axes.get_xlabel() == "held for the backward (KiB)"
    assert axes.get_ylabel() == "time of one step (ms)"
    assert legend(figure)[0] == "the best for its bytes"
    assert axes.get_xlim()[0] == axes.get_ylim()[0] == 0


@pytest.mark.parametrize(("spread_s", "joined"), [(0.04, [1.0, 4.0]), (0.06, [1.0])])
def test_what_is_faster_by_less_than_the_spreads_is_not(
    spread_s: float, joined: list[float]
) -> None:
    """Such a policy only holds more."""
    own = {"less": (1024, 0.3), "more": (4096, 0.2)}

    figure: Any = comparison_figure(own, {}, spreads=dict.fromkeys(own, spread_s))

    assert list(figure.axes[0].lines[0].get_xdata()) == joined
