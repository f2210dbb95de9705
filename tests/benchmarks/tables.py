"""What was measured, as JSON and as Markdown."""

import dataclasses
import os
import platform
from typing import Any

import torch

from tests.benchmarks.suite import Line, Result
from tests.benchmarks.timing import Ratio

TRANSFORMS = {
    "backward": "`.backward()`",
    "grad": "`torch.func.grad`",
    "per example": "`vmap(grad)`",
    "hvp": "`jvp(grad)`",
}


def device() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "device": "cpu",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "processor" if torch.get_num_threads() == 1 else "wall",
        "torch": torch.__version__,
        "gpu": "not measured",
    }


def as_json(results: list[Result]) -> dict[str, Any]:
    """Everything, in plain types; times in seconds, sizes in bytes."""
    return {
        "schema": 1,
        "measured_on": device(),
        "failed": [str(v.bound) for r in results for v in r.verdicts if v.fails],
        "rows": [dataclasses.asdict(result) for result in results],
    }


def heading() -> str:
    """One line on the device and what is not measured."""
    found = device()
    return (
        f"torch {found['torch']}, CPU ({found['machine']}), {found['cores']} cores, "
        f"{found['threads']} thread(s), {found['clock']} seconds. GPU rows: not measured.\n"
    )


def markdown(result: Result) -> str:
    """The two tables of a row: its contenders, and its bounds."""
    lines = [
        f"### {result.name}\n",
        f"{result.title}; {TRANSFORMS[result.transform]}; {result.rounds} rounds.\n",
        "| | ms | over no remat | spread | over its limit | held MiB | peak MiB | working MiB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *map(_line, result.lines),
        "\n| bound | measured | spread | |",
        "|---|--:|--:|---|",
    ]
    lines += [
        f"| {each.bound} | {each.ratio:.3f} | {each.spread:.1%} | {each.standing} |"
        for each in result.verdicts
    ]
    return "\n".join(lines) + "\n"


def _line(line: Line) -> str:
    if line.missing:
        return f"| {line.name} | {line.missing} | | | | | | |"
    cells = [line.name, *_time(line.time), _median(line.of_limit)]
    working = None
    if line.held_bytes is not None and line.peak_bytes is not None:
        working = line.peak_bytes - line.held_bytes
    cells += map(_mebibytes, (line.held_bytes, line.peak_bytes, working))
    return f"| {' | '.join(cells)} |"


def _time(ratio: Ratio | None) -> tuple[str, str, str]:
    if ratio is None:
        return ("", "", "")
    return (f"{ratio.time_s * 1e3:.2f}", f"{ratio.median:.3f}", f"{ratio.spread:.1%}")


def _median(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.median:.3f}"


def _mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.3f}"


def conclusion(results: list[Result]) -> str:
    """How many bounds are met, and which are not."""
    judged = [(r.name, v) for r in results for v in r.verdicts]
    failed = [(name, v) for name, v in judged if v.fails]
    lines = [f"{len(judged) - len(failed)} of {len(judged)} bounds hold."]
    lines += [
        f"- {v.standing}, {name}: {v.bound}; measured {v.ratio:.3f}, "
        f"spread {v.spread:.1%}"
        for name, v in failed
    ]
    return "\n".join(lines) + "\n"
