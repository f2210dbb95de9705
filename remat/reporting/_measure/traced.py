"""What traces tell about regions: bytes, work, and the effect of other decisions; their calls."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, final

from remat._captures.contents import code_key
from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph, roots
from remat._partition.budgets import model_of
from remat._partition.costs import work_of
from remat._partition.cut import backward_graph, permitted_members
from remat._regions.functions import Roots
from remat._regions.out_of_memory import name_of
from remat._regions.protocol import Explained
from remat.policies import Save
from remat.reporting._measure.step import Node
from remat.reporting._measure.watch import ProgramRun
from remat.storage import Held, Keep
from remat.storage._contract import held_in


@final
class Waits(NamedTuple):
    """Bytes of what waits."""

    held_bytes: int = 0  # on the device of the value
    elsewhere_bytes: int = 0  # in host memory, on another device, or in a file

    @classmethod
    def sum(cls, several: Iterable[Waits]) -> Waits:
        return cls(*map(sum, zip(Waits(), *several, strict=True)))


@final
class Effect(NamedTuple):
    """The effect of decisions, in all calls of a region together."""

    saved_bytes: int  # what waits because of them, beyond what lives anyway
    work: int  # of what is recomputed, see `work_of`


@final
class Described(NamedTuple):
    """Values of a region that other decisions may be about, as code tells them apart."""

    names: tuple[str, ...]  # the names of each of them
    op: str  # the operator that makes each, or one that does
    source: str  # the user's line

    @property
    def key(self) -> Hashable:
        """What identifies the values in code: their names, else operator and line."""
        return self.names or (self.op, self.source)

    def __str__(self) -> str:
        """The values in a sentence: their name, or their operator and line."""
        if self.names:
            return f"`{', '.join(self.names)}`"
        return f"{self.op} at {self.source}" if self.source else self.op


@final
class RegionCall:
    """A node of a region."""

    def __init__(self, place: int, node: Node) -> None:
        assert node.call is not None
        self.place = place  # of the node among all
        self.call = node.call  # the node's own description
        function = self.call.roots[0]
        self.module = getattr(function, "__self__", function)
        self.name = name_of(function)
        if self.call.region.is_derivative:
            self.name += ", differentiated"
        self.policy = self.call.region.policy_text
        # Equal for calls that are one row: one code under one policy.
        self.key: Hashable = (code_key(function), self.policy, self.name)
        self.traced: RegionTrace | None = None  # None if it has none of its own
        self.number = 0  # its place among the calls of its row


@final
class RegionTrace:
    """Answers questions about a region's trace."""

    def __init__(self, region: Explained, roots: Roots) -> None:
        self.calls: list[RegionCall] = []
        # Of a class, how many calls return it to what holds it anyway: the next region,
        # an operator of torch's, or the caller.
        self.shared: Counter[int] = Counter()
        self.region = region
        self._roots = roots
        stages = region.stages(roots)
        self.analysis = stages.analysis
        self.cut = stages.cut  # where forward and backward part
        self._decisions = stages.decisions
        self._model = model_of(self.analysis, lambda _: (Keep(),), work_of)
        # The classes that may be saved, and that are recomputed if nothing is.
        self.choices = tuple(item.number for item in self._model.items)
        self._held_in = functools.cache(held_in)

    @property
    def outcome(self) -> Effect:
        """What is saved and recomputed now."""
        return self.at({*self._decisions})

    @property
    def forward_graph(self) -> Graph:
        return self.region.forward(self._roots, True).program.graph

    @functools.cached_property
    def output_classes(self) -> dict[tuple[int, int], int]:
        """The class of each output, by the step of the forward program that makes it.

        The key also has the index among the tensors that the operator returned. A copy
        of an output is left out, because the value itself does not live with it.
        """
        program = self.forward_graph
        joint, owners = self.analysis.joint, roots(program)
        found: dict[tuple[int, int], int] = {}
        for own, ref in zip(program.outputs, joint.outputs, strict=False):
            assert own is not None
            value, made = self.analysis.roots[ref.index], owners[own.index]
            maker, item = program.values[made], 0
            if joint.graph.values[value].op != maker.op:
                continue
            if maker.op is operator.getitem:
                made, item = maker.args[0].index, maker.args[1]
            found[made, item] = self.analysis.numbers[value]
        return found

    def waits(self, position: int) -> Waits | None:
        """What a saved value, or an operand after these, holds; None if numbers decide."""
        saved = self.cut.saved
        if position < len(saved):
            held = self._saved(saved[position])
        else:
            operand = position - len(saved)
            storage = self.region.inputs.get(operand, Keep())
            held = self._held_in(storage, self.region.operands[operand])
        return None if held.is_bound else Waits(held.size_bytes, held.elsewhere_bytes)

    def _saved(self, index: int) -> Held:
        """What a value of the joint graph holds, also if it is not saved now."""
        meta = self.analysis.joint.graph.values[index].meta
        assert isinstance(meta, TensorMeta)
        decision = self._decisions.get(self._root_number(index), Save())
        return self._held_in(decision.storage, meta)

    @property
    def forward_work(self) -> int:
        """Work of the whole forward in all calls, see `work_of`."""
        graph = self.analysis.joint.graph
        works = (work_of(graph, index) for index in self.analysis.forward)
        return len(self.calls) * sum(works)

    @functools.cached_property
    def consumers(self) -> Mapping[int, tuple[str, ...]]:
        """The backward's operators that read a saved value or an operand, by its place.

        The operands follow the saved values. A step that is recomputed is called
        "again aten.mm", and stands after those of the derivative.
        """
        joint = self.analysis.joint
        graph = backward_graph(joint, self.cut, self.cut.saved, joint.gradients)
        owners = roots(graph)
        found: dict[int, dict[str, None]] = {}
        for value in sorted(
            graph.values[graph.num_inputs :], key=operator.attrgetter("is_repeat")
        ):
            if operators.viewed(value) is None and value.op is not operator.getitem:
                name = operators.short_name(value.op)
                name = f"again {name}" if value.is_repeat else name
                for use in value.uses:
                    found.setdefault(owners[use], {})[name] = None
        return {position: tuple(names) for position, names in found.items()}

    def saved_value(self, position: int) -> tuple[str, str, str, str]:
        """Names, operator, line and storage of the saved value at this place."""
        index, graph = self.cut.saved[position], self.analysis.joint.graph
        number = self._root_number(index)
        view = self.analysis.views[number]
        made = operators.made_by(graph.values[index], graph.values)
        waits = repr(self._decisions[number].storage)
        return ", ".join(view.names), made, view.source, waits

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The classes that the backward computes again, in the order of the forward."""
        repeated = {self.analysis.numbers[index] for index in self.cut.repeats}
        return tuple(number for number in self.analysis.views if number in repeated)

    def at(self, saveable: set[int]) -> Effect:
        """What would be saved and recomputed if these classes were permitted."""
        choice = [0 if number in saveable else None for number in self.choices]
        outcome = self._model.problem.outcome(choice)
        size_bytes, calls = 0, len(self.calls)
        for number, option in zip(self.choices, outcome.choice, strict=True):
            if option is not None:
                held = self._saved(self._saved_as[number])
                size_bytes += held.size_bytes * (calls - self.shared[number])
        return Effect(size_bytes, calls * outcome.cost)

    @functools.cached_property
    def _saved_as(self) -> dict[int, int]:
        """For each class that may be saved its value that would be: a matmul's last view."""
        every = dict.fromkeys(self.analysis.views, Save())
        members = permitted_members(self.analysis, every)
        return {self._root_number(member): member for member in members}

    def changes(self, *, saves: bool) -> Iterator[tuple[Described, Effect]]:
        """What saving recomputed values too would give, or recomputing saved ones.

        Values of one key change together; they come in the order of the forward.
        """
        permitted = {*self._decisions}
        saved = {self._root_number(index) for index in self.cut.saved}
        numbers = {*self.recomputed} - permitted if saves else saved & permitted
        alike: dict[Hashable, list[int]] = {}
        for number in filter(numbers.__contains__, self.analysis.views):
            alike.setdefault(self.described(number).key, []).append(number)
        for several in alike.values():
            then = self.at(permitted.symmetric_difference(several))
            yield self.described(several[0]), then

    def described(self, number: int) -> Described:
        """What one class is in words."""
        view = self.analysis.views[number]
        return Described(view.names, self.made_by(number), view.source)

    def made_by(self, number: int) -> str:
        """The operator that makes a class."""
        values = self.analysis.joint.graph.values
        return operators.made_by(values[self.analysis.members[number]], values)

    def _root_number(self, index: int) -> int:
        return self.analysis.numbers[self.analysis.roots[index]]


