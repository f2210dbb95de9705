"""Curves of growth: `python -m tests.benchmarks growth`.

Bytes, step time and trace time of tiny blocks against layers, sequence, width, batch, and
bytes a rank against ranks. Ranks are simulated: the parts of the first of so many ranks, in a
process group that sends nothing, so that their bytes are measured and their times are not.
An exponent is the slope of a line through the logarithms; its tail, that of the last points.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from remat import policies, remat, storage
from tests.benchmarks import timing, work
from tests.benchmarks.memory import allocated
from tests.benchmarks.tables import heading
from tests.benchmarks.work import Unit, Work

TAIL = 3
ROUNDS = 7
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Point:
    """One size.

    Attributes:
        size: of the dimension that grows.
        held_bytes: what waits for the backward.
        peak_bytes: the most that a step had allocated.
        step_s: the median time of a step; None where it is not measured.
        trace_s: the time of all traces together; None without remat.
    """

    size: int
    held_bytes: int
    peak_bytes: int
    step_s: float | None = None
    trace_s: float | None = None


@dataclass(frozen=True)
class Axis:
    """A dimension, the sizes it has, and the work of each size."""

    name: str
    sizes: tuple[int, ...]
    make: Callable[[int], Work]


AXES = (
    Axis("layers", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), lambda n: _small(blocks=n)),
    Axis(
        "sequence",
        (128, 256, 512, 1024, 2048, 4096, 8192),
        lambda n: _small(batch=1, sequence=n),
    ),
    Axis("width", (32, 64, 128, 256, 512, 1024), lambda n: _small(width=n)),
    Axis("batch", (1, 2, 4, 8, 16, 32, 64, 128), lambda n: _small(batch=n)),
)


def _small(
    blocks: int = 2, batch: int = 2, sequence: int = 64, width: int = 32
) -> Work:
    return work.blocks(blocks, batch, sequence, width)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the least-squares line through the logarithms."""
    slope, _ = np.polyfit(np.log(sizes), np.log(values), 1)
    return float(slope)


def point(size: int, made: Work, unit: Any, times: Sequence[float]) -> Point:
    """One contender at one size: its bytes, beside the seconds that its steps took."""
    traces = unit.cache_info().trace_s if hasattr(unit, "cache_info") else ()
    return Point(
        size,
        _held(made, unit),
        allocated(lambda: made.step(unit)).peak,
        statistics.median(times),
        sum(traces) or None,
    )


def _held(made: Work, unit: Any) -> int:
    """What waits for the backward, and with it the batch where it is held."""
    return allocated(lambda: made.loss(unit, made.params, made.x.clone())).left


def curves(axis: Axis) -> dict[str, list[Point]]:
    """The points of each contender along one axis."""
    found: dict[str, list[Point]] = {}
    for size in axis.sizes:
        made = axis.make(size)
        units = _contenders(made.unit)
        steps = {name: partial(made.step, unit) for name, unit in units.items()}
        times = timing.interleaved(steps, ROUNDS, clock=timing.clock())
        for name, unit in units.items():
            each = point(size, made, unit, times[name])
            found.setdefault(name, []).append(each)
    return found


def _contenders(unit: Unit) -> dict[str, Any]:
    regions = {
        "remat, nothing": remat(unit),
        "remat, matmuls": remat(unit, policy=policies.save_matmul_outputs),
    }
    for region in regions.values():
        region.cache_clear()  # the traces of one size, not of all before it
    return {"no remat": unit, **regions}


def whole(sizes: Sequence[int]) -> list[Point]:
    """All layers as one region: how its one trace grows."""
    return [_whole(size) for size in sizes]


def _whole(size: int) -> Point:
    made = _small(blocks=size)
    region = remat(lambda params, x: work.summed(work.block, params, x))

    def run() -> Tensor:
        return region(made.params, made.x.clone())

    started = time.perf_counter()
    run().backward()
    first_s = time.perf_counter() - started
    held, peak = allocated(run).left, allocated(lambda: run().backward()).peak
    return Point(size, held, peak, first_s, sum(region.cache_info().trace_s))


def shards(sizes: Sequence[int] = RANKS) -> list[Point]:
    """What one of so many ranks holds of the inputs of 8 layers; no step, no times."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found: list[Point] = []
    made = _small(blocks=8, batch=8, sequence=1024)
    for size in sizes:
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]
            how = storage.Shard(mesh, replicated="trust")
            region: Any = remat(work.block, saved_inputs={"x": how})
            with_region = lambda each=region: made.forward(each)  # noqa: E731
            with_region()
            seen = allocated(with_region)
        finally:
            dist.destroy_process_group()
        found.append(Point(size, seen.left, seen.peak))
    return found


QUANTITIES = {
    "held MiB": lambda p: p.held_bytes / 2**20,
    "peak MiB": lambda p: p.peak_bytes / 2**20,
    "step ms": lambda p: p.step_s and p.step_s * 1e3,
    "trace s": lambda p: p.trace_s,
}


def table(
    points: dict[str, list[Point]], shown: Sequence[str] = tuple(QUANTITIES)
) -> str:
    """One line a contender and quantity, the fitted exponents at its end."""
    sizes = [p.size for p in next(iter(points.values()))]
    lines = [
        f"| | {' | '.join(map(str, sizes))} | exponent | its tail |",
        f"|---|{'--:|' * (len(sizes) + 2)}",
    ]
    for name, each in points.items():
        for quantity in shown:
            values = [QUANTITIES[quantity](p) for p in each]
            if None not in values:
                slopes = (
                    exponent(sizes, values),
                    exponent(sizes[-TAIL:], values[-TAIL:]),
                )
                cells = [f"{v:.4g}" for v in values] + [f"{s:.2f}" for s in slopes]
                lines.append(f"| {name}, {quantity} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(threads: int) -> None:
    """Prints every curve."""
    torch.set_num_threads(threads)
    print(heading())
    for axis in AXES:
        print(f"### Against {axis.name}: {axis.make(axis.sizes[0]).title} and up\n")
        print(table(curves(axis)), flush=True)
    print("### Against layers that are one region\n")
    points = {"remat, nothing": whole((1, 2, 4, 8, 16, 32))}
    print(table(points, ("held MiB", "peak MiB", "trace s")), flush=True)
    print("### Against ranks: 8 blocks, sequence 1024, batch 8, their inputs sharded\n")
    print(table({"one rank": shards()}, ("held MiB",)))
