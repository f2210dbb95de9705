"""Runs one step under a watcher, reads autograd's graph in between, and sums up."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from remat._graph.flops import step_flops
from remat._graph.values import Graph
from remat._partition.analysis import bytes_of
from remat._partition.peak import peak_of_run
from remat._regions.waiting import Waiting, parts_of, storages
from remat._torch.tensors import key_of
from remat.reporting._measure import suggestions
from remat.reporting._measure.live_bytes import allocator_peak
from remat.reporting._measure.step import MeasuredStep, Node, graph_of, storage_sizes
from remat.reporting._measure.traced import RegionCall, RegionCalls, RegionTrace, Waits
from remat.reporting._measure.watch import Allocation, ProgramRun, StepWatcher
from remat.reporting._records import (
    HeldValue,
    Layer,
    Peak,
    RecomputedValue,
    RegionReport,
    Timeline,
)
from remat.reporting._report import Report
from remat.storage import Keep

OUTSIDE = "outside of regions"
GRADIENTS = "gradients"
_KEEP = Keep()
_MOST_POINTS = 1000

_V = TypeVar("_V", HeldValue, RecomputedValue)


def report(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Measures one step of a function: the forward, and the backward of its outputs' sum.

    The step runs once, under a watcher. The first call of a kernel in the process does
    not count, and the times do not include traces. It differentiates the tensors that
    require grad, captured ones included, or, if there are none, every floating tensor
    argument. The caller's state does not change: no `.grad` is written, and buffers,
    generators and arguments are restored. To see what is held, the report unpacks what
    saved-tensor hooks of other libraries packed. It resets the peak statistics of an
    accelerator's allocator.

    Args:
        f: a loss, a module, a region, or any function, with or without regions inside;
            on meta tensors the bytes are those of a real run, and there are no times.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        The report, frozen; `print` shows it.

    Raises:
        RematError: `f` returns nothing that requires grad, or is measured inside a trace or
            a transform of torch.func.

    Example:
        >>> import torch
        >>> from remat import policies, remat, report
        >>> block = remat(lambda x: x.sin().exp().sin())
        >>> found = report(lambda x: block(block(x)).sum(), torch.ones(256))
        >>> [(region.calls, region.held_bytes) for region in found.regions]
        [(2, 1024)]

    References:
        The columns are those that users of the peers ask for: what is held, its bytes,
        and what consumed it (jax #15151).
    """
    step = MeasuredStep(f, args, kwargs)
    with step.kept():
        measurement = _Measurement(step)
    return measurement.report()


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """One storage that a node holds, and the tensor by which it does."""

    node: int  # the place of the node
    position: int  # the place of the tensor among what the node saved
    allocation: Allocation
    waits: Waits  # the bytes of the storage between forward and backward
    is_plain: bool  # whether the tensor waits as it is
    shape: tuple[int, ...]
    dtype: torch.dtype


