"""`jax.checkpoint` on the same work with the same policies, where JAX is installed.

jit on the CPU, in a process of its own, which takes its steps in turn with the others and times
them itself. The interpreter is this one, or what the environment names in `JAX_PYTHON`: JAX and
torch need not share an environment.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from tests.benchmarks.timing import Elapsed, clock
from tests.benchmarks.work import Work, block, num_heads, summed

ROOT = Path(__file__).parents[2]
CHILD = ("-m", "tests.benchmarks.jax_child")
PLAIN, NAME = "jax", "jax.checkpoint, {}"
#: JAX's names for them, with what it makes one of.
POLICIES = {
    "nothing": ("nothing_saveable",),
    "matmuls": ("dots_saveable",),
    "names": ("save_only_these_names", "layer"),
    "everything": ("everything_saveable",),
}
_LOOK = "import importlib.util as u, sys; sys.exit(u.find_spec('jax') is None)"


def interpreter() -> str | None:
    """The one that has JAX; None if there is none."""
    found = os.environ.get("JAX_PYTHON", sys.executable)
    looked = subprocess.run([found, "-c", _LOOK], check=False)
    return found if looked.returncode == 0 else None


@dataclass(frozen=True)
class Task:
    """What JAX's process computes.

    Attributes:
        what: the number of heads of transformer blocks, or the name of a nested row.
        params: parameters by their names, of each block or layer.
        x: the batch.
        keeps: the names of the policies.
    """

    what: Mapping[str, Any]
    params: Sequence[Mapping[str, Tensor]]
    x: Tensor
    keeps: Sequence[str]

    def write(self, folder: Path) -> None:
        """What the process reads."""
        arrays: dict[str, Any] = {
            f"{k}.{name}": tensor.detach().numpy()
            for k, own in enumerate(self.params)
            for name, tensor in own.items()
        }
        np.savez(folder / "arrays.npz", **arrays, x=self.x.numpy())
        given = {
            **self.what,
            "names": list(self.params[0]),
            "layers": len(self.params),
            "policies": {NAME.format(keeps): POLICIES[keeps] for keeps in self.keeps},
            "clock": clock().__name__,
        }
        (folder / "given.json").write_text(json.dumps(given))


@dataclass(frozen=True)
class Answer:
    """What JAX's process has found.

    Attributes:
        values: what the step without `jax.checkpoint` gave, in the order of JAX's leaves.
        peaks: what each step needs, in bytes, by XLA's own analysis.
        steps: takes one, in the process.
    """

    values: Sequence[Tensor]
    peaks: Mapping[str, int]
    steps: Mapping[str, Callable[[], Elapsed]]


@contextlib.contextmanager
def admitted(
    steps: dict[str, Callable[[], Any]],
    peaks: dict[str, int],
    missing: dict[str, str],
    work: Work,
) -> Generator[None]:
    """Adds JAX's steps to a row of transformer blocks, or says why they are missing.

    A policy's line stands only where the memory analysis falls with it: XLA merges what is
    equal, and may undo the recomputation.
    """
    if work.unit is not block or work.loss is not summed:
        yield
        return
    heads = num_heads(work.x.shape[-1])
    keeps = ("nothing", "matmuls", "everything")
    task = Task({"heads": heads}, work.params, work.x, keeps)
    with answered(task) as answer:
        if answer is None:
            missing["jax.checkpoint"] = "not installed"
            yield
            return
        _check(answer, work)
        for name, size in answer.peaks.items():
            if name == PLAIN or size < answer.peaks[PLAIN]:
                steps[name], peaks[name] = answer.steps[name], size
            else:
                missing[name] = "its memory analysis does not fall"
        yield


@contextlib.contextmanager
def answered(task: Task) -> Generator[Answer | None]:
    """Runs a process with JAX for as long as this lasts; None where there is none."""
    python = interpreter()
    if python is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as name, _child(python, name, task) as child:
        peaks = json.loads(_line(child))
        values = np.load(Path(name) / "found.npz").values()
        steps = {each: functools.partial(_step, child, each) for each in peaks}
        yield Answer([*map(torch.from_numpy, values)], peaks, steps)


@contextlib.contextmanager
def _child(python: str, folder: str, task: Task) -> Generator[subprocess.Popen[str]]:
    task.write(Path(folder))
    threads = torch.get_num_threads()
    alone = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    flags = {"XLA_FLAGS": alone} if threads == 1 else {}
    with subprocess.Popen(
        [python, *CHILD, folder],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **flags, "JAX_PLATFORMS": "cpu"},
    ) as child:
        try:
            yield child
        finally:
            _pipe(child.stdin).close()  # which ends it


def _check(answer: Answer, work: Work) -> None:
    """That it computes the same gradients; its leaves are sorted by name."""
    grads: list[Tensor] = work.step(work.unit)
    names = [(k, name) for k, own in enumerate(work.params) for name in own]
    by_name = dict(zip(names, grads, strict=True))
    right = [by_name[each] for each in sorted(names)]
    torch.testing.assert_close(answer.values, right, rtol=1e-3, atol=1e-3)


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
