"""Blocks of an accelerator's size in bfloat16: `python -m tests.benchmarks gpu`.

Of every contender of the suite: the time of a step, tokens a second, the allocator's peak, and
the largest batch in a fixed memory. `--quick` leaves out the larger sizes and what compiles.
`--dry-run` needs no accelerator and measures nothing: it prints what would run, and of regions
the bytes, FLOPs and programs that the accelerator would get, from tensors without data. The
accelerator is torch's current one; recorded launches ("CUDA graphs") are not used.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat import RematWarning, report
from tests.benchmarks import work
from tests.benchmarks.contenders import PLAIN, Contender, contenders
from tests.benchmarks.suite import REFUSALS
from tests.benchmarks.timing import MIN_ROUNDS, interleaved, paired
from tests.benchmarks.work import Unit, Work

GIB = 2**30
MEMORY_BYTES = 24 * GIB  # in which the largest batch is sought, on any device
CLOSE = 0.05  # how far gradients in bfloat16 may be apart, as a part of their norm


@dataclass(frozen=True)
class Size:
    """Of one row.

    Attributes:
        width: of the tokens' vectors.
        sequence: tokens in one example.
        layers: how many blocks, each of them a unit.
        batch: examples of the step that is timed.
        dtype: of all tensors.
        kernel: of attention, which must run.
    """

    width: int
    sequence: int
    layers: int = 8
    batch: int = 2
    dtype: torch.dtype = torch.bfloat16
    kernel: SDPBackend = SDPBackend.FLASH_ATTENTION

    @property
    def title(self) -> str:
        """What runs."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.layers} blocks of width {self.width}, sequence {self.sequence}, "
            f"batch {self.batch}, {dtype}, {self.kernel.name.lower()}; `.backward()`"
        )

    def made(self, device: torch.device, batch: int) -> Work:
        """A step of so many examples."""
        with torch.device(device):
            made = work.blocks(self.layers, batch, self.sequence, self.width)
        x = made.x.to(self.dtype)
        params = [
            {
                name: t.detach().to(self.dtype).requires_grad_()
                for name, t in own.items()
            }
            for own in made.params
        ]
        return dataclasses.replace(made, params=params, x=x, unit_input=x)


SIZES = tuple(
    Size(width, sequence) for width in (2048, 4096) for sequence in (2048, 4096, 8192)
)


def main(
    threads: int,
    dry_run: bool = False,
    quick: bool = False,
    sizes: tuple[Size, ...] = SIZES,
) -> int:
    """Prints a table for each size; 0, as no bound is stated."""
    torch.set_num_threads(threads)
    device = torch.accelerator.current_accelerator(check_available=True)
    rivals = contenders(quick, attends=True)
    is_dry = dry_run or device is None
    print(_heading(None if is_dry else device, rivals))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # each size is a trace of its own
        _print_rows(sizes[:1] if quick else sizes, None if is_dry else device, rivals)
    return 0


def _print_rows(
    sizes: Sequence[Size], device: torch.device | None, rivals: list[Contender]
) -> None:
    """Measured on a device, foretold without one."""
    for size in sizes:
        print(f"### gpu-{size.width}-{size.sequence}\n\n{size.title}.\n")
        if device is None:
            print(EXPECTED)
            lines = (each for rival in rivals if (each := expected(size, rival)))
        else:
            print(MEASURED)
            lines = measured(size, device, rivals)
        for line in lines:
            print(line, flush=True)
        print()


def _heading(device: torch.device | None, rivals: list[Contender]) -> str:
    """What is measured, and on what."""
    if device is not None:
        module: Any = torch.get_device_module(device)
        name = getattr(module, "get_device_name", str)(device)
        return f"torch {torch.__version__}, {name}, {MIN_ROUNDS} rounds.\n"
    apart = ", ".join(each.name for each in rivals if not _is_foretold(each))
    return (
        f"torch {torch.__version__}, a dry run: no accelerator was used, and nothing was "
        "measured. Bytes are those of a step on tensors without data, beyond parameters and "
        f"batch. Only measured: step time, tokens a second, the largest batch in "
        f"{MEMORY_BYTES // GIB} GiB; and all figures of {apart}.\n"
    )


# The dry run.

EXPECTED = (
    "| | held GiB | peak GiB | TFLOPs | repeated | steps forward | backward |\n"
    "|---|--:|--:|--:|--:|--:|--:|"
)


def _is_foretold(contender: Contender) -> bool:
    """Whether a report sees what a contender does; a compiler's code it does not."""
    return contender.kind in ("plain", "own")


