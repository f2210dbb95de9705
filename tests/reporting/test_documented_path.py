"""The path of docs/reports.md: its commands find the line to change, and the change helps.

"A test runs the documented path on a block that exceeds a memory cap of 256 MiB: the docs'
commands find the line to change, and the changed block passes."
"""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remat.__main__ import main
from remat.reporting._arguments import keywords, load_target
from tests.support import LiveBytes

pytestmark = pytest.mark.contract

PAGE = (Path(__file__).parents[2] / "docs" / "reports.md").read_text()
CAP = 256 * 2**20
MODEL, CHANGE = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)[:2]
COMMAND = re.findall(r"^python -m remat (report .*)$", PAGE, re.M)[0]


def peak_bytes(loss: Callable[..., Tensor], given: dict[str, Any]) -> int:
    """The most that lives at one time in one real step, arguments apart."""
    leaves = [*given["params"].values(), given["x"]]
    for each in leaves:
        each.requires_grad_()
    torch.autograd.grad(loss(**given), leaves)  # traces
    with LiveBytes() as live:
        torch.autograd.grad(loss(**given), leaves)
    return live.peak


def edit(path: Path, text: str) -> None:
    """Changes a file of Python, which the next command, a process of its own, runs anew."""
    path.write_text(text)
    for name, module in [*sys.modules.items()]:
        if getattr(module, "__file__", None) == str(path.resolve()):
            del sys.modules[name]


def test_the_documented_path(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Too much before, the line named by the command, less than the cap after."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    words = shlex.split(COMMAND)
    shapes = [word for word in words if "=" in word]
    assert peak_bytes(load_target("model.py:loss"), keywords(shapes, "cpu")) > CAP

    assert main(words) == 0
    told = re.search(
        r"made at model\.py:(\d+): put the function", capsys.readouterr().out
    )

    assert told is not None
    source = MODEL.splitlines()
    line = source[int(told[1]) - 1]
    assert line in MODEL[MODEL.index("def block") : MODEL.index("def loss")]
    edit(path, MODEL + CHANGE)
    assert peak_bytes(load_target("model.py:loss"), keywords(shapes, "cpu")) < CAP


def test_the_page_shows_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line of the shown text is a line of what is printed; so is the peak after."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (shown,) = re.findall(r"^```text\n(loss on.*?)^```", PAGE, re.M | re.S)
    (after,) = re.findall(r"finds a peak of ([\d.]+ MiB)", PAGE)

    assert main(shlex.split(COMMAND)) == 0
    printed = capsys.readouterr().out.splitlines()
    edit(tmp_path / "model.py", MODEL + CHANGE)
    assert main(shlex.split(COMMAND)) == 0

    assert [line for line in shown.splitlines() if line not in ["...", *printed]] == []
    assert f"peak    {after} " in capsys.readouterr().out
