"""What the steps of a graph cost: FLOPs and bytes moved, or time.

By the roofline model (Williams, Waterman and Patterson, 2009) a step takes as long as its
arithmetic or its traffic, whichever is longer. Without knowing the machine, a byte moved is
counted like one floating-point operation: matmuls are ranked by their FLOPs, and what
comes beside them by what it reads and writes.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from remat._errors import PolicyError, refusal
from remat._generators import device_states
from remat._graph import operators
from remat._graph.flops import step_flops
from remat._graph.meta import TensorMeta, metas_in
from remat._graph.values import Graph, Value, refs, replace_refs
from remat._torch import isolation
from remat._torch.taking_functions import Applied

Costs = Callable[[Graph, int], int]
"""From a step of a graph to its cost, a whole number of some unit."""

_ROUNDS = 5
_KEPT = 4096  # how many times are remembered
_times_ns: dict[str, int] = {}


def is_free(value: Value) -> bool:
    """Whether a step costs nothing: an input, a constant, a view, one of several outputs."""
    op = value.op
    if op is None or op is operators.constant or op is operator.getitem:
        return True
    is_view = operators.viewed(value) is not None
    return is_view or operators.is_rng_state(op) or operators.is_check(op)


def by_flops(graph: Graph, index: int) -> int:
    """FLOPs by torch's formulas, plus the bytes that are read and written."""
    value = graph.values[index]
    if is_free(value):
        return 0
    # Without the state of a generator, which is small.
    read = set(refs((value.args, value.kwargs)))
    metas = [*(graph.values[use].meta for use in read), value.meta]
    tensors = [each for meta in metas for each in metas_in(meta)]
    return step_flops(graph, value) + sum(each.once.size_bytes for each in tensors)


def costs_of(name: str, metas: Iterable[TensorMeta]) -> Costs:
    """The costs that "flops" or "measured" names, of a program with such operands."""
    return _measured(metas) if name == "measured" else by_flops


def _measured(metas: Iterable[TensorMeta]) -> Costs:
    """Nanoseconds, as the operators take on tensors of these sizes on this machine.

    Equal operators on equal sizes are timed once in a process, so that equal programs are
    decided alike: the median of a few runs. An operand on the meta device is refused.
    """
    if any(meta.device.type == "meta" for meta in metas):
        raise refusal(
            PolicyError,
            where='costs="measured"',
            what="got arguments without data, on the meta device.",
            why="An operator must run to be timed.",
            do='Pass real tensors, or costs="flops".',
        )

    def cost(graph: Graph, index: int) -> int:
        value = graph.values[index]
        if is_free(value):
            return 0
        metas = replace_refs(
            (value.args, value.kwargs), lambda use: graph.values[use].meta
        )
        if isinstance(value.op, Applied) and value.op.loops:
            raise _endless(value)
        key = f"{value.op}{metas}"
        if key not in _times_ns:
            if len(_times_ns) == _KEPT:
                _times_ns.clear()
            _times_ns[key] = _time_ns(graph, value)
        return _times_ns[key]

    return cost


def _endless(value: Value) -> PolicyError:
    return refusal(
        PolicyError,
        where=f"{operators.short_name(value.op)} at {value.source or 'the backward'}",
        what="cannot be timed.",
        why="On the zeros that operators are timed with, its loop may never end.",
        do='Pass costs="flops".',
    )


def _time_ns(graph: Graph, value: Value) -> int:
    op: Any = value.op
    drawn = {meta.device for meta in metas_in(value.meta)}
    rounds: list[int] = []

    def zeros(use: int) -> Tensor:
        """What a step is timed with, indices and numbers alike."""
        (meta,) = metas_in(graph.values[use].meta)
        return meta.empty().zero_()

    with device_states.put_back(drawn), isolation.isolated(), torch.no_grad():
        args, kwargs = replace_refs((value.args, value.kwargs), zeros)
        for _ in range(_ROUNDS):
            finish_work(drawn)
            started = time.perf_counter_ns()
            op(*args, **dict(kwargs))
            finish_work(drawn)
            rounds.append(time.perf_counter_ns() - started)
    return max(1, round(statistics.median(rounds)))


def finish_work(devices: Iterable[torch.device]) -> None:
    """Waits for accelerators, whose operators return before they are done."""
    here = torch.accelerator.current_accelerator(check_available=True)
    for device in devices:
        if here is not None and device.type == here.type:
            torch.accelerator.synchronize(device)
