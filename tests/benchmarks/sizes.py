"""What many sizes cost, and a trace with open ones: `python -m tests.benchmarks sizes`.

One transformer block in a sweep of lengths, forward and backward. In CPU seconds of this
process, which other work on the machine moves less than the clock. Then further traces beside
those of torch's `make_fx`, by the clock and in turn, and what a run of many lengths holds: objects,
and what C has allocated. The process itself grows with the lengths, as it does without regions.
"""

import ctypes
import gc
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from remat import policies, remat
from tests.benchmarks.work import block, block_parameters

WIDTH, BATCH = 64, 2
LENGTHS = range(16, 36)
MANY = range(16, 316)


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
    print(f"\nA further trace: {further_traces():.2f} of the time of make_fx.")
    print("\n| lengths | objects | MiB that C holds | warnings |\n|---|---|---|---|")
    many_lengths()


def _joint(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """The block's output and gradients, for a cotangent of ones."""
    y = block(params, x)
    gradients = torch.autograd.grad(y, [*params.values(), x], torch.ones_like(y))
    return (y, *gradients)


def _trained() -> dict[str, Tensor]:
    return {k: each.requires_grad_() for k, each in block_parameters(WIDTH).items()}


def further_traces() -> float:
    """The median time of traces for further lengths, beside that of make_fx for these."""
    params, region = _trained(), remat(block)
    region.cache_clear()
    ours: list[float] = []
    torchs: list[float] = []
    for length in LENGTHS:
        x = torch.randn(BATCH, length, WIDTH, requires_grad=True)
        before = sum(region.cache_info().trace_s)
        region(params, x).sum().backward()
        ours.append(sum(region.cache_info().trace_s) - before)
        started = time.perf_counter()
        make_fx(_joint, tracing_mode="fake")(params, x)
        torchs.append(time.perf_counter() - started)
    return statistics.median(ours[2:]) / statistics.median(torchs[2:])


class _Malloc(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _bytes_of_c() -> int:
    """What is allocated by malloc and not freed; Python's own objects are apart."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Malloc
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd


def many_lengths() -> None:
    """Prints what is alive after every fifty of them."""
    params, region = _trained(), remat(block, policy=policies.save_matmul_outputs)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for count, length in enumerate(MANY, start=1):
            x = torch.randn(BATCH, length, WIDTH, requires_grad=True)
            region(params, x).sum().backward()
            if count % 50 == 0:
                gc.collect()
                held = f"{_bytes_of_c() / 2**20:.0f}"
                row = count, len(gc.get_objects()), held, len(told)
                print("|", " | ".join(map(str, row)), "|", flush=True)
