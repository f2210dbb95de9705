"""Every order in time: `python -m tests.benchmarks orders`, or the names of some nests.

The stack of `tests/laws/nests.py` with layers of 64 x 64, on 2,048 rows under each nest of
transforms and on 256 under `grad`. A line has a policy's time over plain torch's, paired by
round. Where a policy recomputes, its limit is what plain torch takes and, by themselves, the
operators that the nest runs beyond plain torch's.
"""

import collections
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from remat import remat
from tests.benchmarks.contenders import PLAIN, POLICIES
from tests.benchmarks.tables import heading
from tests.benchmarks.timing import Pace, clock, interleaved, paired, summed
from tests.laws.derivatives import TORCH
from tests.laws.nests import NESTS, functions
from tests.support import ALIASING

KEPT = ("nothing", "matmuls", "everything")
#: The nests, and how many rows a batch has.
ROWS = {
    "grad": 256,
    "grad(grad)": 2048,
    "grad(grad(grad))": 2048,
    "grad(vmap(grad))": 2048,
    "vmap(hessian)": 2048,
    "grad(laplacian)": 2048,
    "grad(jvp(jvp))": 2048,
    "jvp(grad)": 2048,
}


@dataclass(frozen=True)
class _Shape:
    """A tensor argument of an operator."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Recorder(TorchDispatchMode):
    """Counts operators by what they are called with, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[Any] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(func.overloadpacket) not in ALIASING:
            leaves, spec = tree_flatten((args, kwargs))
            described = tuple(
                _Shape(tuple(each.shape), each.stride(), each.dtype)
                if isinstance(each, Tensor)
                else each
                for each in leaves
            )
            self.calls[func, described, spec] += 1
        return func(*args, **kwargs)


def recorded(step: Callable[[], object]) -> collections.Counter[Any]:
    """The operators that a step runs."""
    with _Recorder() as recorder:
        step()
    return recorder.calls


def alone(calls: collections.Counter[Any]) -> Callable[[], None]:
    """Runs operators by themselves, on numbers like those that they were called with."""
    runs = [
        (func, *tree_unflatten([_like(each) for each in leaves], spec), count)
        for (func, leaves, spec), count in calls.items()
    ]

    def run() -> None:
        for func, args, kwargs, count in runs:
            for _ in range(count):
                func(*args, **kwargs)

    return run


def _like(leaf: Any) -> Any:
    if not isinstance(leaf, _Shape):
        return leaf
    # A dimension that repeats one element has the stride 0.
    pairs = zip(leaf.sizes, leaf.strides, strict=True)
    once = [size if stride else 1 for size, stride in pairs]
    made = torch.empty_strided(once, leaf.strides, dtype=leaf.dtype)
    made = made.normal_() if made.is_floating_point() else made.zero_()
    return made.expand(leaf.sizes)


def measured(nest: str, rows: int, quick: bool) -> str:
    """The lines of one nest."""
    width = 4 if quick else 64
    torch.manual_seed(0)
    layers = ([(width, width)] * 4, [(width,)] * 4)
    params = tuple([torch.randn(each) * width**-0.5 for each in own] for own in layers)
    x, plain = torch.randn(rows, width), functions(TORCH)["stack"]
    units = {f"remat, {k}": remat(plain, policy=POLICIES[k]) for k in KEPT}
    steps: dict[str, Callable[[], Any]] = {
        name: lambda unit=unit: NESTS[nest](TORCH, unit, params, x)
        for name, unit in {PLAIN: plain, **units}.items()
    }
    for step in steps.values():
        for _ in range(3):
            step()
    own = recorded(steps[PLAIN])
    again = {
        f"{name}, what it adds": alone(recorded(step) - own)
        for name, step in steps.items()
        if name not in (PLAIN, "remat, everything")
    }
    steps |= again
    pace = Pace.quick() if quick else Pace.of(steps)
    times = interleaved(steps, pace.rounds, pace.turns, pace.lead, clock())
    for name in again:
        limit = summed(times[PLAIN], times.pop(name))
        times[name.removesuffix("what it adds") + "its limit"] = limit
    over = paired(times, times[PLAIN])
    lines = []
    for name, ratio in over.items():
        limit = times.get(f"{name}, its limit")
        of_limit = paired({name: times[name]}, limit)[name] if limit else None
        shown = f"{of_limit.median:.3f}" if of_limit else ""
        lines.append(
            f"| {nest}, {rows:,} rows | {name} | {ratio.time_s * 1e3:.2f} | "
            f"{ratio.median:.3f} | {ratio.low:.3f} to {ratio.high:.3f} | {shown} |"
        )
    return "\n".join(lines)


def main(threads: int, names: Collection[str] = (), quick: bool = False) -> None:
    """Prints one table."""
    torch.set_num_threads(threads)
    print(heading())
    print("| nest | | ms | over no remat | quartiles | over its limit |")
    print("|---|---|--:|--:|---|--:|")
    for nest, rows in ROWS.items():
        if not names or nest in names:
            print(measured(nest, 8 if quick else rows, quick), flush=True)
