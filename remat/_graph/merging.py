"""Two programs over the same inputs -> one that shares what both compute.

The outputs of the first keep their bits. Where the second computes what the first
computes too (one value number, see `_graph.numbering.value_numbers`), both read one value.
Occurrences are matched one to one, in order: a value that a program computes twice, as an
outer region's backward does for a region inside, is computed twice in the merged one, so
that inner regions still bound the peak (law 9).

The second program sets the order. What both compute comes where the second computes it. What
only the first computes comes as late as its readers permit, so that a value lives no longer
than both programs need it. Value numbering is Cocke and Schwartz's (1970); matching values by
occurrence is added here for recomputation.
"""

import collections
import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import final

from remat._graph import operators
from remat._graph.numbering import Numbering
from remat._graph.values import Building, Graph, Ref, Value, check, prune, roots


def merge(
    first: Graph, second: Graph, reads: Sequence[Ref | None], known: Graph | None = None
) -> Graph:
    """The program that returns the outputs of the first, then those of the second.

    If the first draws random numbers, the order of its steps counts. Then it runs as a whole
    before the second, and nothing is shared. `reads` says for each input of the second which
    value of the first it is; None for one that the first does not have, which becomes a further
    input. `known` is a program over the first's inputs whose outputs these are known to be, in
    their order: what the second reads instead of computing it.
    """
    line = _line_up(first, second, reads, known)
    if any(
        operators.is_rng_state(value.op)
        or (operators.draws(value) and not value.is_redraw)
        for value in first.values
    ):
        return _merged_graph(line, _Matched({}, {}, ()), [*line.first, *line.second])
    match = _match_steps(line)
    return _merged_graph(line, match, _step_order(line, match))


@final
@dataclasses.dataclass(frozen=True)
class _Aligned:
    """Both programs in a row, over the inputs of both."""

    #: The inputs, what the first's inputs are known to be, and the steps of each.
    values: tuple[Value, ...]
    numbers: tuple[int, ...]  # the value number of each
    num_inputs: int  # how many are inputs
    first: range  # where the first's steps are
    second: range  # where the second's steps are
    outputs: tuple[Ref | None, ...]  # the first's, then the second's
    #: Steps of the second that share storage with what it returns, which must be nobody else's.
    own: frozenset[int]


def _line_up(
    first: Graph, second: Graph, reads: Sequence[Ref | None], known: Graph | None
) -> _Aligned:
    pairs = zip(second.values, reads, strict=False)
    further = [value for value, ref in pairs if ref is None]
    line = Building([*first.values[: first.num_inputs], *further], {})
    num_inputs = len(line.values)
    numbering = Numbering(line.values)

    def append(
        graph: Graph, places: Mapping[int, int], like: Mapping[int, int]
    ) -> range:
        start, line.places = len(line.values), dict(places)
        for index in range(graph.num_inputs, len(graph.values)):
            line.copy(index, graph.values[index])
            numbering.add(line.values[-1], like.get(index))
        return range(start, len(line.values))

    inputs = {index: index for index in range(first.num_inputs)}
    if known is not None:
        what = {ref.index: k for k, ref in enumerate(known.outputs) if ref is not None}
        append(known, inputs, what)
    in_first = append(first, inputs, {})
    outputs = line.refs(first.outputs)
    rest = iter(range(first.num_inputs, num_inputs))
    seconds = {
        index: next(rest) if ref is None else line.places[ref.index]
        for index, ref in enumerate(reads)
    }
    in_second = append(second, seconds, {})
    owners = roots(second)
    handed_out = {owners[ref.index] for ref in second.outputs if ref is not None}
    return _Aligned(
        values=tuple(line.values),
        numbers=tuple(numbering.numbers),
        num_inputs=num_inputs,
        first=in_first,
        second=in_second,
        outputs=(*outputs, *line.refs(second.outputs)),
        own=frozenset(
            line.places[k] for k, owner in enumerate(owners) if owner in handed_out
        ),
    )


