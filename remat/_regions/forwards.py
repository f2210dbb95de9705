"""A region's forward: one program that runs below every transform, and its results."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor

from remat._errors import NotReplicatedError
from remat._graph.joint import Joint
from remat._graph.meta import TensorMeta
from remat._programs.program import Program
from remat._programs.verification import Verification
from remat._regions.waiting import resumed, wait
from remat._switches.numerics import Numerics
from remat._torch import autograd, dtensor
from remat.storage import AbstractStorage, Place


class Results(NamedTuple):
    """The results of one run of a region's forward, at the level where it ran."""

    outputs: Sequence[Tensor]  # the region's outputs
    #: The new values of the operands that the function changed.
    mutations: Sequence[Tensor] = ()
    #: What the backward reads besides the operands; no gradient flows there.
    saved: Sequence[Tensor] = ()
    states: Sequence[Tensor] = ()  # generator states that the draws started from
    #: For each output whether it can have a cotangent; None means all can.
    flows: tuple[bool, ...] | None = None
    #: For each operand whether some output depends on it; None means all.
    reached: tuple[bool, ...] | None = None

    @property
    def flat(self) -> list[Tensor]:
        """All tensors in a row."""
        return [*self.outputs, *self.mutations, *self.saved, *self.states]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """How many there are of each."""
        kinds = (self.outputs, self.mutations, self.saved, self.states)
        outputs, mutations, saved, states = map(len, kinds)
        return outputs, mutations, saved, states

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        tensors: Sequence[Tensor],
        flows: tuple[bool, ...] | None,
    ) -> Results:
        """The inverse of `flat` and `shape`."""
        first = shape[0]
        if first == len(tensors):
            return cls(tensors, (), (), (), flows)
        second = first + shape[1]
        third = second + shape[2]
        return cls(
            tensors[:first],
            tensors[first:second],
            tensors[second:third],
            tensors[third:],
            flows,
        )


@final
class Count:
    """Numbers calls; a call in which ranks turn out to differ gets no number.

    All ranks raise in such a call, so their numbers stay equal.
    """

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def next(self) -> Generator[int]:
        """The number of the call that stores inside."""
        number = next(self._numbers)
        try:
            yield number
        except NotReplicatedError:
            self._numbers = itertools.count(number)
            raise


@final
class Calls:
    """Numbers the calls of a function in which something was stored, over all its traces.

    Attributes:
        inputs: those in which inputs were.
        saved: those in which saved values were.
        are_like_outputs: whether all cotangents were laid out as the function's outputs;
            None before its first backward.
    """

    __slots__ = ("are_like_outputs", "inputs", "saved")

    def __init__(self) -> None:
        self.inputs = Count()
        self.saved = Count()
        self.are_like_outputs: bool | None = None

    def note(self, is_like_outputs: bool) -> None:
        """Notes of a backward whether its cotangents are laid out as the function's outputs."""
        self.are_like_outputs = is_like_outputs and self.are_like_outputs is not False


@final
@dataclasses.dataclass(frozen=True)
class Forward:
    """A program for a region's forward."""

    program: Program  # (leading tensors, operands) -> the tensors of `Results` in a row
    shape: tuple[int, int, int, int]  # how many of each kind
    #: The switches under which it runs; its casts are part of the program.
    numerics: Numerics
    num_leading: int = 0  # how many tensors it reads before the operands
    #: For each output whether a cotangent can come back; None means all.
    flows: tuple[bool, ...] | None = None
    #: Outputs that autograd must not take for views of something.
    untracked: tuple[int, ...] = ()
    #: Compares what was saved with what is recomputed, if asked for.
    verification: Verification | None = None
    #: How each saved value waits; empty if all are kept as they are.
    storages: tuple[AbstractStorage, ...] = ()
    #: The dimensions that vmap added to each saved value; empty if none.
    mapped: tuple[tuple[int, ...], ...] = ()
    #: Numbers the runs that store something.
    calls: Count = dataclasses.field(default_factory=Count)
    #: How each output and mutation is spread, as a DTensor; None where none is, nor any
    #: operand. The program itself computes with the parts of this rank.
    placements: tuple[Any, ...] | None = None

    @property
    def is_one_run(self) -> bool:
        """Whether a call is one run of the program, all of whose outputs have gradients."""
        return self.is_one_program and self.num_leading == 0

    @property
    def is_one_program(self) -> bool:
        """The same, where it may read tensors before the operands."""
        return self.is_alone and self.shape[1] == 0 and self.flows is None

    @property
    def is_alone(self) -> bool:
        """Whether a run under its own switches is the program's run, and nothing else."""
        return (
            self.verification is None
            and not self.storages
            and not self.numerics.autocast
            and self.placements is None
        )

    def __call__(self, tensors: Sequence[Tensor], numerics: Numerics) -> Results:
        """Runs it on tensors that no transform has wrapped, where `numerics` is in force."""
        if self.numerics.are_met_by(numerics):
            found = self._run(tensors)
        else:
            with self.numerics.settled():
                found = self._run(tensors)
        return Results.of(self.shape, found, self.flows)

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        tensors = resumed(tensors)
        if self.placements is not None:
            tensors = list(map(dtensor.local_part, tensors))
        if self.verification is not None:
            self.verification(tensors)
        found = self.program(tensors)
        for index in self.untracked:
            found[index] = autograd.untracked_alias(found[index])
        for index, placement in enumerate(self.placements or ()):
            if any(found[index] is each for each in tensors):
                # An operand's own part: the operand must stay what it is.
                found[index] = autograd.untracked_alias(found[index])
            if placement is not None:
                found[index] = dtensor.in_place_of(found[index], placement)
        if self.storages:
            with self.calls.next() as call:
                self._store(found, call)
        return found

    def _store(self, found: list[Tensor], call: int) -> None:
        """Replaces the saved values by their stored forms."""
        first = self.shape[0] + self.shape[1]
        for place, storage in enumerate(self.storages):
            added = self.mapped[place] if self.mapped else ()
            where = Place(
                place, call, mapped=added, may_differ=self.placements is not None
            )
            found[first + place] = wait(found[first + place], storage, where)


def placements_of(
    joint: Joint, operands: Sequence[TensorMeta]
) -> tuple[Any, ...] | None:
    """The DTensor placements of outputs and mutations; None if nothing is a DTensor."""
    written = [operands[operand].placement for operand, _ in joint.mutations]
    found = (*joint.placements, *written)
    each = (*found, *(meta.placement for meta in operands))
    return None if all(placement is None for placement in each) else found
