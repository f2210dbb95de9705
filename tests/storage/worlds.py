"""Runs checks in real processes: a world of ranks over gloo, with a limit of time.

`python -m tests.storage.worlds SIZE FOLDER MODULE ...` is one world: each rank of it runs each
function `check_*` of the modules, in order, and writes down how it ended. `run` starts it,
waits for it, and leaves no rank behind.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.probe import forget_retraces

ROOT = Path(__file__).parent.parent.parent

Checks = dict[str, Callable[[Any], None]]


def checks_in(modules: Iterable[Any]) -> Checks:
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
    here, names = "tests.storage.worlds", [module.__name__ for module in modules]
    run_group(["-m", here, str(size), str(folder), *names], limit_s)
    found = [_outcome(folder, rank) for rank in range(size)]
    return {
        name: [outcome.get(name, "did not end") for outcome in found]
        for name in checks_in(modules)
    }


def run_group(arguments: Sequence[str], limit_s: float, **environment: str) -> int:
    """Runs Python with these arguments, and ends it and all that it has started.

    Returns:
        Its exit code; negative if the limit has ended it.
    """
    common = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    first = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **common, **environment},
        start_new_session=True,
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            first.wait(limit_s)
    finally:
        # Whoever is left: the group is named like the first of it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
    return first.wait()


def _outcome(folder: Path, rank: int) -> dict[str, str]:
    """What a rank wrote down; where it stopped, the end of what it printed."""
    lines = folder / f"outcome_{rank}"
    found = dict(map(json.loads, lines.read_text().splitlines()))
    if "started" in found and found["started"] not in found:
        found[found["started"]] = (folder / f"output_{rank}").read_text()[-4000:]
    return found


def main(size: int, folder: Path, names: Sequence[str]) -> None:
    """A world: imports everything once, splits into its ranks, and waits for them."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # torch's own, when it first needs forward mode.
    warnings.filterwarnings("ignore", "`torch.jit.script`")
    checks = checks_in(map(importlib.import_module, names))
    gc.freeze()  # or each rank's collections would look through what was imported, and copy it
    ranks = [_split(rank, size, folder, checks) for rank in range(size)]
    for rank in ranks:
        os.waitpid(rank, 0)


def _split(rank: int, size: int, folder: Path, checks: Checks) -> int:
    """Starts a rank; in it, does not return."""
    process = os.fork()
    if process:
        return process
    with (folder / f"output_{rank}").open("w") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    try:
        _rank(rank, size, folder, checks)
    except BaseException:  # noqa: BLE001  it ends here, and says why
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)


def _rank(rank: int, size: int, folder: Path, checks: Checks) -> None:
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
    forget_retraces()
    try:
        check(mesh)
    except BaseException:  # noqa: BLE001  the parent raises it
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
