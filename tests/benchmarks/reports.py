"""What a report of 24 layers costs, in steps of training: `python -m tests.benchmarks reports`."""

import statistics
import time
from collections.abc import Callable

import torch

from remat import policies, remat, report
from remat.reporting._gpt import (
    GPTShape,
    block_without_dropout,
    initial_parameters,
)

LAYERS = 24
ROUNDS = 3
SHAPE = GPTShape(layers=LAYERS, width=256, heads=8, time=256, batch=8)


def main(threads: int, shape: GPTShape = SHAPE) -> None:
    """Prints the time of a report beside that of a step, with traces and without."""
    torch.set_num_threads(threads)
    layer = remat(block_without_dropout, policy=policies.save_only_these_names("attn"))
    groups = initial_parameters(shape, torch.Generator().manual_seed(0))
    given = [groups[f"block{k}"] for k in range(shape.layers)]
    leaves = [each.requires_grad_() for own in given for each in own.values()]
    x = torch.randn(shape.batch, shape.time, shape.width)

    def loss(given: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        for own in given:
            x = layer(own, x, shape.heads)
        return x.square().mean()

    def step() -> None:
        torch.autograd.grad(loss(given, x), leaves)

    cold = _seconds(lambda: report(loss, given, x))
    steps, reports = [], []
    for _ in range(ROUNDS):
        steps.append(_seconds(step))
        reports.append(_seconds(lambda: report(loss, given, x)))
    base, warm = statistics.median(steps), statistics.median(reports)
    print(f"torch {torch.__version__}, {shape}, {threads} thread(s)")
    print(f"one step                     {base:.2f} s")
    print(f"a report                     {warm:.2f} s, {warm / base:.2f} steps")
    print(f"the first, with its traces   {cold:.2f} s, {cold / base:.2f} steps")


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
