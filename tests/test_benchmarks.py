"""The benchmarks' own arithmetic; their figures are no tests."""

import pytest
import torch

from remat.reporting._gpt import GPTShape
from tests.benchmarks import random as draws, reports, timing

pytestmark = pytest.mark.contract


def test_ratios_are_paired_by_round():
    """A slow round slows both, and drops out of their ratio."""
    found = timing.paired({"twice": [2.0, 20.0, 4.0]}, base=[1.0, 10.0, 2.0])

    assert found == {"twice": timing.Ratio(4.0, 2.0, 2.0, 2.0)}


def test_steps_are_interleaved():
    """In each round every step has its turn, of which the first run is not counted."""
    ran = []
    steps = {name: lambda name=name: ran.append(name) for name in "ab"}

    times = timing.interleaved(steps, rounds=2, burst=2)

    assert "".join(ran[-12:]) == "aaabbb" * 2
    assert {name: len(each) for name, each in times.items()} == {"a": 2, "b": 2}


def test_a_table_shows_medians_and_quartiles():
    """One line a contender."""
    shown = timing.table("T", "no remat", {"x": timing.Ratio(0.0015, 1.0, 1.25, 1.5)})

    assert shown.splitlines()[-1] == "| x | 1.50 | 1.25 | 1.00 to 1.50 |"


def test_keyed_draws_are_measured_beside_torchs_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """One table for each of torch's functions, whose own row comes first."""
    monkeypatch.setattr(draws, "COUNT", 1 << 10)
    monkeypatch.setattr(draws, "ROUNDS", 2)

    draws.main(threads=1)

    printed = capsys.readouterr().out
    assert printed.startswith(f"torch {torch.__version__}, 1024 numbers, 1 thread")
    for name in ("torch.rand", "torch.randn", "F.dropout"):
        assert f"Beside `{name}`" in printed
        assert f"| {name} |" in printed


def test_reports_are_measured_beside_steps(capsys: pytest.CaptureFixture[str]):
    """Three lines: a step, a report, and the first one, which traces."""
    shape = GPTShape(layers=2, width=16, heads=2, time=4, batch=1)

    reports.main(1, shape)

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "one step",
        "a report",
        "the first, with its traces",
    ]
