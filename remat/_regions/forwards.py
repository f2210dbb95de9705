"""A region's forward: one program that runs below every transform, and its results.

What a function returned may be an output of its region, a view of one or of an argument, or
either without its gradient: it is made from these anew, so that it shares their storage. The
fast path is a forward that is one program, and the backwards that have followed it: nearly
every backward of a region is like an earlier one, which takes less time to recognize than to
look up by what is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, final

from torch import Tensor

from remat._errors import NotReplicatedError
from remat._graph.joint import Joint, View
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph
from remat._programs.program import Program, Quiet
from remat._programs.verification import Verification
from remat._regions.waiting import resume_differentiably, resumed, wait
from remat._switches.numerics import Numerics
from remat._torch import autograd, dtensor, levels
from remat.storage import AbstractStorage, Place

_T = TypeVar("_T")

# The last block of a stack gets the cotangent of the loss, which is often an expanded number.
# The first block computes no gradient for its input. Others are alike.
_MOST_KNOWN = 4


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
        return [*self.outputs, *self.mutations, *self.saved, *self.states]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.outputs), len(self.mutations), len(self.saved), len(self.states)

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        tensors: Sequence[Tensor],
        flows: tuple[bool, ...] | None,
    ) -> Results:
        """The inverse of `flat` and `shape`."""
        rest = iter(tensors)
        parts = [[*itertools.islice(rest, count)] for count in shape]
        return cls(*parts, flows=flows)


@final
class CallCounter:
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
    """Numbers the calls of a function in which something was stored, over all its traces."""

    def __init__(self) -> None:
        self.inputs = CallCounter()  # those in which inputs were
        self.saved = CallCounter()  # those in which saved values were
        # Whether all cotangents were laid out like the outputs; None before any backward.
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
    calls: CallCounter = dataclasses.field(default_factory=CallCounter)
    #: How each output and mutation is spread, as a DTensor; None where none is, nor any
    #: operand. The program itself computes with the parts of this rank.
    placements: tuple[Any, ...] | None = None
    #: If made from another's program: how what is returned is made of outputs and operands.
    views: tuple[View, ...] = ()
    #: A program that computes the leading tensors from the operands; None if there is none.
    origins: Graph | None = None

    @property
    def chosen(self) -> tuple[int, ...]:
        """Which of the tensors that `views` makes are the outputs."""
        whole = [view.output if view.path is None else None for view in self.views]
        return tuple(map(whole.index, range(self.shape[0])))

    @property
    def is_one_program(self) -> bool:
        """Whether a call is one run of the program, all of whose outputs have gradients."""
        return self.is_alone and self.shape[1] == 0 and self.flows is None

    @property
    def is_alone(self) -> bool:
        """Whether a run under its own switches is the program's run, and nothing else."""
        return (
            self.verification is None and not self.storages and self.placements is None
        )

    def __call__(self, tensors: Sequence[Tensor], numerics: Numerics) -> Results:
        """Runs it on tensors that no transform has wrapped, where `numerics` is in force."""
        if self.numerics.are_met_by(numerics):
            found = self._run(tensors)
        else:
            with self.numerics.settled() as turn:
                found = self._run(tensors, turn)
        return Results.of(self.shape, found, self.flows)

    def _run(
        self, tensors: Sequence[Tensor], turn: Callable[[bool], None] | None = None
    ) -> list[Tensor]:
        tensors = resumed(tensors)
        if self.placements is not None:
            tensors = list(map(dtensor.local_part, tensors))
        if self.verification is not None:
            self.verification(tensors)
        program = self.program
        found = program.in_turns(tensors, turn) if turn else program(tensors)
        for index in self.untracked:
            found[index] = autograd.untracked_alias(found[index])
        for index, placement in enumerate(self.placements or ()):
            if any(found[index] is each for each in tensors):
                # An operand's own part: the operand must stay what it is.
                found[index] = autograd.untracked_alias(found[index])
            if placement is not None:
                found[index] = dtensor.in_place_of(found[index], placement)
        if not self.storages:
            return found
        first = self.shape[0] + self.shape[1]
        with self.calls.next() as call:
            for place, storage in enumerate(self.storages):
                added = self.mapped[place] if self.mapped else ()
                is_part = self.placements is not None
                where = Place(place, call, mapped=added, may_differ=is_part)
                found[first + place] = wait(found[first + place], storage, where)
        return found


