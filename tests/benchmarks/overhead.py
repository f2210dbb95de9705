"""What a region costs beyond its operators.

Tiny blocks show the Python around operators; middle ones are held against a limit: the
step without remat plus one straight-line program of the operators that must run again.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from remat import _bind, remat
from remat._graph import Ref, TensorMeta, prune
from remat._program import Program
from tests.benchmarks.blocks import Stack, block, peers, regions
from tests.benchmarks.timing import interleaved, paired, table


def recomputation(region: Any, stack: Stack) -> Callable[[], None]:
    """The operators that a region's backward runs again, for each block, and no more."""
    x = stack.x.clone().requires_grad_()
    program = region.programs(stack.params[0], x)[1]
    graph = program.graph
    cotangents = {graph.num_inputs - 1}
    for index, value in enumerate(graph.values):
        if cotangents.intersection(value.uses):
            cotangents.add(index)
    read = {use for index in cotangents for use in graph.values[index].uses}
    again = sorted(index for index in read - cotangents if index >= graph.num_inputs)
    outputs = tuple(Ref(index) for index in again)
    alone = Program(prune(replace(graph, outputs=outputs)), "recomputation")
    inputs = [
        torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype).normal_()
        for meta in (value.meta for value in graph.values[: graph.num_inputs])
        if isinstance(meta, TensorMeta)
    ]

    def run() -> None:
        for _ in stack.params:
            alone(inputs)

    return run


def tiny() -> None:
    """8 blocks of width 32: the tables of plain autograd and of torch.func.grad."""
    stack = Stack.make(blocks=8, batch=2, sequence=16, width=32)
    contenders = {"no remat": block, **regions(), **peers()}
    steps = {name: _bound(stack.backward, each) for name, each in contenders.items()}
    times = interleaved(steps, 60, burst=4)
    title = "Tiny blocks (8 of width 32, sequence 16, batch 2), `.backward()`"
    print(table(title, "no remat", paired(times, times["no remat"])))
    contenders = {"no remat": block, **regions()}
    steps = {name: _bound(stack.grad, each) for name, each in contenders.items()}
    times = interleaved(steps, 40, burst=4)
    title = "The same under `torch.func.grad`; no peer runs there"
    print(table(title, "no remat", paired(times, times["no remat"])))


def middle() -> None:
    """4 blocks of width 256, each policy against its own limit."""
    stack = Stack.make(blocks=4, batch=8, sequence=256, width=256)
    own = regions()
    again = {f"again: {name}": recomputation(own[name], stack) for name in own}
    contenders = {"no remat": block, **own, **peers()}
    steps = {name: _bound(stack.backward, each) for name, each in contenders.items()}
    times = interleaved({**steps, **again}, 11)
    shown = {name: times[name] for name in steps}
    title = "Middle blocks (4 of width 256, sequence 256, batch 8), `.backward()`"
    print(table(title, "no remat", paired(shown, times["no remat"])))
    limits = {
        name: [
            a + b
            for a, b in zip(times["no remat"], times[f"again: {name}"], strict=True)
        ]
        for name in own
    }
    ratios = {name: paired({name: times[name]}, limits[name])[name] for name in own}
    print(table("The same against the limit", "the limit", ratios))


def _bound(step: Callable[[Any], None], each: Any) -> Callable[[], None]:
    return lambda: step(each)


def calls() -> None:
    """Microseconds from the call of a region to `Function.apply`, and trace times."""
    print("\nFrom the call to `Function.apply`, and the trace\n")
    print("| | to apply, us | traces | trace, s |")
    print("|---|---|---|---|")
    stack = Stack.make(blocks=32, batch=2, sequence=16, width=32)
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
        mock.patch.object(_bind, "_apply_plainly", ends),
        mock.patch.object(_bind, "_apply_straight", ends),
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
    print(f"torch {torch.__version__}, {threads} thread(s)")
    calls()
    tiny()
    middle()
