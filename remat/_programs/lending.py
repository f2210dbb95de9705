"""Programs that take what the program before them has recomputed, in one run of autograd.

Where an outer level differentiates a region, the derivative of its backward runs, and soon after
it that of its forward. Both recompute the forward. The second takes those values from the first,
which holds them: those of one region at a time, as in a backward of the first order. Of a stack of
regions only the last one's derivatives follow each other; those of the others come in the opposite
order, and what waits for them must be little in all.

What a program takes is known when it has run once after another: values are equal if their steps
are (`_graph.numbering`), and inputs if they are read alike from one memory that nobody has
written to since. What would raise the peak of the two programs by much is not held.
"""

from __future__ import annotations

import bisect
import collections
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from remat._graph import operators
from remat._graph.meta import TensorMeta, is_alike, layout_of
from remat._graph.numbering import Numbering
from remat._graph.values import Building, Graph, Ref, Value, prune, roots
from remat._partition.analysis import bytes_of
from remat._partition.peak import peak_of_run
from remat._torch import autograd, guards, levels

_VIEW: Any = torch.ops.aten.view.default
_VIEWS = (_VIEW, torch.ops.aten._unsafe_view.default)

_Run = Callable[[list[Tensor]], list[Any]]  # a function that empties a list of inputs
#: Which input of the program before each input is, None for another one.
_Places = tuple[int | None, ...]

# How much more may live than while two programs run that lend nothing, two heuristics: a part, by
# which the second derivative of a stack that keeps matrix products stays below the peak of one that
# keeps everything, or so little that it is not worth recomputing for.
_MOST_PART = 1 / 9
_FEW_BYTES = 2**13
_MOST_LOANS = 16  # how many programs back one may take from, a heuristic


def _identity(tensor: Tensor) -> Hashable:
    """What is the same of two inputs that are one; while it exists, no other storage is equal.

    Two that are laid out densely are one if their elements are, in whatever shape: a product of
    a stack waits as a matrix, and reaches the backward as a stack.
    """
    memory = StorageWeakRef(tensor.untyped_storage())
    shape, stride, *others = layout_of(tensor)
    spread = (tensor.numel(),) if tensor.is_contiguous() else (shape, stride)
    place = tensor.storage_offset(), spread, *others
    return (memory, *place, *levels.versions_of([tensor]))


class _Loan(NamedTuple):
    """What a program of a run of autograd holds for those after it."""

    lender: Lender
    places: dict[int, int]  # of its inputs, by their numbers
    values: dict[int, Tensor]  # by their places in the lender's graph


@final
class _Loans:
    """What the latest programs of one run of autograd hold, the latest last."""

    def __init__(self, task: int) -> None:
        self.task = task
        self.latest = collections.deque[_Loan](maxlen=_MOST_LOANS)
        self._numbers: dict[Hashable, int] = {}

    def numbers_of(self, inputs: Sequence[Tensor]) -> list[int]:
        """Equal numbers for inputs that are one, of whichever programs."""
        known = self._numbers
        return [known.setdefault(each, len(known)) for each in map(_identity, inputs)]

    def add(self, loan: _Loan) -> None:
        """Keeps a loan, in place of the oldest one, in which nothing stays."""
        if len(self.latest) == _MOST_LOANS:
            self.latest[0].values.clear()
        self.latest.append(loan)

    def release(self, most: float = -1) -> None:
        """Lets go of all but the latest loans of so many bytes, the very latest aside."""
        total = 0
        for loan in filter(lambda each: each.values, reversed(self.latest)):
            values = loan.values.values()
            total += sum(each.untyped_storage().nbytes() for each in values)
            if total > most and (most < 0 or loan is not self.latest[-1]):
                loan.values.clear()


class _Thread(threading.local):
    loans: _Loans | None = None


_thread = _Thread()


