"""What a report of 24 layers costs, in steps of training: `python -m tests.benchmarks reports`."""

import statistics
import time
from collections.abc import Callable

import torch

from remat import policies, remat, report
from remat.reporting._demo.gpt import GPTShape, block, initial_parameters

LAYERS = 24
ROUNDS = 5
SHAPES = (
    GPTShape(layers=LAYERS, width=64, heads=2, time=64, batch=2),
    GPTShape(layers=LAYERS, width=128, heads=4, time=128, batch=4),
    GPTShape(layers=LAYERS, width=256, heads=8, time=256, batch=8),
)


def main(threads: int, shapes: tuple[GPTShape, ...] = SHAPES) -> None:
    """Prints the time of a report beside that of a step, with traces and without.

    A step is forward, backward and optimizer of the model with its regions. Traces are made
    at any first step, reported or not: what they take is printed apart, as the first step's
    time beyond a later one's.
    """
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {LAYERS} layers, {threads} thread(s)")
    heads = (
        "width",
        "time",
        "batch",
        "step",
        "report",
        "",
        "traces",
        "report, cold",
        "",
    )
    rows = [heads, *(_row(shape) for shape in shapes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells))


def _row(shape: GPTShape) -> tuple[str, ...]:
    layer = remat(block, policy=policies.save_only_these_names("attn"))
    groups = initial_parameters(shape, torch.Generator().manual_seed(0))
    given = [groups[f"block{k}"] for k in range(shape.layers)]
    leaves = [each.requires_grad_() for own in given for each in own.values()]
    x = torch.randn(shape.batch, shape.time, shape.width)
    optimizer = torch.optim.AdamW(leaves)

    def loss(given: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        for own in given:
            x = layer(own, x, None, shape.heads)
        return x.square().mean()

    def step() -> None:
        optimizer.zero_grad()
        loss(given, x).backward()
        optimizer.step()

    def first(run: Callable[[], object]) -> float:
        layer.cache_clear()
        return _seconds(run)

    runs: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        step()  # what was cleared is traced and written anew
        for name, seconds in {
            "step": lambda: _seconds(step),
            "report": lambda: _seconds(lambda: report(loss, given, x)),
            "first step": lambda: first(step),
            "first report": lambda: first(lambda: report(loss, given, x)),
        }.items():
            runs.setdefault(name, []).append(seconds())
    median = {name: statistics.median(times) for name, times in runs.items()}
    base, traces = median["step"], median["first step"] - median["step"]
    cold = median["first report"] - traces
    return (
        *map(str, (shape.width, shape.time, shape.batch)),
        f"{base * 1e3:.0f} ms",
        f"{median['report'] * 1e3:.0f} ms",
        f"{median['report'] / base:.2f} steps",
        f"{traces * 1e3:.0f} ms",
        f"{cold * 1e3:.0f} ms beyond them",
        f"{cold / base:.2f} steps",
    )


def _seconds(run: Callable[[], object]) -> float:
    """Processor seconds: on one thread they are the time, less what others take."""
    started = time.process_time()
    run()
    return time.process_time() - started
