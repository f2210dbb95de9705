"""Watches one step: which operators make and free which bytes, and their times."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from remat._graph import flops, operators
from remat._graph.values import Graph
from remat._partition.costs import finish_work
from remat._programs.program import Watcher
from remat._regions.waiting import storages
from remat._torch import guards, modes, tensors, trees
from remat._user_lines import user_line
from remat.reporting._measure.step import Node


@final
@dataclasses.dataclass(eq=False, slots=True)
class ProgramRun:
    """One run of a region's program."""

    graph: Graph  # what ran
    phase: str  # "forward" or "backward"
    # the number of the autograd node whose backward it was; None in a forward
    node: int | None
    # seconds in the operators of each step
    times_s: dict[int, float] = dataclasses.field(default_factory=dict[int, float])
    # the storages that it made, also those that it freed
    made: set[Allocation] = dataclasses.field(default_factory=set["Allocation"])
    live_bytes: int = 0  # what lives of them
    peak_bytes: int = 0  # the most of them that lived at one time
    step: int = -1


@final
@dataclasses.dataclass(eq=False, slots=True)
class Allocation:
    """One storage that an operator of the step made."""

    key: int  # identifies it while it lives
    size_bytes: int
    maker: Any = None  # the operator
    source: str = ""  # the user's line in the forward, "" in the backward
    names: tuple[str, ...] = ()  # what `checkpoint_name` called it
    phase: str = "forward"  # "forward" or "backward"
    run: ProgramRun | None = None  # the program that made it; None outside regions
    step: int = -1  # which step of the program did, -1 for none
    item: int = 0  # which of the tensors that the operator returned
    node: int | None = None  # the number of the autograd node whose backward made it

    @property
    def op(self) -> str:
        """The operator's short name."""
        return operators.short_name(self.maker)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One storage made or freed."""

    time_s: float  # seconds in operators until then
    change: int  # the bytes that it adds or takes
    allocation: Allocation


class StepListener(Watcher):
    """A watcher of one step, which is told how far the step has come."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"  # or "backward", set by who drives the step
        self.node: int | None = None  # the place of the one whose backward runs
        self.runs: list[ProgramRun] = []  # of the programs of regions, in order
        self.stack: list[ProgramRun] = []  # those that have begun and not ended

    def hook(self, nodes: Sequence[Node]) -> None:
        """Has `node` say, when a backward runs, which of these it has come to."""
        for place, node in enumerate(nodes):
            node.raw.register_prehook(functools.partial(self._enter_node, place))

    def _enter_node(self, node: int, _: object) -> None:
        self.node = node

    @contextlib.contextmanager
    def following(
        self, graph: Graph, inputs: Sequence[Tensor], /
    ) -> Generator[Callable[[int], None]]:
        """Notes a run of a program, and its steps as they come."""
        run = ProgramRun(graph, self.phase, self.node)
        self.runs.append(run)
        self.stack.append(run)
        try:
            yield functools.partial(setattr, run, "step")
        finally:
            self.stack.pop()


@final
class StepWatcher(StepListener):
    """Records storages, runs and times while it is active.

    It counts what operators on real and meta tensors make, each storage once. It does
    not see buffers inside a kernel, nor what the allocator adds to round up sizes.

    When one of torch's operators runs for the first time in the process, it runs twice
    if that changes nothing, and only the second counts: kernels tune in the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.time_s = 0.0  # in operators so far
        self.live_bytes = self.peak_bytes = 0
        self.flops = {"forward": 0, "backward": 0}  # by torch's formulas
        self.counts: Counter[str] = Counter()  # of operators, by their short names
        self._waits = torch.accelerator.is_available()
        self.events: list[Event] = []
        self.by_key: dict[int, Allocation] = {}  # what lives
        self._references: dict[weakref.ref[torch.UntypedStorage], Allocation] = {}

    def _hear(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operator, measures it, and counts what it returns."""
        if op not in _WARM and guards.are_plain(trees.tensor_leaves((args, kwargs))):
            _warm_up(op, args, kwargs)
        started = time.perf_counter()
        result = modes.run_in_mode(op, args, kwargs)
        if self._waits:
            _finish_work_of(result)
        elapsed = time.perf_counter() - started
        self.time_s += elapsed
        self.counts[operators.short_name(op)] += 1
        self.flops[self.phase] += flops.flops_of(op, args, kwargs, result)
        run = self.stack[-1] if self.stack else None
        if run is not None:
            run.times_s[run.step] = run.times_s.get(run.step, 0.0) + elapsed
        if not operators.returns_view(op):  # what a view shows was there before
            for item, tensor in enumerate(trees.tensor_leaves(result)):
                for storage in storages(tensor):
                    self._count(storage, op, item)
        return result

    def _count(self, storage: torch.UntypedStorage, op: Any, item: int) -> None:
        reference = weakref.ref(storage, self._forget)
        known = self._references.get(reference)
        if known is not None:
            change = storage.nbytes() - known.size_bytes
            known.size_bytes = storage.nbytes()
            if change:
                self._note(known, change)
            return
        if _is_mutable(op):
            return  # it was there before
        run = self.stack[-1] if self.stack else None
        made = Allocation(tensors.key_of(storage), storage.nbytes(), op)
        made.phase, made.run, made.item, made.node = self.phase, run, item, self.node
        if run is not None:
            made.step = run.step
        if run is not None and run.step >= 0:
            value = run.graph.values[run.step]
            made.source, made.names = value.source, value.names
        elif self.phase == "forward":
            made.source = user_line()
        self._references[reference] = self.by_key[made.key] = made
        for each in self.stack:
            each.made.add(made)
        self._note(made, made.size_bytes)

    def _forget(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        allocation = self._references.pop(reference)
        if self.by_key.get(allocation.key) is allocation:
            del self.by_key[allocation.key]
        self._note(allocation, -allocation.size_bytes)

    def _note(self, allocation: Allocation, change: int) -> None:
        self.live_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.events.append(Event(self.time_s, change, allocation))
        for run in self.stack:
            if allocation in run.made:
                run.live_bytes += change
                run.peak_bytes = max(run.peak_bytes, run.live_bytes)


def _finish_work_of(result: Any) -> None:
    finish_work({each.device for each in trees.tensor_leaves(result)})


_is_mutable = functools.cache(operators.is_mutable)

# The operators that have run in this process, which are warmed up.
_WARM: set[Any] = set()


def _warm_up(op: Any, args: Any, kwargs: Any) -> None:
    """Runs an operator once more, if it is torch's own and that changes nothing."""
    changes = operators.returns_view(op) or _is_mutable(op) or operators.may_draw(op)
    if getattr(op, "namespace", "") == "aten" and not changes:
        _finish_work_of(modes.run_in_mode(op, args, kwargs))
    _WARM.add(op)
