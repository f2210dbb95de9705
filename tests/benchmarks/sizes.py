"""What a trace with open sizes costs: `python -m tests.benchmarks sizes`.

One transformer block in a sweep of lengths, forward and backward. In CPU seconds of this
process, which other work on the machine moves less than the clock.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from remat import remat
from tests.benchmarks.work import block, block_parameters

WIDTH, BATCH = 64, 2
LENGTHS = range(16, 36)


def sweep(call: Callable[[Tensor], Tensor]) -> list[float]:
    """Seconds of a first and a second forward and backward for each length."""
    seconds = []
    for length in LENGTHS:
        x = torch.randn(BATCH, length, WIDTH, requires_grad=True)
        for _ in range(2):
            started = time.process_time()
            call(x).sum().backward()
            seconds.append(time.process_time() - started)
    return seconds


def main(threads: int) -> None:
    """Prints a table."""
    torch.set_num_threads(threads)
    params = block_parameters(WIDTH)
    # The first trace of a process loads torch's tracer, and the symbols of its sizes.
    for is_open in (False, True):
        warm = remat(lambda x: x.sin().sin(), dynamic_shapes=is_open)
        warm(torch.randn(2, 3, requires_grad=True)).sum().backward()
    print(f"torch {torch.__version__}, {len(LENGTHS)} lengths, {threads} thread(s), ms")
    print("| | traces | first call | first of another length | further | all |")
    print("|---|---|---|---|---|---|")
    for title, is_open in (("static", False), ("dynamic_shapes=True", True)):
        region = remat(block, dynamic_shapes=is_open)
        seconds = sweep(lambda x, region=region: region(params, x))
        columns = (
            seconds[0],
            statistics.median(seconds[2::2]),
            statistics.median(seconds[1::2]),
            sum(seconds),
        )
        listed = " | ".join(f"{1000 * each:.1f}" for each in columns)
        print(f"| {title} | {region.cache_info().misses} | {listed} |")
