"""Runs checks in real processes: a world of ranks over gloo, with a limit of time.

`python -m tests.storage.worlds RANK SIZE FOLDER MODULE ...` is one rank: it runs each function
`check_*` of the modules, in order, and writes down how it ended. `run` starts all ranks, waits
for them, and leaves none behind.
"""

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).parent.parent.parent


def checks_in(modules: Iterable[Any]) -> dict[str, Callable[[Any], None]]:
    """The checks of modules, in the order in which they stand."""
    return {
        name: thing
        for module in modules
        for name, thing in vars(module).items()
        if name.startswith("check_")
    }


def run(
    modules: Sequence[Any], size: int, folder: Path, limit_s: float
) -> dict[str, list[str]]:
    """How each check ended on each rank: "" or a traceback."""
    names = [module.__name__ for module in modules]
    ranks = [_start(names, rank, size, folder) for rank in range(size)]
    try:
        _wait(ranks, time.monotonic() + limit_s)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = [_outcome(folder, rank) for rank in range(size)]
    return {
        name: [outcome.get(name, "did not end") for outcome in found]
        for name in checks_in(modules)
    }


def _start(
    names: list[str], rank: int, size: int, folder: Path
) -> subprocess.Popen[bytes]:
    here = "tests.storage.worlds"
    command = [sys.executable, "-m", here, str(rank), str(size), str(folder), *names]
    with (folder / f"output_{rank}").open("w") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=output,
            stderr=output,
        )


def _wait(ranks: Iterable[subprocess.Popen[bytes]], deadline: float) -> None:
    for rank in ranks:
        try:
            rank.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return


def _outcome(folder: Path, rank: int) -> dict[str, str]:
    """What a rank wrote down; where it stopped, the end of what it printed."""
    lines = folder / f"outcome_{rank}"
    found = dict(map(json.loads, lines.read_text().splitlines()))
    if "started" in found and found["started"] not in found:
        found[found["started"]] = (folder / f"output_{rank}").read_text()[-4000:]
    return found


def main(rank: int, size: int, folder: Path, names: Sequence[str]) -> None:
    """One rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # torch's own, when it first needs forward mode.
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    checks = checks_in(map(importlib.import_module, names))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]
    with (folder / f"outcome_{rank}").open("w", buffering=1) as outcome:
        for name, check in checks.items():
            print(json.dumps(["started", name]), file=outcome)
            print(json.dumps([name, _ended(check, mesh)]), file=outcome)
    dist.destroy_process_group()


def _ended(check: Callable[[Any], None], mesh: Any) -> str:
    torch.manual_seed(0)
    try:
        check(mesh)
    except BaseException:  # noqa: BLE001  the parent raises it
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
