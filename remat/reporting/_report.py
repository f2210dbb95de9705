"""The report of a step: its figures, and the forms in which they are shown."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from remat._errors import require_type
from remat._torch import trees
from remat.reporting._measure.step import storage_sizes
from remat.reporting._records import Facts, to_json
from remat.reporting._show.figures import timeline_figure
from remat.reporting._show.html import html_report
from remat.reporting._show.text import Diff, diff, rich_report, text_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Report(Facts):
    """Where the bytes and the seconds of one step go; made by `report`.

    Bytes are those of storages that operators of the step made, each counted once.
    Arguments and parameters existed before, and are listed separately. Seconds are
    those inside operators, without Python and the watcher; they are None on the meta
    device, where nothing is computed. FLOPs are those of torch's formulas for matmuls,
    convolutions and attention.

    Attributes:
        function: the name of what ran.
        device: where most of the held bytes are, "cpu".
        held_bytes: what lives between forward and backward.
        elsewhere_bytes: what waits in host memory, on another device than the value's,
            or in files; not included in the held bytes and the peak.
        outside_bytes: the part of the held bytes that plain autograd holds, not a
            region.
        output_bytes: the part of the held bytes that lives only because it was
            returned.
        peak: the moment at which most lived, gradients included.
        allocator_peak_bytes: the same by the device's allocator, which rounds sizes up and
            sees buffers inside kernels; None on other devices.
        parameter_bytes: the leaves that are differentiated.
        argument_bytes: the other tensors among the arguments.
        gradient_bytes: the gradients of these leaves.
        optimizer_bytes: the optimizer's state; None unless `with_optimizer` added it.
        forward_flops: FLOPs of the forward.
        backward_flops: FLOPs of the backward, recomputation included.
        recompute_flops: FLOPs that regions ran again; None if unknown for some region:
            one with engine="rerun", or one that the function differentiates itself.
        forward_s: seconds in the operators of the forward.
        backward_s: seconds in those of the backward, recomputation included.
        recompute_s: seconds in those that ran again.
        regions: one row a region: one function under one policy, at all its signatures.
        values: the held values, equal ones of several calls folded, the largest first; the
            text shows ten of them.
        recomputed: the values that regions compute again, likewise.
        unmatched: (policy, glob) of names that match no value in any region.
        suggestion: one next step.
        frontier: the bytes and the recomputation as more and more values are saved.
        timeline: the bytes over the step, by owner.
    """

    def __str__(self) -> str:
        """The report as plain text, without colors."""
        return text_report(self)

    def __rich__(self) -> Any:
        """The report for a terminal, where rich is installed."""
        return rich_report(self)

    def to_json(self) -> str:
        """All figures as JSON; the schema's name is its first entry.

        Records become objects with the attributes as keys; sizes are in bytes, times in
        seconds; a dtype is its name, "bfloat16". Keys are only ever added under the name
        "remat.report/1".
        """
        return to_json("remat.report/1", self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as one page: drawings, tables that sort, and a search.

        The page needs no network and no other file.

        Args:
            path: the file, which is replaced if it exists.
        """
        Path(path).write_text(html_report(self), encoding="utf-8")

    def diff(self, other: Report) -> Diff:
        """The figures of this report beside those of a later one.

        Args:
            other: the report after a change.

        Returns:
            Rows of (figure, before, after), which print as a table.
        """
        require_type("report.diff(other)", other, Report, wanted="another report")
        return diff(self, other)

    def with_optimizer(self, optimizer: torch.optim.Optimizer) -> Report:
        """The report with the bytes of an optimizer's state.

        Args:
            optimizer: an optimizer; it has a state once it has taken a step.
        """
        where, kind = "report.with_optimizer(optimizer)", torch.optim.Optimizer
        require_type(where, optimizer, kind, wanted="the optimizer itself")
        state: dict[Any, Any] = dict(optimizer.state)
        sizes = storage_sizes(trees.tensor_leaves(list(map(dict, state.values()))))
        return dataclasses.replace(self, optimizer_bytes=sum(sizes.values()))

    def figure(self, plain: Report | None = None) -> Figure:
        """The bytes over the step, stacked by owner; matplotlib's, not yet saved.

        Args:
            plain: a report of the same step without remat, whose total is drawn as a
                line: made under `remat.disabled()`.

        Raises:
            RematError: matplotlib is not installed.
        """
        if plain is not None:
            wanted = "a report of the same step"
            require_type("report.figure(plain)", plain, Report, wanted=wanted)
        line = None if plain is None else plain.timeline
        return timeline_figure(self.timeline, line, title=self.function)