def placements_of(
    joint: Joint, operands: Sequence[TensorMeta]
) -> tuple[Any, ...] | None:
    """The DTensor placements of outputs and mutations; None if nothing is a DTensor."""
    written = [operands[index].placement for index in joint.mutated]
    found = (*joint.placements, *written)
    each = (*found, *(meta.placement for meta in operands))
    return None if all(placement is None for placement in each) else found


def make_views(
    views: Sequence[View],
    outputs: Sequence[Tensor],
    operands: Sequence[Tensor] | Mapping[int, Tensor],
) -> list[Tensor | None]:
    """What is returned, each from the tensor that it is or shares its storage with."""
    made: list[Tensor | None] = []
    for view in views:
        if view.output is not None:
            tensor = outputs[view.output]
        elif view.operand is not None:
            tensor = resume_differentiably(operands[view.operand])
        else:
            made.append(None)
            continue
        if view.is_cut:
            tensor = tensor.detach()
        elif view.is_detached and tensor.requires_grad:
            tensor = levels.without_gradient(tensor)
        if view.path is not None:
            (tensor,) = _view_program(view.path).consume_with_gradient([tensor])
        made.append(tensor)
    return made


@functools.lru_cache(maxsize=1024)
def _view_program(path: Graph) -> Program:
    return Program(path, "view")


class Followed(NamedTuple):
    """A backward that followed a forward on the fast path, plainly or under one level."""

    #: Whether cotangents have the metadata of those that it was for; where these were plain,
    #: it fails under every transform and dispatch mode.
    check: Callable[..., bool]
    wanted: tuple[bool, ...]  # whose gradients it gave, as autograd says it
    same_thread: Callable[[], bool]  # whether the switches are those that were in force
    region: Any  # that of the gradients
    path: FastPath  # its program
    numerics: Numerics  # the switches


class Mapped(NamedTuple):
    """The program of a forward under one level of vmap."""

    #: The mapped dimension of each tensor that it takes, None where it has none.
    dims: tuple[int | None, ...]
    size: int  # of that dimension
    #: Whether physical tensors have the metadata of those that it was made for.
    check: Callable[..., bool]
    quiet: Quiet  # the program
    #: The mapped dimension of each tensor that it gives.
    out_dims: tuple[int | None, ...]


@final
@dataclasses.dataclass(slots=True, eq=False)
class FastPath:
    """A forward that is one program, and the backwards that followed it."""

    quiet: Quiet  # the program
    numerics: Numerics  # the switches under which it runs
    #: Outputs that autograd must not take for views of something.
    untracked: tuple[int, ...]
    num_outputs: int  # how many of what it gives are the outputs
    num_kept: int  # how many are these or saved values
    num_states: int  # how many are generator states: the rest
    #: How what is returned is made; None where the outputs are it.
    views: tuple[View, ...] | None
    #: Whether a gradient comes back to each operand that requires grad.
    reaches_all: bool = True
    followed: tuple[Followed, ...] = ()  # the latest backwards that nothing recorded
    #: Those under one level of torch.func, whose cotangents may be plain, too.
    followed_at_level: tuple[Followed, ...] = ()
    mapped: tuple[Mapped, ...] = ()  # the latest mapped programs

    @classmethod
    def of(
        cls,
        forward: Forward,
        views: tuple[View, ...] | None = None,
        *,
        reaches_all: bool = True,
    ) -> FastPath:
        count, _, num_saved, num_states = forward.shape
        kept, quiet = count + num_saved, forward.program.quiet
        shape = (forward.untracked, count, kept, num_states)
        return cls(quiet, forward.numerics, *shape, views, reaches_all)


def latest(known: _T, others: tuple[_T, ...]) -> tuple[_T, ...]:
    """What is known now, the oldest of which goes when there are many."""
    return (known, *others[: _MOST_KNOWN - 1])