@final
class Lender:
    """A program that takes values from those before, and holds some for the next."""

    def __init__(self, graph: Graph, run_of: Callable[[Graph], _Run]) -> None:
        self.graph = graph  # what it computes
        #: The values that a program after it has asked for.
        self.lent: frozenset[int] = frozenset()
        self._run_of = run_of
        self._runs: dict[tuple[tuple[int, ...], frozenset[int]], _Run] = {}
        # By the program before, and which of its inputs, what is lent and what others lend.
        self._equal: weakref.WeakKeyDictionary[
            Lender, dict[Any, tuple[tuple[int, int], ...]]
        ] = weakref.WeakKeyDictionary()

    def consume(self, inputs: list[Tensor]) -> list[Any]:
        """The outputs of the program; empties the list."""
        task, loans = autograd.graph_task(), _thread.loans
        _thread.loans = None  # also if something below fails
        is_alone = task == -1 or not guards.are_plain(inputs)
        if loans is not None and (is_alone or loans.task != task):
            loans.release()
            loans = None
        if is_alone:
            return self._run((), frozenset())(inputs)
        loans = loans or _Loans(task)
        given = loans.numbers_of(inputs)
        taken, lent = self._take(loans, given), self.lent
        run = self._run(tuple(taken), lent)
        inputs += taken.values()
        # Only the list holds them from now on.
        del taken
        found = run(inputs)
        count = len(self.graph.outputs)
        values = dict(zip(sorted(lent), found[count:], strict=True))
        places = {number: place for place, number in enumerate(given)}
        loans.add(_Loan(self, places, values))
        loans.release(_FEW_BYTES)
        _thread.loans = loans
        if values:
            autograd.at_end_of_task(values.clear)
        return found[:count]

    def _take(self, loans: _Loans, given: Sequence[int]) -> dict[int, Tensor]:
        """What is held of the values that the programs before have in common with this one."""
        taken, claimed = dict[int, Tensor](), frozenset[int]()
        for loan in reversed(loans.latest):
            if loan.places.keys().isdisjoint(given):
                continue
            places = tuple(map(loan.places.get, given))
            is_next = loan is loans.latest[-1]
            pairs = self._pairs(loan.lender, places, claimed, is_next=is_next)
            if pairs:
                # One value may stand at several places.
                held = loan.values.copy()
                taken |= {own: held[theirs] for theirs, own in pairs if theirs in held}
                for theirs, _ in pairs:
                    loan.values.pop(theirs, None)
                claimed = claimed.union(own for _, own in pairs)
        return taken

    def _pairs(
        self, before: Lender, places: _Places, claimed: frozenset[int], *, is_next: bool
    ) -> tuple[tuple[int, int], ...]:
        """Values of a program before this one, which is asked for them, and the equal own ones.

        What was `claimed` is asked of a later one.
        """
        known, key = self._equal.setdefault(before, {}), (places, self.lent, claimed)
        if key not in known:
            known[key] = _equal_values(before.graph, self.graph, *key)
            wanted, alone = frozenset(pair[0] for pair in known[key]), self._alone
            # What waits for long must be little whatever runs in between.
            part = alone * _MOST_PART if is_next else 0
            before.lend(wanted, alone, max(part, _FEW_BYTES))
        return known[key]

    def lend(self, wanted: frozenset[int], next_bytes: int, more: float) -> None:
        """Holds these values too from the next run on: as many of the first as memory allows.

        `next_bytes` is what the program that asks for them needs if it takes none, `more` how much
        more may live than while the larger of both runs.
        """
        added = sorted(wanted - self.lent)
        most = max(self._alone, next_bytes) + more
        firsts = [(*self.lent, *added[: count + 1]) for count in range(len(added))]
        count = bisect.bisect_right(firsts, most, key=self._bytes)
        self.lent = self.lent.union(added[:count])

    @functools.cached_property
    def _alone(self) -> int:
        return self._bytes()

    def _bytes(self, lent: Sequence[int] = ()) -> int:
        """The most bytes that live while it runs, if it returns these values too."""
        graph = _lending(self.graph, (), lent)
        return bytes_of(graph, range(graph.num_inputs)) + peak_of_run(graph)

    def _run(self, taken: tuple[int, ...], lent: frozenset[int]) -> _Run:
        key = taken, lent
        if key not in self._runs:
            self._runs[key] = self._run_of(_lending(self.graph, taken, sorted(lent)))
        return self._runs[key]


def _lending(graph: Graph, taken: Sequence[int], lent: Sequence[int]) -> Graph:
    """The graph that takes some values after its inputs, and returns some after its outputs."""
    if not taken and not lent:
        return graph
    given = [*range(graph.num_inputs), *taken]
    inputs = [Value(None, meta=graph.values[index].meta) for index in given]
    new = Building(inputs, {index: place for place, index in enumerate(given)})
    for index in range(graph.num_inputs, len(graph.values)):
        if index not in new.places:
            new.copy(index, graph.values[index])
    return prune(new.graph(len(given), (*graph.outputs, *map(Ref, lent))))


def _equal_values(
    first: Graph,
    second: Graph,
    places: _Places,
    lent: frozenset[int],
    claimed: frozenset[int],
) -> tuple[tuple[int, int], ...]:
    """Values of the first graph, and those equal to them at which the second need not compute.

    `places` says which input of the first each of the second's is, None for another tensor;
    `lent` is what is wanted of the second beside its outputs, `claimed` what it need not compute
    anyhow.
    """
    known = {k: place for k, place in enumerate(places) if place is not None}
    line, numbering = Building(first.values, {}), Numbering()
    for index, value in enumerate(first.values):
        numbering.add(value, _before_views(first.values, index))
    ones = {numbering.numbers[index]: index for index in _lendable(first)}
    for index, value in enumerate(second.values):
        if index in known:
            # The other program's input may have another shape.
            value, line.places[index] = _reshaped(index, value.meta), known[index]
        line.copy(index, value)
        last = len(line.values) - 1
        numbering.add(line.values[last], _before_views(line.values, last))
    numbers = {k: numbering.numbers[line.places[k]] for k in _lendable(second)}
    equal = {k: ones[number] for k, number in numbers.items() if number in ones}
    seen = set[int]()
    pending = [*lent, *(ref.index for ref in second.outputs if ref is not None)]
    while pending:
        index = pending.pop()
        if index not in seen and index not in claimed:
            seen.add(index)
            pending += () if index in equal else second.values[index].uses
    return tuple((equal[index], index) for index in sorted(seen.intersection(equal)))


def _reshaped(index: int, meta: Any) -> Value:
    """The step that gives a value this shape."""
    return Value(_VIEW, (Ref(index), list(meta.shape)), meta=meta)


def _before_views(values: Sequence[Value], index: int) -> int | None:
    """What a value is again, if it is that in its own shape by one view after another."""
    meta = values[index].meta
    while values[index].op in _VIEWS:
        index = values[index].args[0].index
        if is_alike(values[index].meta, meta):
            return index
    return None


def _lendable(graph: Graph) -> list[int]:
    """The values made of others that own their memory and share it with no output."""
    owners, values = roots(graph), graph.values
    returned = {owners[ref.index] for ref in graph.outputs if ref is not None}
    return [
        index
        for index in range(graph.num_inputs, len(values))
        if owners[index] == index and index not in returned
        if isinstance(values[index].meta, TensorMeta) and values[index].uses
        if not operators.draws(values[index])
    ]
