"""What the steps of a graph cost: FLOPs and bytes moved, or time; and what kernels hold inside.

By the roofline model (Williams, Waterman and Patterson, 2009) a step takes as long as its
arithmetic or its traffic, whichever is longer. Without knowing the machine, a byte moved is
counted like one floating-point operation: matmuls are ranked by their FLOPs, and what
comes beside them by what it reads and writes.
"""

import contextlib
import dataclasses
import operator
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._errors import PolicyError
from remat._generators import device_states
from remat._graph import operators
from remat._graph.flops import step_flops
from remat._graph.meta import TensorMeta, metas_in
from remat._graph.values import Graph, Value, refs, replace_refs
from remat._torch import allocator, isolation
from remat._torch.taking_functions import Applied

Costs = Callable[[Graph, int], int]
"""From a step of a graph to its cost, a whole number of some unit."""

Workspace = Callable[[Value, Sequence[Value]], int]
"""From a value, and all that it may refer to, to the bytes that its kernel holds beside it."""

_ROUNDS = 5
_KEPT = 4096  # how many times, and how many workspaces, are remembered
_times_ns: dict[str, int] = {}
_workspaces: dict[str, int] = {}


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
    # Without the state of a generator, which is small.
    read = set(refs((value.args, value.kwargs)))
    metas = [*(graph.values[use].meta for use in read), value.meta]
    tensors = [each for meta in metas for each in metas_in(meta)]
    return step_flops(graph, value) + sum(each.once.size_bytes for each in tensors)


def work_of(graph: Graph, index: int) -> int:
    """What a traced step costs a region, in FLOPs: torch's formula, else one an element."""
    value = graph.values[index]
    if is_free(value):
        return 0
    return step_flops(graph, value) or sum(
        meta.size_bytes // meta.dtype.itemsize for meta in metas_in(value.meta)
    )


def known_workspace(value: Value, values: Sequence[Value] = ()) -> int:
    """The bytes that are known without running anything: those of draws from keys."""
    held = operators.WORKSPACES.get(value.op)
    return held(value.args, value.meta) if held else 0


def workspace_of(name: str) -> Workspace:
    """What kernels hold beside their results, as the costs "flops" or "measured" know it."""
    return _measured_workspace if name == "measured" else known_workspace


def costs_of(name: str, metas: Iterable[TensorMeta]) -> Costs:
    """The costs that "flops" or "measured" names, of a program with such operands."""
    return _measured(metas) if name == "measured" else by_flops


def _measured(metas: Iterable[TensorMeta]) -> Costs:
    """Nanoseconds, as the operators take on tensors of these sizes on this machine.

    Equal operators on equal sizes are timed once in a process, so that equal programs are
    decided alike: the median of a few runs. An operand on the meta device is refused.
    """
    if any(meta.device.type == "meta" for meta in metas):
        raise PolicyError.of(
            where='costs="measured"',
            what="got arguments without data, on the meta device.",
            why="An operator must run to be timed.",
            do='Pass real tensors, or costs="flops".',
        )

    def cost(graph: Graph, index: int) -> int:
        value = graph.values[index]
        if isinstance(value.op, Applied) and value.op.loops:
            raise _not_on_zeros(value, "Its loop may never end on these.")
        return _once(_times_ns, _time_ns, value, graph.values)

    return cost


def _once(
    kept: dict[str, int],
    measure: Callable[[Value, Sequence[Value]], int],
    value: Value,
    values: Sequence[Value],
) -> int:
    """What a kernel is measured to take, once for equal operators on equal sizes."""
    metas = replace_refs((value.args, value.kwargs), lambda use: values[use].meta)
    key = f"{value.op}{metas}"
    if key not in kept:
        if len(kept) == _KEPT:
            kept.clear()
        kept[key] = measure(value, values)
    return kept[key]


def _measured_workspace(value: Value, values: Sequence[Value] = ()) -> int:
    """What an operator of torch's takes from the allocator on tensors of these sizes."""
    is_torchs = operators.full_name(value.op).startswith("aten::")
    if is_free(value) or not is_torchs or operators.is_mutable(value.op):
        return known_workspace(value)
    return _once(_workspaces, _workspace_bytes, value, values)


def _not_on_zeros(value: Value, why: str) -> PolicyError:
    return PolicyError.of(
        where=" at ".join(filter(None, (operators.short_name(value.op), value.source))),
        what="cannot be run on zeros, as operators are to be measured.",
        why=why,
        do='Pass costs="flops".',
    )


def _time_ns(value: Value, values: Sequence[Value]) -> int:
    devices = {meta.device for meta in metas_in(value.meta)}
    rounds: list[int] = []
    with _on_zeros(value, values) as run:
        for _ in range(_ROUNDS):
            finish_work(devices)
            started = time.perf_counter_ns()
            run()
            finish_work(devices)
            rounds.append(time.perf_counter_ns() - started)
    return max(1, round(statistics.median(rounds)))


def _workspace_bytes(value: Value, values: Sequence[Value]) -> int:
    if allocator.is_profiled():
        raise PolicyError.of(
            where='a peak with costs="measured"',
            what="was asked for while a profiler runs.",
            why="What kernels hold inside is read from torch's profiler.",
            do='Plan before it starts, or pass costs="flops".',
        )
    metas = metas_in(value.meta)
    with _on_zeros(value, values) as run:
        most = allocator.most_allocated(run, metas[0].device) if metas else 0
    return max(0, most - sum(meta.size_bytes for meta in metas))


@contextlib.contextmanager
def _on_zeros(value: Value, values: Sequence[Value]) -> Generator[Callable[[], object]]:
    """A run of an operator on zeros, which are indices and numbers alike."""
    op: Any = value.op
    drawn = {meta.device for meta in metas_in(value.meta)}

    def zeros(use: int) -> Tensor:
        (meta,) = metas_in(values[use].meta)
        # Programs compute with the parts of this rank, and nobody else may be there to answer.
        return dataclasses.replace(meta, placement=None).empty().zero_()

    with device_states.put_back(drawn), isolation.isolated(), torch.no_grad():
        args, kwargs = replace_refs((value.args, value.kwargs), zeros)
        try:
            yield lambda: op(*args, **dict(kwargs))
        except RuntimeError as error:
            raise _not_on_zeros(value, f"{error}".partition("\n")[0]) from error


def finish_work(devices: Iterable[torch.device]) -> None:
    """Waits for accelerators, whose operators return before they are done."""
    here = torch.accelerator.current_accelerator(check_available=True)
    for device in devices:
        if here is not None and device.type == here.type:
            torch.accelerator.synchronize(device)