def expected(size: Size, contender: Contender) -> str | None:
    """A line of the dry run; None of what only a measurement can tell."""
    if not _is_foretold(contender):
        return None
    made = size.made(torch.device("meta"), size.batch)
    unit: Any = contender.wrap(_unit_with_kernel)
    step = report(lambda x: made.loss(unit, made.params, x), made.x)
    sizes = [f"{each / GIB:.2f}" for each in (step.held_bytes, step.peak.size_bytes)]
    flops = step.forward_flops + step.backward_flops
    repeated = step.recompute_flops or 0
    counts = ["", ""]
    if contender.kind == "own":
        x = made.x.detach().requires_grad_()
        programs = unit.programs(made.params[0], x)
        counts = [
            str(sum(value.op is not None for value in each.graph.values))
            for each in programs
        ]
    work_done = [f"{flops / 1e12:.1f}", f"{repeated / flops:.1%}"]
    return _row(contender.name, *sizes, *work_done, *counts)


def _unit_with_kernel(p: work.Params, x: Tensor) -> Tensor:
    """A block with the attention that torch picks on an accelerator, and not on "meta"."""
    return work.block(p, x, _flash_attention)


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    attend: Any = torch.ops.aten._scaled_dot_product_flash_attention
    return attend(q, k, v, 0.0, is_causal)[0]


# On an accelerator.

MEASURED = (
    "| | ms | over no remat | spread | tokens/s | peak GiB | largest batch |\n"
    "|---|--:|--:|--:|--:|--:|--:|"
)


def measured(
    size: Size,
    device: torch.device,
    rivals: list[Contender],
    rounds: int = MIN_ROUNDS,
    memory_bytes: int = MEMORY_BYTES,
) -> Iterator[str]:
    """The lines of all contenders whose gradients are those without remat."""
    missing: dict[str, str] = {}
    steps: dict[str, _Step] = {}
    with sdpa_kernel(size.kernel):
        made = size.made(device, size.batch)
        right = made.step(made.unit)
        for rival in rivals:
            try:
                steps[rival.name] = _admitted(rival, made, right)
            except _refusals(rival) as error:
                missing[rival.name] = f"raises {type(error).__name__}"
        peaks = {name: step.peak_bytes() for name, step in steps.items()}
        times = interleaved(steps, rounds)
        for name, ratio in paired(times, times[PLAIN]).items():
            (rival,) = (each for each in rivals if each.name == name)
            largest = _largest_batch(size, device, rival, memory_bytes)
            yield _row(
                name,
                f"{ratio.time_s * 1e3:.1f}",
                f"{ratio.median:.3f}",
                f"{ratio.spread:.1%}",
                f"{size.batch * size.sequence / ratio.time_s:.0f}",
                f"{peaks[name] / GIB:.2f}",
                str(largest),
            )
    for name, why in missing.items():
        yield _row(name, why, "", "", "", "", "")


@dataclass(frozen=True)
class _Step:
    """One step of a contender, until the device has finished it."""

    made: Work
    unit: Unit

    def __call__(self) -> None:
        self.made.step(self.unit)
        torch.accelerator.synchronize(self.made.x.device)

    def peak_bytes(self) -> int:
        """The most that a step has allocated, beyond what was there."""
        device = self.made.x.device
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        self()
        return torch.accelerator.max_memory_allocated(device) - before


def _refusals(contender: Contender) -> tuple[type[Exception], ...]:
    """What a peer may raise; a fault of regions is none of it."""
    return () if _is_foretold(contender) else (*REFUSALS, ModuleNotFoundError)


def _admitted(contender: Contender, made: Work, right: list[Tensor]) -> _Step:
    """A contender's step, which has run twice; what it compiles is compiled."""
    unit = contender.wrap(made.unit)
    with contender.settings():
        found = made.step(unit)
        for one, other in zip(found, right, strict=True):
            assert (one - other).norm() <= CLOSE * other.norm(), contender.name
        step = _Step(made, unit)
        step()
    return step


def _largest_batch(
    size: Size, device: torch.device, contender: Contender, memory_bytes: int
) -> int:
    """How many examples fit, parameters included: by the peaks of two, until one batch fits.

    Peaks are straight lines but for what is rounded up: the next guess is where the line
    through the last two meets the limit, and at most eight times as large.
    """

    def most(batch: int) -> int:
        made = size.made(device, batch)
        fixed = sum(each.nbytes for each in (made.x, *made.leaves()))
        step = _Step(made, contender.wrap(made.unit))
        with contender.settings():
            step()  # what it traces and compiles is not a step's
            return fixed + step.peak_bytes()

    known = {batch: most(batch) for batch in (1, 2)}
    while True:
        (low, low_bytes), (high, high_bytes) = sorted(known.items())[-2:]
        each = (high_bytes - low_bytes) / (high - low)
        largest = low + math.floor((memory_bytes - low_bytes) / each)
        batch = max(min(largest, 8 * high), 0)
        if batch in known or batch == 0:
            fitting = (
                n for n, size_bytes in known.items() if size_bytes <= memory_bytes
            )
            return max(fitting, default=0)
        known[batch] = most(batch)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