@final
class _Measurement:
    """The watched step, and its totals."""

    def __init__(self, step: MeasuredStep) -> None:
        self.step = step
        self.watch = StepWatcher()
        peak = allocator_peak(step.devices)
        with self.watch:
            outputs = step.forward()
            self.forward_s = self.watch.time_s
            nodes, self.leaves = graph_of(outputs)
            self._note_held(nodes, outputs)
            self.watch.hook(nodes)
            del nodes
            self.num_forward = len(self.watch.events)
            self.watch.phase = "backward"
            gradients = step.backward(outputs, self.leaves)
            self.watch.node = None
            del outputs
            self.gradients = self._allocations(gradients)
        self.allocator_peak_bytes = peak()

    def _note_held(self, nodes: Sequence[Node], outputs: Sequence[Tensor]) -> None:
        """Notes what each node holds, by storage, with the first node that holds it."""
        self.names = [str(node.raw.name()) for node in nodes]
        self.calls = RegionCalls(nodes)
        self.readers: dict[int, list[_Held]] = {}
        self._pooled: dict[int, Allocation] = {}
        for place, node in enumerate(nodes):
            for position, tensor in enumerate(node.saved):
                for part in parts_of(tensor):
                    self._hold(place, position, tensor, part)
        # A storage counts with the first region that holds it, else with the first node.
        self.held = {
            key: next((each for each in found if each.node in self.calls.at), found[0])
            for key, found in self.readers.items()
        }
        self._returned = self._allocations(outputs)
        found = self.held.values()
        self._away = {each.allocation for each in found if each.waits.elsewhere_bytes}
        here = set(self.watch.by_key.values()) - self._away
        self.held_bytes = sum(each.size_bytes for each in here)
        self.device = str(outputs[0].device)
        self.is_timed = self.device != "meta"

    def _hold(self, place: int, position: int, tensor: Tensor, part: Tensor) -> None:
        is_away = part.device != tensor.device
        for storage in storages(part):
            allocation = self.watch.by_key.get(key_of(storage))
            if allocation is None and is_away:
                # It waits in memory that was there before the step, as a pool's is.
                pooled = Allocation(id(part), part.nbytes)
                allocation = self._pooled.setdefault(id(part), pooled)
            if allocation is None:
                continue  # an argument
            size = allocation.size_bytes
            is_in_file = allocation.maker is torch.ops.aten.from_file.default
            waits = Waits(0, size) if is_away or is_in_file else Waits(size)
            is_plain = not isinstance(tensor, Waiting)
            meta = is_plain, tuple(tensor.shape), tensor.dtype
            held = _Held(place, position, allocation, waits, *meta)
            self.readers.setdefault(allocation.key, []).append(held)

    def _allocations(self, tensors: Sequence[Tensor | None]) -> frozenset[Allocation]:
        keys = storage_sizes(each for each in tensors if each is not None)
        by_key = self.watch.by_key
        return frozenset(by_key[key] for key in keys if key in by_key)

    def report(self) -> Report:
        """The figures in a row."""
        self._caller = self.calls.callers(self.watch.runs)
        # The run of each node's backward program: the longest, as views run there too.
        longest = sorted(self.watch.runs, key=lambda run: -len(run.graph.values))
        self._backwards = {
            run.node: run for run in reversed(longest) if run.phase == "backward"
        }
        regions = tuple(map(self._region_report, self.calls.rows))
        traces = self.calls.traces
        for traced in traces:
            traced.shared = self._shared_outputs(traced)
        held = self._measured_waits(range(len(self.names)))
        outside = set(range(len(self.names))) - set(self.calls.at)
        history = self._history()
        parameters, arguments = map(storage_sizes, (self.leaves, self.step.arguments))
        outside_values = self._outside_values()
        suggestion = suggestions.suggest(traces, self.held_bytes, outside_values)
        is_known = all(each.recompute_flops is not None for each in regions)
        recompute_flops = sum(each.recompute_flops or 0 for each in regions)
        recompute_s = sum(each.recompute_s or 0.0 for each in regions)
        return Report(
            function=self.step.name,
            device=self.device,
            arguments=self.step.described,
            held_bytes=self.held_bytes,
            elsewhere_bytes=held.elsewhere_bytes,
            outside_bytes=self._measured_waits(outside).held_bytes,
            output_bytes=self.held_bytes - held.held_bytes,
            peak=self._peak(history),
            allocator_peak_bytes=self.allocator_peak_bytes,
            parameter_bytes=sum(parameters.values()),
            argument_bytes=sum(arguments[k] for k in arguments.keys() - parameters),
            gradient_bytes=sum(each.size_bytes for each in self.gradients),
            optimizer_bytes=None,
            forward_flops=self.watch.flops["forward"],
            backward_flops=self.watch.flops["backward"],
            recompute_flops=recompute_flops if is_known else None,
            forward_s=self.forward_s if self.is_timed else None,
            backward_s=self.watch.time_s - self.forward_s if self.is_timed else None,
            recompute_s=recompute_s if self.is_timed and is_known else None,
            regions=regions,
            values=_folded_values(Counter(map(self._held_value, self.held.values()))),
            recomputed=self._recomputed(),
            unmatched=self._unmatched(),
            suggestion=suggestion,
            frontier=suggestions.frontier(traces),
            timeline=self._timeline(history),
        )

    def _region_report(self, calls: Sequence[RegionCall]) -> RegionReport:
        measured = [self._measured_waits({call.place}) for call in calls]
        held = [each.held_bytes for each in measured]
        predicted = Waits.sum(map(self._predicted_waits, calls))
        runs = [self._backwards.get(call.place) for call in calls]
        known = [run for run in runs if run is not None]
        graphs = {run.graph for run in known}  # equal layers share one
        working_set_bytes = max(map(peak_of_run, graphs), default=0)
        again = {graph: _repeated_flops(graph) for graph in graphs}
        traced = calls[0].traced
        flops = [again[run.graph] if run and traced else None for run in runs]
        backward_s = sum(sum(run.times_s.values()) for run in known)
        is_timed = bool(traced) and self.is_timed
        return RegionReport(
            name=calls[0].name,
            policy=calls[0].policy,
            calls=len(calls),
            layers=tuple(self._folded_layers(calls, zip(held, flops, strict=True))),
            held_bytes=sum(held),
            predicted_held_bytes=predicted.held_bytes if traced else None,
            elsewhere_bytes=sum(each.elsewhere_bytes for each in measured),
            predicted_elsewhere_bytes=predicted.elsewhere_bytes if traced else None,
            working_set_bytes=max((run.peak_bytes for run in known), default=0),
            predicted_working_set_bytes=working_set_bytes if traced else None,
            recompute_flops=sum(each or 0 for each in flops) if traced else None,
            recompute_s=sum(map(_repeated_s, known)) if is_timed else None,
            backward_s=backward_s if is_timed else None,
        )

    def _folded_layers(
        self, calls: Sequence[RegionCall], figures: Iterable[tuple[int, int | None]]
    ) -> Iterator[Layer]:
        """Equal calls as one, by their paths where all are modules of the model."""
        places: dict[tuple[int, int | None], list[int]] = {}
        for place, figure in enumerate(figures):
            places.setdefault(figure, []).append(place)
        for (size, work), own in places.items():
            paths = [self.step.paths.get(id(calls[k].module), "") for k in own]
            modules = tuple(paths) if all(paths) else ()
            yield Layer(own[0], len(own), size, work, modules)

    def _measured_waits(self, places: Container[int]) -> Waits:
        """What the nodes at these places hold, by measurement."""
        return Waits.sum(
            each.waits for each in self.held.values() if each.node in places
        )

    def _predicted_waits(self, call: RegionCall) -> Waits:
        """The saved values by the trace, and the operands that this call holds first.

        An operand that waits as it is holds what the caller's tensor is a view of.
        """
        traced = call.traced
        if traced is None:
            return Waits()
        saved, count = len(traced.cut.saved), len(traced.region.operands)
        measured: dict[int, list[_Held]] = {}
        for held in self.held.values():
            if held.node == call.place and held.position < saved + count:
                measured.setdefault(held.position, []).append(held)
        joint = traced.analysis.joint
        states = [state.index for state in joint.states]  # that draws started from
        found = [Waits(bytes_of(joint.graph, states))]
        for position in {*range(saved), *measured}:
            own = measured.get(position, [])
            is_view = position >= saved and own[0].is_plain
            waits = None if is_view else traced.waits(position)
            found += [each.waits for each in own] if waits is None else [waits]
        return Waits.sum(found)

    def _held_value(self, held: _Held) -> HeldValue:
        call = self.calls.at.get(held.node)
        allocation = held.allocation
        name, waits = ", ".join(allocation.names), "Keep()"
        op, source = allocation.op, allocation.source
        if call is not None and call.traced is not None:
            saved = len(call.traced.cut.saved)
            if held.position < saved:
                name, op, source, waits = call.traced.saved_value(held.position)
            elif held.position - saved < len(call.call.labels):
                operand = held.position - saved
                name = name or call.call.labels[operand]
                waits = repr(call.traced.region.inputs.get(operand, _KEEP))
        return HeldValue(
            name=name,
            op=op,
            shape=held.shape,
            dtype=held.dtype,
            size_bytes=sum(held.waits),
            count=1,
            source=source,
            region="" if call is None else call.name,
            storage=waits,
            consumers=self._consumers(allocation),
        )

    def _consumers(self, allocation: Allocation) -> tuple[str, ...]:
        found: list[str] = []
        for reader in self.readers[allocation.key]:
            call = self.calls.at.get(reader.node)
            if call is None:
                found.append(self.names[reader.node])
            elif call.traced is None:
                found.append(call.name)
            else:
                found += call.traced.consumers.get(reader.position, ())
        return tuple(dict.fromkeys(found))

    def _recomputed(self) -> tuple[RecomputedValue, ...]:
        """What runs again, equal values of several traces folded, the largest first."""
        counts: Counter[RecomputedValue] = Counter()
        for traced in self.calls.traces:
            for number in traced.recomputed:
                value = traced.analysis.views[number]
                one = RecomputedValue(
                    name=", ".join(value.names),
                    op=traced.made_by(number),
                    shape=tuple(value.shape),
                    dtype=value.dtype,
                    size_bytes=value.size_bytes,
                    count=1,
                    flops=value.flops,
                    source=value.source,
                    region=traced.calls[0].name,
                )
                counts[one] += len(traced.calls)
        return _folded_values(counts)

    def _outside_values(self) -> tuple[HeldValue, ...]:
        """What no region makes or holds, and nobody is given, the largest first."""
        return _largest_first(
            self._held_value(held)
            for held in self.held.values()
            if held.node not in self.calls.at
            and held.allocation.run is None
            and held.allocation not in self._returned
        )

    def _shared_outputs(self, traced: RegionTrace) -> Counter[int]:
        """Of each class of a trace, how many calls return it to what holds it anyway."""
        found: Counter[int] = Counter()
        held = {each.allocation for each in self.held.values()}
        for made in held | self._returned:
            maker = self._caller.get(made.run)
            if maker is None or maker not in traced.calls or made.phase != "forward":
                continue
            holders = {each.node for each in self.readers.get(made.key, ())}
            number = traced.output_classes.get((made.step, made.item))
            is_shared = holders - {maker.place} or made in self._returned
            if number is not None and is_shared:
                found[number] += 1
        return found

    def _unmatched(self) -> tuple[tuple[str, str], ...]:
        names: dict[Any, set[str]] = {}
        for traced in self.calls.traces:
            values = traced.analysis.joint.graph.values
            known = names.setdefault(traced.region.policy, set())
            known.update(name for value in values for name in value.names)
        return tuple(
            (repr(policy), glob)
            for policy, known in names.items()
            for glob in policy.globs
            if not any(policy.glob_matches(glob, name) for name in known)
        )

    def _owner_of(self, allocation: Allocation) -> str:
        """Whose a storage is: the gradients', a region's, or nobody's."""
        if allocation in self.gradients:
            return GRADIENTS
        held = self.held.get(allocation.key)
        if held is not None and held.allocation is allocation:
            call = self.calls.at.get(held.node)
        else:
            call = self._caller.get(allocation.run)
        return OUTSIDE if call is None else call.name

    def _history(self) -> list[Counter[str]]:
        """The bytes of each owner after each event, without what waits elsewhere."""
        names = [calls[0].name for calls in self.calls.rows]
        live = Counter(dict.fromkeys([*names, OUTSIDE, GRADIENTS], 0))
        history: list[Counter[str]] = []
        for event in self.watch.events:
            if event.allocation not in self._away:
                live[self._owner_of(event.allocation)] += event.change
            history.append(live.copy())
        return history

    def _peak(self, history: Sequence[Counter[str]]) -> Peak:
        totals = [live.total() for live in history]
        place = totals.index(max(totals))
        made = self.watch.events[place].allocation
        node = None if made.node is None else self.names[made.node]
        call = self._caller.get(made.run)
        if call is None and made.node is not None:
            call = self.calls.at.get(made.node)  # what runs again tells of no program
        return Peak(
            size_bytes=totals[place],
            phase=made.phase,
            region="" if call is None else call.name,
            call=None if call is None else call.number,
            op=made.op if call is not None or node is None else node,
            source=made.source,
            groups=tuple(each for each in history[place].most_common() if each[1]),
        )

    def _timeline(self, history: Sequence[Counter[str]]) -> Timeline:
        places, events = _timeline_places(history), self.watch.events
        rows = [history[place].values() for place in places]
        times = [events[k].time_s if self.is_timed else float(k) for k in places]
        return Timeline(
            times_s=tuple(times),
            groups=tuple(history[0]),
            size_bytes=tuple(zip(*rows, strict=True)),
            num_forward=sum(place < self.num_forward for place in places),
            is_timed=self.is_timed,
        )