@final
@dataclasses.dataclass(frozen=True)
class _Matched:
    """What the second program need not compute."""

    #: For steps of the second, the input that each is known to be.
    stand_ins: Mapping[int, int]
    #: For steps of the first, the step of the second that is the same.
    twins: Mapping[int, int]
    steps: tuple[int, ...]  # what the second has to compute, twins included, in order


def _match_steps(line: _Aligned) -> _Matched:
    inputs = {line.numbers[index]: index for index in range(line.num_inputs)}
    stand_ins = {
        index: inputs[line.numbers[index]]
        for index in line.second
        if line.numbers[index] in inputs and index not in line.own
    }
    steps = _needed_steps(line, stand_ins)
    waiting = collections.defaultdict[int, collections.deque[int]](collections.deque)
    for index in steps:
        if index not in line.own:
            waiting[line.numbers[index]].append(index)
    twins: dict[int, int] = {}
    for index in line.first:
        same = waiting[line.numbers[index]]
        if same:
            twins[index] = same.popleft()
    return _Matched(stand_ins, twins, steps)


def _needed_steps(line: _Aligned, stand_ins: Mapping[int, int]) -> tuple[int, ...]:
    """The steps of the second that its outputs need; stand-ins need none."""
    needed = {ref.index for ref in line.outputs if ref is not None}
    needed.update(index for index in line.second if line.values[index].has_effect)
    for index in reversed(line.second):
        if index in needed and index not in stand_ins:
            needed.update(line.values[index].uses)
    return tuple(sorted(needed.intersection(line.second).difference(stand_ins)))


def _step_order(line: _Aligned, match: _Matched) -> list[int]:
    """The order of the second's steps, with the steps of the first alone put among them.

    Such a step comes just before its first reader. If only the caller reads it, it comes
    when the second has read one of the values that it needs for the last time, or when the
    last of these values is made; at the end if it needs none. The outputs of one operator
    are unpacked where the operator runs: see `_partition.cut.late`.
    """
    twins, values, end = match.twins, line.values, line.second.stop
    alone = [index for index in line.first if index not in twins]
    last = {use: index for index in match.steps for use in values[index].uses}
    soonest = dict(twins)
    until = {index: last.get(twin, twin) for index, twin in twins.items()}
    for index in alone:
        uses = [use for use in values[index].uses if use in soonest]
        soonest[index] = max((soonest[use] for use in uses), default=-1)
        until[index] = min((until[use] for use in uses), default=end)
    place: dict[int, int] = {}
    for index in reversed(alone):
        place.setdefault(index, max(soonest[index], until[index]))
        for use in values[index].uses:
            place[use] = min(place[index], place.get(use, end))
    for index in alone:
        if values[index].op is operator.getitem:
            maker = values[index].args[0].index
            place[index] = place.get(maker, soonest[maker])
    steps = [(index, False, index) for index in match.steps]
    steps += [(place[index], True, index) for index in alone]
    return [index for *_, index in sorted(steps)]


def _merged_graph(line: _Aligned, match: _Matched, order: Sequence[int]) -> Graph:
    is_late = any(line.values[index].is_backward for index in line.first)
    inputs = {index: index for index in range(line.num_inputs)}
    new = Building(line.values[: line.num_inputs], inputs | dict(match.stand_ins))
    firsts = {twin: index for index, twin in match.twins.items()}
    for index in order:
        value = line.values[index]
        if index in firsts:
            twin = line.values[firsts[index]]
            same = {"args": value.args, "kwargs": value.kwargs, "state": value.state}
            value = dataclasses.replace(twin, **same)
        elif index in line.second:
            # A rank counts the values of one function: the first program's.
            value = dataclasses.replace(value, is_backward=is_late, rank=-1)
        new.copy(index, value)
        if index in firsts:
            new.places[firsts[index]] = new.places[index]
    return check(prune(new.graph(line.num_inputs, line.outputs)))
