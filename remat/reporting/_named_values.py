"""Collects every named value of a forward, and of its recomputation.

Recomputation hides intermediate values from debuggers: a hook or a print sees only those of the
forward. Programs tell a listening mode which of their steps comes next. A named step of the
forward, and the step of the backward that repeats it, have the same rank.
"""

import contextlib
import dataclasses
import operator
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, final

from torch import Tensor

from remat._errors import RematError
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph
from remat._torch import fakes, levels, modes, tensors
from remat._tracing import naming
from remat._user_lines import user_line
from remat.reporting._measure.step import MeasuredStep, graph_of
from remat.reporting._measure.traced import RegionCall, RegionCalls
from remat.reporting._measure.watch import ProgramRun, StepListener


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NamedValue:
    """One named value of a step.

    Attributes:
        name: what `checkpoint_name` called it.
        occurrence: how many values of this name came before it in the forward.
        region: the region whose value it is; "" outside regions.
        call: which call of it, from 0; None outside regions.
        source: the user's "file.py:line" that made it.
        forward: a copy of what the forward computed.
        recomputed: a copy of what the backward computed again; None if it did not,
            because the value was saved, or because no gradient needs it. Recomputation
            by a scheduled stack, or by a transform inside the function, is not
            followed.
    """

    name: str
    occurrence: int
    region: str
    call: int | None
    source: str
    forward: Tensor
    recomputed: Tensor | None

    @property
    def is_same(self) -> bool | None:
        """Whether both have the same bits; None where nothing was recomputed."""
        if self.recomputed is None:
            return None
        return tensors.same_bits(self.forward, self.recomputed)

    def __str__(self) -> str:
        """One line: name, occurrence, where, and whether the two agree."""
        found = "recomputed alike" if self.is_same else "recomputed DIFFERENTLY"
        if self.recomputed is None:
            found = "not recomputed"
        where = f" in {self.region}, call {self.call}" if self.region else ""
        line = f" at {self.source}" if self.source else ""
        meta = TensorMeta.of(self.forward)
        return f'"{self.name}" #{self.occurrence}: {meta}{where}{line}, {found}'


@final
@dataclasses.dataclass(eq=False)
class _NamedTensor:
    """One named tensor as it passed by; `rank` says which value of its run it is."""

    name: str
    source: str
    tensor: Tensor
    phase: str
    node: int | None
    run: ProgramRun | None = None
    rank: int = -1


@final
class _NameWatcher(StepListener):
    """Copies values that have a name."""

    hears_names = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[_NamedTensor] = []
        self._results: dict[int, dict[int, Any]] = {}  # of each run that has begun

    @contextlib.contextmanager
    def following(
        self, graph: Graph, inputs: Sequence[Tensor], /
    ) -> Generator[Callable[[int], None]]:
        """Keeps what each step gives until the run ends, then copies what has a name."""
        with super().following(graph, inputs) as take_step:
            run = self.stack[-1]
            self._results[id(run)] = dict(enumerate(inputs))
            yield take_step
        results = self._results.pop(id(run))
        for index, value in enumerate(graph.values):
            if value.op is operator.getitem and value.args[0].index in results:
                results[index] = results[value.args[0].index][value.args[1]]
            is_own = value.op is not None or run.phase == "forward"
            for name in value.names if is_own and index in results else ():
                self._copy_named(name, value.source, results[index], run, value.rank)

    def _hear(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operator, and notes its result for its step, or a mark by itself."""
        result = modes.run_in_mode(op, args, kwargs)
        if op is naming.MARK:
            if not fakes.is_fake(args[0]):
                self._copy_named(args[1], user_line(), args[0])
        elif self.stack:
            run = self.stack[-1]
            value = run.graph.values[run.step] if run.step >= 0 else None
            # It has a name, or what is taken of its outputs may have one.
            if value is not None and (value.names or isinstance(value.meta, tuple)):
                self._results[id(run)][run.step] = result
        return result

    def _copy_named(self, name: str, source: str, tensor: Tensor, *of_run: Any) -> None:
        copy = levels.unwrapped(tensor).detach().clone()
        of_step = self.phase, self.node
        self.seen.append(_NamedTensor(name, source, copy, *of_step, *of_run))


def named_values(
    f: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[NamedValue, ...]:
    """The named values, as computed by the forward and by the backward.

    Runs one step: the forward, and the backward of the sum of the outputs, on detached
    aliases of the arguments. The caller's state does not change. Each value is copied.

    Args:
        f: a function with or without regions. Names outside regions are listed too,
            with nothing recomputed.
        *args: its arguments.
        **kwargs: likewise.

    Returns:
        The values in the order of the forward, those of one call of a region together.
        A tensor that has two names is listed by each.

    Raises:
        RematError: `f` returns nothing that requires grad, or a tensor is on the meta
            device and has no numbers.

    Example:
        >>> import torch
        >>> from remat import checkpoint_name, named_values, remat
        >>> f = remat(lambda x: checkpoint_name(x.sin(), "hidden").cos().exp())
        >>> (hidden,) = named_values(f, torch.zeros(2))
        >>> hidden.forward, hidden.recomputed, hidden.is_same
        (tensor([0., 0.]), tensor([0., 0.]), True)
    """
    step = MeasuredStep(f, args, kwargs)
    if any(device.type == "meta" for device in step.devices):
        raise RematError.of(
            where=step.name,
            what="a tensor is on the meta device.",
            why="Named values are compared as numbers, which a meta tensor does not have.",
            do="Pass tensors on a real device, small ones if memory is short; "
            "`report` takes meta tensors.",
        )
    with step.kept(), _NameWatcher() as watcher:
        outputs = step.forward()
        nodes, leaves = graph_of(outputs)
        calls = RegionCalls(nodes)
        watcher.hook(nodes)
        watcher.phase = "backward"
        step.backward(outputs, leaves)
    callers = calls.callers(watcher.runs)
    recomputed = _recomputed_by_key(watcher.seen, calls)
    counts: Counter[str] = Counter()
    found: list[NamedValue] = []
    for seen in watcher.seen:
        if seen.phase == "forward":
            call = callers.get(seen.run)
            row = recomputed.get(_key_of_named(seen, call))
            again, by = row.popleft() if row else (None, call)
            where = ("", None) if by is None else (by.name, by.number)
            name, number = seen.name, counts[seen.name]
            value = seen.source, seen.tensor, again
            found.append(NamedValue(name, number, *where, *value))
            counts[name] += 1
    return tuple(found)


def _recomputed_by_key(
    several: Sequence[_NamedTensor], calls: RegionCalls
) -> dict[Hashable, deque[tuple[Tensor, RegionCall]]]:
    """What the calls of regions computed again, by what it shares with the forward's."""
    found: dict[Hashable, deque[tuple[Tensor, RegionCall]]] = {}
    for node, call in calls.at.items():
        for seen in several:
            if seen.phase == "backward" and seen.node == node:
                row = found.setdefault(_key_of_named(seen, call), deque())
                row.append((seen.tensor, call))
    return found


def _key_of_named(seen: _NamedTensor, call: RegionCall | None) -> Hashable:
    if seen.run is not None:
        return call and call.place, seen.rank, seen.name
    # What runs again in Python has no ranks: its names come in the forward's order.
    return seen.name, seen.source, seen.tensor.shape
