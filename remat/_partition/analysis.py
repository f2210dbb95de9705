"""What a policy and the walk need to know of a joint graph.

A decision belongs to a *class* of equal values (see `_graph.numbering`), so that a
recomputation that an inner region left in the backward half stops at what an outer policy
saves; nothing else is merged, so that inner regions still bound the peak (law 9).
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable
from typing import Any, cast, final

from remat import policies
from remat._graph import operators
from remat._graph.flops import step_flops
from remat._graph.joint import Joint
from remat._graph.meta import TensorMeta
from remat._graph.numbering import value_numbers
from remat._graph.values import Graph, Ref, by_sizes, needed_for, roots, step_behind
from remat._torch import sizes
from remat._torch.taking_functions import Applied

Decisions = dict[int, policies.Save]  # for each class that may be saved how it waits


@final
@dataclasses.dataclass(frozen=True)
class Analysis:
    """What the walk needs to know of a joint graph."""

    joint: Joint
    numbers: tuple[int, ...]  # the class of each value
    #: For each class the forward value in it that takes least to run beside the outputs; of
    #: these one that the backward reads: through another a second derivative would flow twice.
    members: dict[int, int]
    roots: tuple[int, ...]  # for each value the one whose storage it shares
    forward: tuple[int, ...]  # the forward values that are not inputs, in order

    @functools.cached_property
    def views(self) -> dict[int, policies.Value]:
        """What a policy is asked about: class -> the value as the policy sees it."""
        graph, names = self.joint.graph, _class_names(self)
        found: dict[int, policies.Value] = {}
        for index in filter(self.is_saveable, self.forward):
            if self.roots[index] == index:
                number, is_result = self.numbers[index], index in self.leaving
                value = _policy_value(graph, index, names[number])
                found[number] = dataclasses.replace(value, is_result=is_result)
        return found

    @property
    def named_operands(self) -> dict[int, policies.Value]:
        """The operands that have a name, as a policy sees them."""
        graph, names = self.joint.graph, _class_names(self)
        return {
            index: _policy_value(graph, index, names[self.numbers[index]])
            for index in range(self.joint.num_operands)
            if names[self.numbers[index]]
        }

    @functools.cached_property
    def ranks(self) -> dict[int, int]:
        """For each class the place of its first forward value among `forward`."""
        places = {index: rank for rank, index in enumerate(self.forward)}
        return {number: places[index] for number, index in self.members.items()}

    @functools.cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """For each value those whose numbers it reads: walked again for each cut."""
        return tuple(
            tuple(use for use in value.uses if use not in self.sized[index])
            for index, value in enumerate(self.joint.graph.values)
        )

    @functools.cached_property
    def sized(self) -> tuple[frozenset[int], ...]:
        """For each value those of which it reads the sizes alone.

        What is drawn into, or drawn by, is left as it is: under vmap each example has its own.
        """
        graph, none = self.joint.graph, frozenset[int]()
        draws = [k for k, each in enumerate(graph.values) if operators.draws(each)]
        drawn = needed_for(graph, draws)
        return tuple(
            none if index in drawn else by_sizes(value, graph.values)
            for index, value in enumerate(graph.values)
        )

    @functools.cached_property
    def checks(self) -> tuple[int, ...]:
        """The operators of the backward that only check (is this matrix singular?)."""
        joint = self.joint
        known = {*range(joint.num_operands), *joint.cotangents}
        others = set(range(joint.graph.num_inputs)) - known
        found: list[int] = []
        for index, value in enumerate(joint.graph.values):
            if others.intersection(self.uses[index]):
                others.add(index)
            elif value.is_backward and operators.is_check(value.op):
                found.append(index)
        return tuple(found)

    @functools.cached_property
    def leaving(self) -> frozenset[int]:
        """The values that are returned, or read outside of the torch function that made them."""
        joint, values = self.joint, self.joint.graph.values
        returned = (*joint.outputs, *(new for _, new in joint.mutations))
        found = {self.roots[ref.index] for ref in returned}
        for index in self.forward:
            for root in (self.roots[use] for use in self.uses[index]):
                if values[root].function != values[index].function:
                    found.add(root)
        return frozenset(found)

    def is_saveable(self, index: int) -> bool:
        """Whether a forward value may wait for the backward."""
        value = self.joint.graph.values[index]
        is_value = isinstance(value.meta, TensorMeta) and self._varies[index]
        return is_value and not operators.is_rng_state(value.op)

    @functools.cached_property
    def _varies(self) -> list[bool]:
        # Constants, which depend on no input, and draws from keys alone are recomputed.
        found: list[bool] = []
        for value in self.joint.graph.values:
            varies = value.op is None or operators.draws(value)
            varies = varies or any(found[use] for use in value.uses)
            found.append(varies and not operators.is_keyed(value.op))
        return found


def analyze(joint: Joint) -> Analysis:
    """Numbers the values of a joint graph and finds its classes."""
    values = joint.graph.values
    numbers = value_numbers(joint.graph)
    forward = tuple(
        index
        for index, value in enumerate(values)
        if value.op is not None and not value.is_backward
    )
    distances = _distances(joint)
    read = {use for value in values if value.is_backward for use in value.uses}
    members: dict[int, int] = {}
    for index in sorted(forward, key=lambda each: (distances[each], each not in read)):
        members.setdefault(numbers[index], index)
    return Analysis(joint, numbers, members, roots(joint.graph), forward)


def _distances(joint: Joint) -> list[int]:
    """How many steps each value is from what the forward runs, whatever is saved.

    A value that a function computes twice may be dead once: nobody reads it, or the mean
    that a norm computes with it.
    """
    values = joint.graph.values
    run = {ref.index for ref in (*joint.outputs, *(new for _, new in joint.mutations))}
    found = [0] * len(values)
    for index, value in reversed([*enumerate(values)]):
        if index in run or (value.has_effect and not value.is_backward):
            run.update({index}, value.uses)
    for index, value in enumerate(values):
        if value.op is not None and index not in run:
            found[index] = 1 + max((found[use] for use in value.uses), default=0)
    return found


def _class_names(analysis: Analysis) -> dict[int, tuple[str, ...]]:
    """The names of each class: its members', their views', and their siblings'."""
    found: dict[int, dict[str, None]] = {}
    values = analysis.joint.graph.values
    for index, value in enumerate(values):
        for alias in (index, analysis.roots[index]):
            number = analysis.numbers[alias]
            found.setdefault(number, {}).update(dict.fromkeys(value.names))
    for index, value in enumerate(values):
        # The outputs of one operator share their names, so that attention's
        # log-sum-exp is saved with its output.
        if value.op is operator.getitem:
            made_by = found[analysis.numbers[value.args[0].index]]
            made_by.update(found[analysis.numbers[index]])
    for index, value in enumerate(values):
        if value.op is operator.getitem and analysis.roots[index] == index:
            made_by = found[analysis.numbers[value.args[0].index]]
            found[analysis.numbers[index]].update(made_by)
    return {number: tuple(names) for number, names in found.items()}