@final
class RegionCalls:
    """All calls of regions that one backward will meet."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        # By the place of the node.
        self.at = {k: RegionCall(k, node) for k, node in enumerate(nodes) if node.call}
        rows: dict[Hashable, list[RegionCall]] = {}
        traces: dict[int, RegionTrace] = {}
        for call in self.at.values():
            row = rows.setdefault(call.key, [])
            call.number = len(row)
            row.append(call)
            region = call.call.region.explained
            if region is not None:
                if id(region) not in traces:
                    traces[id(region)] = RegionTrace(region, call.call.roots)
                call.traced = traces[id(region)]
                call.traced.calls.append(call)
        # The calls of one code under one policy together.
        self.rows = list(rows.values())
        self.traces = list(traces.values())
        # Different functions of one name, and one under several policies, get a number.
        names: dict[str, list[list[RegionCall]]] = {}
        for row in self.rows:
            names.setdefault(row[0].name, []).append(row)
        for alike in names.values():
            for number, row in enumerate(alike if len(alike) > 1 else (), start=1):
                for call in row:
                    call.name = f"{call.name} #{number}"

    def callers(
        self, runs: Sequence[ProgramRun]
    ) -> dict[ProgramRun | None, RegionCall | None]:
        """The call of each run of a region's program, if it has one.

        Forwards run in the order of the calls; for a backward, the run has its node.
        """
        waiting = {each.forward_graph: iter(each.calls) for each in self.traces}
        found: dict[ProgramRun | None, RegionCall | None] = {}
        for run in runs:
            found[run] = None if run.node is None else self.at.get(run.node)
            if run.phase == "forward":
                found[run] = next(waiting.get(run.graph, iter(())), None)
        return found
