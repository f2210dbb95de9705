"""What the steps of a graph cost: FLOPs and bytes moved, or time.

By the roofline model (Williams, Waterman and Patterson, 2009) a step takes as long as its
arithmetic or its traffic, whichever is longer. Without knowing the machine, a byte moved is
counted like one floating-point operation: matmuls are ranked by their FLOPs, and what
comes beside them by what it reads and writes.
"""

from __future__ import annotations

import dataclasses
import operator
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remat._errors import PolicyError, explain
from remat._graph import operators
from remat._graph.values import Graph, TensorMeta, Value, refs, replace_refs
from remat._partition.flops import step_flops
from remat._torch import fakes, isolation
from remat.storage import (
    AbstractStorage,
    Chain,
    Keep,
    Offload,
    Quantize,
    Shard,
    Sparse,
    Stored,
)

Costs = Callable[[Graph, int], int]
"""From a step of a graph to its cost, a whole number of some unit."""

_BUS = 16  # how much slower a bus is than the memory of a device: PCIe 5 and HBM 3
_ROUNDS = 5


def is_free(value: Value) -> bool:
    """Whether a step makes nothing: an input, a constant, a view, one of several outputs."""
    op = value.op
    if op is None or op is operators.constant or op is operator.getitem:
        return True
    is_view = operators.viewed(value) is not None
    return is_view or operators.is_rng_state(op) or operators.is_check(op)


def by_flops(graph: Graph, index: int) -> int:
    """FLOPs by torch's formulas, plus the bytes that are read and written."""
    value = graph.values[index]
    return (
        0 if is_free(value) else step_flops(graph, value) + _moved_bytes(graph, value)
    )


def _moved_bytes(graph: Graph, value: Value) -> int:
    # Without the state of a generator, which is small.
    read = set(refs((value.args, value.kwargs)))
    metas = [graph.values[use].meta for use in read]
    return sum(sum(map(_stored_bytes, _tensors(meta))) for meta in [*metas, value.meta])


def _tensors(meta: Any) -> list[TensorMeta]:
    if isinstance(meta, TensorMeta):
        return [meta]
    return [each for part in meta or () for each in _tensors(part)]


def _stored_bytes(meta: TensorMeta) -> int:
    """Bytes of the elements, those of an expanded dimension once."""
    sizes = [
        size if step else min(size, 1)
        for size, step in zip(meta.shape, meta.stride, strict=True)
    ]
    return meta.dtype.itemsize * torch.Size(sizes).numel()


def measured(metas: list[TensorMeta]) -> Costs:
    """Nanoseconds, as the operators take on tensors of these sizes on this machine.

    Equal operators on equal sizes are timed once: the median of a few runs.

    Args:
        metas: those of the arguments, of which each must have a device that computes.

    Raises:
        PolicyError: an argument is on the meta device.
    """
    if any(meta.device.type == "meta" for meta in metas):
        raise PolicyError(
            explain(
                where='plan(costs="measured")',
                what="got arguments without data, on the meta device.",
                why="An operator must run to be timed.",
                do='Pass real tensors, or costs="flops".',
            )
        )
    known: dict[str, int] = {}

    def cost(graph: Graph, index: int) -> int:
        value = graph.values[index]
        if is_free(value):
            return 0
        args: Any = replace_refs(
            (value.args, value.kwargs), lambda use: graph.values[use].meta
        )
        key = f"{value.op}{args}"
        if key not in known:
            known[key] = _time_ns(value, *args)
        return known[key]

    return cost


def _time_ns(value: Value, args: Any, kwargs: Any) -> int:
    op: Any = value.op
    given: Any = _with_tensors((args, dict(kwargs)))
    drawn = {meta.device for meta in _tensors(value.meta) if meta.device.type == "cuda"}
    fork: Any = torch.random.fork_rng  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    rounds: list[int] = []
    with fork(drawn), isolation.isolated(), torch.no_grad():
        for _ in range(_ROUNDS):
            _wait_for_device()
            started = time.perf_counter_ns()
            op(*given[0], **given[1])
            _wait_for_device()
            rounds.append(time.perf_counter_ns() - started)
    return max(1, round(statistics.median(rounds)))


def _wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _with_tensors(tree: Any) -> Any:
    """The arguments with tensors of zeros, which are indices and numbers alike."""
    match tree:
        case TensorMeta():
            return _zeros(tree)
        case dict():
            return {key: _with_tensors(each) for key, each in tree.items()}  # pyright: ignore[reportUnknownVariableType]
        case tuple() | list():
            return type(tree)(map(_with_tensors, tree))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case _:
            return tree


def _zeros(meta: TensorMeta) -> Tensor:
    return torch.empty_strided(
        meta.shape, meta.stride, dtype=meta.dtype, device=meta.device
    ).zero_()


def waiting(storage: AbstractStorage, meta: TensorMeta) -> tuple[int, int]:
    """Bytes that a value holds on its device while it waits, and the cost of that.

    The cost, in the unit of `by_flops`, is that of the way into the storage and back.
    Where the bytes depend on the numbers, as with `Sparse`, or on other ranks, they are
    those of the value as it is: more are never held.
    """
    links = storage.links if isinstance(storage, Chain) else (storage,)
    parts, cost = [meta], 0
    for link in links:
        kept: list[TensorMeta] = []
        for part in parts:
            found, moved = _through(link, part)
            kept += found
            cost += 2 * moved
        parts = kept
    return sum(map(_stored_bytes, parts)), cost


def _through(link: AbstractStorage, part: TensorMeta) -> tuple[list[TensorMeta], int]:
    """What one storage leaves of a tensor on its device, and the bytes that it moves."""
    size_bytes = _stored_bytes(part)
    if isinstance(link, Keep):
        return [part], 0
    if isinstance(link, Offload):
        is_taken = link.takes(size_bytes, part.device)
        return ([], _BUS * size_bytes) if is_taken else ([part], 0)
    found = None if isinstance(link, (Shard, Sparse)) else _rehearsed(link, part)
    if found is None:
        return [part], 2 * size_bytes
    if len(found) == 1 and found[0] == part:
        return [part], 0
    return found, size_bytes + sum(map(_stored_bytes, found))


def _rehearsed(link: AbstractStorage, part: TensorMeta) -> list[TensorMeta] | None:
    """What a storage makes of a tensor without data; None where it has to see numbers."""
    link = keyless(link)
    with isolation.isolated(), fakes.fake_mode(part.device), torch.no_grad():
        value = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        try:
            stored: Stored = link.store(value)
        except RuntimeError as error:
            if not fakes.needs_values(error):
                raise
            return None
        if len(stored.tensors) == 1 and stored.tensors[0] is value:
            return [part]
        return [TensorMeta.of(tensor) for tensor in stored.tensors]


def keyless(link: AbstractStorage) -> AbstractStorage:
    """The storage without its random key, which has numbers, and no say in the sizes."""
    if isinstance(link, Quantize):
        return dataclasses.replace(link, stochastic=False, key=None)
    return link