def _policy_value(graph: Graph, index: int, names: tuple[str, ...]) -> policies.Value:
    value = graph.values[index]
    meta = value.meta
    assert isinstance(meta, TensorMeta)
    made_by = step_behind(value, graph.values)
    op = made_by.op
    return policies.Value(
        op=op.operator if isinstance(op, Applied) else op,
        names=names,
        shape=meta.hints,
        dtype=meta.dtype,
        size_bytes=meta.size_bytes,
        flops=step_flops(graph, made_by),
        source=value.source,
        function=value.function,
        args=_policy_arguments(graph, made_by.args),
        kwargs=_policy_arguments(graph, made_by.kwargs),
    )


def _policy_arguments(graph: Graph, tree: Any) -> Any:
    """An operator's arguments as a policy sees them."""
    if isinstance(tree, Ref):
        return _policy_arguments(graph, graph.values[tree.index].meta)
    if isinstance(tree, TensorMeta):
        stride = tuple(map(sizes.hint, tree.stride))
        return policies.Operand(tree.hints, tree.dtype, tree.device, stride)
    if isinstance(tree, (tuple, list)):
        return tuple(_policy_arguments(graph, item) for item in cast("list[Any]", tree))
    return sizes.hint(tree)


def bytes_of(graph: Graph, indices: Iterable[int]) -> int:
    """Bytes of these values of a graph; what is no tensor has none."""
    metas = [graph.values[index].meta for index in indices]
    return sum(meta.size_bytes for meta in metas if isinstance(meta, TensorMeta))


def forward_flops(analysis: Analysis) -> int:
    """Floating point operations of the forward, by torch's own formulas."""
    graph = analysis.joint.graph
    return sum(step_flops(graph, graph.values[index]) for index in analysis.forward)
