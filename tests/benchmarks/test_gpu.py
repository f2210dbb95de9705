"""The rows of an accelerator, at sizes of no interest: what would run, and that it runs."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from tests.benchmarks import __main__ as command, gpu, gpu_fit
from tests.benchmarks.contenders import contenders

TINY = gpu.Size(32, 16, layers=3, dtype=torch.float32, kernel=SDPBackend.MATH)


def cells(line: str) -> list[str]:
    return [each.strip() for each in line.strip("|").split("|")]


def test_a_dry_run_tells_what_would_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes, and of each policy the bytes, what is repeated, and both programs."""
    monkeypatch.setattr(gpu, "GIB", 1)  # the sizes are printed in bytes

    assert gpu.main(1, dry_run=True, quick=True, sizes=(TINY,)) == 0

    head, *_ = printed = capsys.readouterr().out.splitlines()
    assert "a dry run: no accelerator was used, and nothing was measured" in head
    assert "all figures of torch.utils.checkpoint" in head
    assert any("3 blocks of width 32, sequence 16, batch 2" in line for line in printed)
    rows = {cells(line)[0]: cells(line)[1:] for line in printed if "remat" in line}
    assert rows["no remat"][3:] == ["0.0%", "", ""]
    repeated = [float(each[3].rstrip("%")) for name, each in rows.items() if name[0] == "r"]  # fmt: skip
    assert len(repeated) == 4
    assert repeated == sorted(repeated, reverse=True)
    # Inputs of 3 blocks but for the batch, each 2 * 16 vectors of 32 numbers, and the loss.
    assert float(rows["remat, nothing"][0]) == 2 * (2 * 16 * 32) * 4 + 4


def test_the_kernel_of_an_accelerator_is_in_the_programs() -> None:
    """Although tensors without data would be given another one."""
    made = TINY.made(torch.device("meta"), 2)
    (own,) = (each for each in contenders(True) if each.name == "remat, everything")

    unit: Any = own.wrap(gpu._unit_with_kernel)
    forward, _ = unit.programs(made.params[0], made.x)

    ops = {str(value.op) for value in forward.graph.values}
    assert "aten._scaled_dot_product_flash_attention.default" in ops


def test_the_command_passes_on_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only to what asks for it."""
    told: list[dict[str, bool]] = []
    monkeypatch.setattr(gpu, "main", lambda _, **options: told.append(options))

    assert command.main(["gpu", "--dry-run"]) == 0

    assert told == [{"dry_run": True, "quick": False}]


@pytest.mark.standin
@pytest.mark.filterwarnings("ignore::remat.RematWarning")  # many sizes, many traces
def test_an_accelerator_is_measured() -> None:
    """Each contender has its line; the more is kept, the fewer examples fit."""
    device = torch.device("standin", 0)
    rivals = contenders(quick=True, attends=True)

    lines = list(gpu.measured(TINY, device, rivals, rounds=2, memory_bytes=2**20))

    found = {cells(line)[0]: cells(line)[1:] for line in lines}
    assert found.keys() == {each.name for each in rivals}
    kept = ("nothing", "matmuls", "everything")
    batches = [int(found[f"remat, {name}"][-1]) for name in kept]
    assert batches == sorted(batches, reverse=True)
    assert 0 < batches[-1] < batches[0]


@pytest.mark.standin
def test_planned_steps_are_measured_there() -> None:
    """A step for each limit, or the smallest peak that can be kept."""
    device = torch.device("standin", 0)

    lines = list(
        gpu_fit.rows_of(lambda: gpu_fit.convolutions(8, 2, 8), device, (0.9, 0.01))
    )

    plain, planned, refused = map(cells, lines)
    assert plain[0] == "convolutions 8 x 2, no regions"
    assert planned[0].startswith("convolutions 8 x 2, ")
    assert "%" in planned[3]
    assert refused[1].startswith("refused: at least ")
