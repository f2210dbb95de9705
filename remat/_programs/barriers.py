"""Keeps a compiler from undoing the recomputation of a backward program.

A compiler that sees forward and backward in one graph finds that the recomputation repeats
the forward, and keeps the forward's values instead (common-subexpression elimination). Its
scheduler may also run a recomputation long before the backward needs it. So a step that
reads only values of the forward gets a copy of its smallest input. The operator that makes
the copy, `remat.hold`, also takes a cotangent: the copy cannot be made before that
cotangent is there, and no compiler can know that it equals the original. A step that
repeats an earlier step of the same program, as an outer region's backward does for a region
inside, reads a copy that takes the result of the step before it.

Only the graph that a compiler gets has these copies. `jax.checkpoint(prevent_cse=True)` does
the same with XLA's optimization barrier.
"""

import operator

from torch import Tensor

from remat._graph import operators
from remat._graph.meta import TensorMeta, copied_as_it_lies
from remat._graph.numbering import Numbering
from remat._graph.values import Graph, Ref, Value, check, renumbered, roots
from remat._partition.analysis import bytes_of
from remat._torch import schemas, tracer


def _hold(value: Tensor, until: Tensor) -> Tensor:
    return copied_as_it_lies(value)


HOLD = schemas.define("hold", "(Tensor value, Tensor until) -> Tensor", _hold, _hold)


def _hold_mapped(
    _: object, dims: tuple[int | None, ...], value: Tensor, until: Tensor
) -> tuple[Tensor, int | None]:
    return HOLD(value, until), dims[0]


schemas.register_vmap("hold", _hold_mapped)


def opaque_copy(tensor: Tensor) -> Tensor:
    """A copy, which a compiler cannot undo, of a tensor that is about to be overwritten.

    A compiler could move a `clone` into the backward, where the tensor is overwritten.
    """
    return HOLD(tensor, tensor) if tracer.is_in_compiler() else tensor.clone()


def with_barriers(graph: Graph, num_saved: int, num_cotangents: int) -> Graph:
    """A backward program (saved values, operands, cotangents -> gradients) with barriers.

    They are copies (`remat.hold`) that a compiler cannot see through.
    """
    writing = _BarrierWriter(graph, num_saved, num_cotangents)
    for index in range(graph.num_inputs, len(graph.values)):
        if not writing.is_view(index):
            writing.add(index)
    outputs = tuple(ref and Ref(writing.place(ref.index)) for ref in graph.outputs)
    return check(Graph(tuple(writing.values), graph.num_inputs, outputs))


class _BarrierWriter:
    """Writes the new program step by step.

    A view is written where it is read, as a view of a value or of the value's copy.
    """

    def __init__(self, graph: Graph, num_saved: int, num_cotangents: int) -> None:
        self._graph, self._old = graph, graph.values
        self._owners = roots(graph)
        self._num_inputs = graph.num_inputs
        self._num_saved = num_saved
        self.values = list(graph.values[: graph.num_inputs])  # the new program, so far
        # Where values of the old program are in the new one; a view, by where its owner is.
        self._places = {index: index for index in range(graph.num_inputs)}
        self._views: dict[tuple[int, int], int] = {}
        # Where the copies are.
        self._held: dict[int, int] = {}
        first = graph.num_inputs - num_cotangents
        # What depends on a cotangent, and the last of it, in the new program.
        self._late = set(range(first, graph.num_inputs))
        self._latest = first
        self._numbers = Numbering(self.values)

    def is_view(self, index: int) -> bool:
        """Whether a step of the old program makes no new memory."""
        return self._owners[index] != index

    def place(self, index: int, copied: int | None = None) -> int:
        """Where a value is in the new program; a view is written if need be.

        `copied` is the value whose copy is to be read in its place, if anyone's.
        """
        owner = self._owners[index]
        base = self._held[owner] if owner == copied else self._places[owner]
        if not self.is_view(index):
            return base
        if (index, base) not in self._views:
            view = self._write(self._renamed(index, copied))
            self._views[index, base] = view
        return self._views[index, base]

    def add(self, index: int) -> None:
        """Writes a step that makes new memory, from a copy where it has to be."""
        copied = self._copied(index)
        self._places[index] = self._write(self._renamed(index, copied))

    def _copied(self, index: int) -> int | None:
        """The value whose copy a step has to read; None if the step needs no copy."""
        value = self._old[index]
        if value.op is operator.getitem:
            return None
        if operators.draws(value) and not value.is_redraw:
            return None
        owners = sorted({self._owners[use] for use in value.uses})
        is_late = not self._late.isdisjoint([self._places[each] for each in owners])
        if not is_late:
            owners = [each for each in owners if each < self._num_inputs]
        if not owners or (is_late and not value.is_repeat):
            return None
        known: list[int | None] = [each for each in owners if each in self._held]
        for choice in [None, *known] if is_late else known:
            if not value.is_repeat or not self._numbers.knows(
                self._renamed(index, choice)
            ):
                return choice
        return self._hold(owners, value)

    def _hold(self, owners: list[int], reader: Value) -> int:
        owner = min(owners, key=lambda each: bytes_of(self._graph, [each]))
        args = (Ref(self._places[owner]), Ref(self._latest))
        meta = self._old[owner].meta
        assert isinstance(meta, TensorMeta), f"%{owner} is read whole"
        held = Value(HOLD, args, meta=meta, is_backward=reader.is_backward)
        self._held[owner] = self._write(held)
        if not self._num_saved <= owner < self._num_inputs:
            # Later steps read the copy, so that the original can be freed.
            self._places[owner] = self._held[owner]
        return owner

    def _renamed(self, index: int, copied: int | None) -> Value:
        value = self._old[index]
        places = {use: self.place(use, copied) for use in value.uses}
        return renumbered(value, places)

    def _write(self, value: Value) -> int:
        place = len(self.values)
        self.values.append(value)
        self._numbers.add(value)
        if not self._late.isdisjoint(value.uses):
            self._late.add(place)
            if isinstance(value.meta, TensorMeta):
                self._latest = place
        return place
