"""`jax.checkpoint` on the same block with the same policies, where JAX is installed.

jit on the CPU, in a process of its own, which takes its steps in turn with the others and times
them itself. The interpreter is this one, or what the environment names in `JAX_PYTHON`: JAX and
torch need not share an environment. A policy's line stands only where JAX's own memory analysis
falls with it: XLA merges what is equal, and may undo the recomputation.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from tests.benchmarks.timing import Elapsed, clock
from tests.benchmarks.work import Work, block, num_heads, summed

CHILD = Path(__file__).with_name("jax_child.py")
PLAIN, NAME = "jax", "jax.checkpoint, {}"
POLICIES = {
    "nothing": "nothing_saveable",
    "matmuls": "dots_saveable",
    "everything": "everything_saveable",
}
_LOOK = "import importlib.util as u, sys; sys.exit(u.find_spec('jax') is None)"


def interpreter() -> str | None:
    """The one that has JAX; None if there is none."""
    found = os.environ.get("JAX_PYTHON", sys.executable)
    looked = subprocess.run([found, "-c", _LOOK], check=False)
    return found if looked.returncode == 0 else None


@contextlib.contextmanager
def admitted(
    steps: dict[str, Callable[[], Any]],
    peaks: dict[str, int],
    missing: dict[str, str],
    work: Work,
) -> Generator[None]:
    """Adds JAX's steps to a row of transformer blocks, or says why they are missing."""
    if work.unit is not block or work.loss is not summed:
        yield
        return
    python = interpreter()
    if python is None:
        missing["jax.checkpoint"] = "not installed"
        yield
        return
    with tempfile.TemporaryDirectory() as folder, _child(python, folder, work) as child:
        sizes = json.loads(_line(child))
        _check(Path(folder), work)
        for name, size in sizes.items():
            if name == PLAIN or size < sizes[PLAIN]:
                steps[name] = lambda name=name: _step(child, name)
                peaks[name] = size
            else:
                missing[name] = "its memory analysis does not fall"
        yield


@contextlib.contextmanager
def _child(python: str, folder: str, work: Work) -> Generator[subprocess.Popen[str]]:
    _hand_over(Path(folder), work)
    threads = torch.get_num_threads()
    alone = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    flags = {"XLA_FLAGS": alone} if threads == 1 else {}
    with subprocess.Popen(
        [python, "-P", str(CHILD), folder],  # beside it lies a `random`
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **flags, "JAX_PLATFORMS": "cpu"},
    ) as child:
        try:
            yield child
        finally:
            _pipe(child.stdin).close()  # which ends it


def _hand_over(folder: Path, work: Work) -> None:
    arrays: dict[str, Any] = {
        f"{k}.{name}": tensor.detach().numpy()
        for k, own in enumerate(work.params)
        for name, tensor in own.items()
    }
    arrays["x"] = work.x.numpy()
    np.savez(folder / "arrays.npz", **arrays)
    given = {
        "names": list(work.params[0]),
        "layers": len(work.params),
        "heads": num_heads(work.x.shape[-1]),
        "policies": {NAME.format(keeps): name for keeps, name in POLICIES.items()},
        "clock": clock().__name__,
    }
    (folder / "given.json").write_text(json.dumps(given))


def _check(folder: Path, work: Work) -> None:
    """That it computes the same gradients; its leaves are sorted by name."""
    found = [torch.from_numpy(each) for each in np.load(folder / "grads.npz").values()]
    grads: list[Tensor] = work.step(work.unit)
    names = [(k, name) for k, own in enumerate(work.params) for name in own]
    by_name = dict(zip(names, grads, strict=True))
    right = [by_name[each] for each in sorted(names)]
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)


def _step(child: subprocess.Popen[str], name: str) -> Elapsed:
    pipe = _pipe(child.stdin)
    pipe.write(f"{name}\n")
    pipe.flush()
    return Elapsed(float(_line(child)))


def _line(child: subprocess.Popen[str]) -> str:
    line = _pipe(child.stdout).readline()
    if not line:
        raise RuntimeError(f"JAX's process ended with {child.wait()}")
    return line


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