def _folded_values(counts: Counter[_V]) -> tuple[_V, ...]:
    """Equal values of so many calls as one, the largest first."""
    found: list[_V] = []
    for each, count in counts.items():
        figures = [k for k in ("size_bytes", "flops") if hasattr(each, k)]
        sums = {k: count * getattr(each, k) for k in figures}
        found.append(dataclasses.replace(each, count=count, **sums))
    return _largest_first(found)


def _largest_first(values: Iterable[_V]) -> tuple[_V, ...]:
    return tuple(sorted(values, key=lambda value: -value.size_bytes))


def _timeline_places(history: Sequence[Counter[str]]) -> Sequence[int]:
    """About `_MOST_POINTS` places of a timeline: of each stretch the highest and the last."""
    places = range(len(history))
    if len(places) <= _MOST_POINTS:
        return places
    size = -(-2 * len(places) // _MOST_POINTS)
    kept: set[int] = set()
    for first in places[::size]:
        stretch = places[first : first + size]
        kept |= {max(stretch, key=lambda place: history[place].total()), stretch[-1]}
    return sorted(kept)


def _repeated_flops(graph: Graph) -> int:
    return sum(step_flops(graph, value) for value in graph.values if value.is_repeat)


def _repeated_s(run: ProgramRun) -> float:
    values = run.graph.values
    return sum(time_s for step, time_s in run.times_s.items() if values[step].is_repeat)
