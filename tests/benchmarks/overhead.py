"""What a region costs beyond its operators.

From its call to `Function.apply`, and three rows of the suite: tiny blocks show the Python
around operators, middle ones are held against a limit.
"""

import time
from typing import Any
from unittest import mock

import torch
from torch import nn

from remat import remat
from remat._calls import routes
from remat._regions import rules
from tests.benchmarks import suite, tables
from tests.benchmarks.rows import ROWS
from tests.benchmarks.work import block, blocks

SHOWN = ("tiny", "tiny-grad", "middle")


def calls() -> None:
    """Microseconds from the call of a region to `Function.apply`, and trace times."""
    print("\nFrom the call to `Function.apply`, and the trace\n")
    print("| | to apply, us | traces | trace, s |")
    print("|---|---|---|---|")
    stack = blocks(32, batch=2, sequence=16, width=32)
    region = remat(block)
    for own in stack.params:
        region(own, stack.x)
    _call_row("8 tensors in a dict", region, (stack.params[0], stack.x))
    layers = [
        nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(32)
    ]
    wrapped = [remat(layer) for layer in layers]
    for each in wrapped:
        each(stack.x)
    submodules = sum(1 for _ in layers[0].modules()) - 1
    title = f"a module with {submodules} submodules"
    _call_row(title, wrapped[0], (stack.x,))


def _call_row(title: str, region: Any, arguments: tuple[Any, ...]) -> None:
    to_apply = _time_to_apply(region, arguments)
    info = region.cache_info()
    traced = max(info.trace_s)
    print(f"| {title} | {to_apply * 1e6:.1f} | {info.currsize} | {traced:.3f} |")


class _AppliedError(Exception):
    """Ends a call where the Function would begin."""


def _time_to_apply(region: Any, arguments: tuple[Any, ...]) -> float:
    """The median over 1,000 calls, which end where `Function.apply` would begin."""

    def ends(*_: Any) -> Any:
        raise _AppliedError

    times: list[float] = []
    with (
        mock.patch.object(rules, "_apply_plainly", ends),
        mock.patch.object(routes, "run_fast", ends),
    ):
        for _ in range(1000):
            started = time.perf_counter()
            try:
                region(*arguments)
            except _AppliedError:
                times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def main(threads: int) -> None:
    """Prints every table."""
    torch.set_num_threads(threads)
    print(tables.heading())
    calls()
    for row in ROWS:
        if row.name in SHOWN:
            print(tables.markdown(suite.measured(row)))
