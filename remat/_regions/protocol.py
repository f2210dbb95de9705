"""A call of a region, and what `_regions.rules` asks of one, whether it is traced or runs again."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self

from torch import Tensor

from remat._graph.joint import View
from remat._graph.meta import Layout, TensorMeta, whole_layout
from remat._partition.stages import Stages
from remat._regions.forwards import Calls, FastPath, Forward, Results
from remat._regions.functions import Batch, Roots
from remat._switches.numerics import Numerics
from remat.policies import AbstractPolicy
from remat.storage import AbstractStorage


class Asked(NamedTuple):
    """Identifies one backward of a region. It is a tuple because every backward hashes one."""

    #: Of the cotangents, None for one that is missing.
    layouts: tuple[Layout | None, ...]
    wanted: tuple[bool, ...]  # which operands' gradients are wanted
    num_states: int  # how many generator states the forward recorded
    numerics: Numerics  # the switches in force when the backward runs
    #: Whether the backward may take values from the one before (`_programs.lending`).
    is_borrowing: bool = False

    def without_gradients(self) -> Asked:
        """The same for cotangents that are not to be differentiated."""
        layouts = [each and (*each[:4], False, *each[5:]) for each in self.layouts]
        return self._replace(layouts=tuple(layouts))

    def taken_whole(self) -> Asked:
        """The same with each DTensor among the cotangents as if it were a plain tensor."""
        layouts = [each and whole_layout(each) for each in self.layouts]
        return self._replace(layouts=tuple(layouts))

    @property
    def cotangents(self) -> tuple[TensorMeta | None, ...]:
        return tuple([TensorMeta(*each) if each else None for each in self.layouts])


class Batched(NamedTuple):
    """A region over physical tensors, and where its results are mapped."""

    region: Region
    #: The mapped dimension of each tensor of `Results` in a row; None means the first of each.
    #: A region without a program may tell them when it has run.
    dims: Sequence[int | None] | None


class Opened(NamedTuple):
    """A region that takes all that a program reads, and returns all that it computes."""

    region: Region  # takes what waited for it, then the operands of the original region
    #: How many outputs come first; what waits for a backward is the rest. None for a region
    #: that saves nothing, which is opened as it is.
    num_outputs: int | None
    #: The outputs for which nothing waits. Plain autograd has nodes of theirs alone: a hook of one
    #: would run with None where a gradient goes to what waits.
    alone: frozenset[int] = frozenset()


class Pushed(NamedTuple):
    """A region that returns its outputs and, after these, the tangents of some of them."""

    region: Region  # takes the operands of the original region, then their tangents
    moved: tuple[int, ...]  # which outputs have a tangent


class Region(Protocol):
    """A region: a traced one, one that runs again, or a scheduled stack."""

    @property
    def num_leading(self) -> int: ...
    @property
    def keeps(self) -> bool: ...
    @property
    def runs_first(self) -> bool: ...
    @property
    def states(self) -> tuple[int, ...]: ...
    @property
    def inputs(self) -> Mapping[int, AbstractStorage]: ...
    @property
    def calls(self) -> Calls: ...
    @property
    def views(self) -> Sequence[View] | None: ...
    @property
    def num_draws(self) -> int: ...
    @property
    def rules(self) -> frozenset[str]: ...
    @property
    def was_recorded(self) -> bool: ...
    @property
    def policy_text(self) -> str: ...
    @property
    def is_derivative(self) -> bool: ...
    @property
    def explained(self) -> Explained | None: ...
    @property
    def held_apart(self) -> tuple[Tensor, ...]: ...
    def reached(self, roots: Roots) -> Sequence[bool] | None: ...
    def one_program(self, roots: Roots, numerics: Numerics) -> Forward | None: ...
    def fast_path(self, roots: Roots, numerics: Numerics) -> FastPath | None: ...
    def forward(
        self, roots: Roots, save: bool
    ) -> Callable[[Sequence[Tensor], Numerics], Results]: ...
    def shows_saved(self, roots: Roots) -> bool | None: ...
    def note_recorded(self, roots: Roots) -> bool | None: ...
    def recorded(self, roots: Roots) -> Region: ...
    def saving_nothing(self, roots: Roots) -> Region: ...
    def opened(
        self, roots: Roots, wants: tuple[bool, ...], has_tangent: tuple[bool, ...]
    ) -> Opened | None: ...
    def vjp(self, roots: Roots, asked: Asked) -> Region: ...
    def jvp(
        self, roots: Roots, has_tangent: tuple[bool, ...], num_states: int
    ) -> tuple[Region, tuple[int, ...] | None]: ...
    def pushed(
        self, roots: Roots, has_tangent: tuple[bool, ...], save: bool
    ) -> Pushed | None: ...
    def batched(self, roots: Roots, batch: Batch, save: bool) -> Batched: ...


class Explained(Region, Protocol):
    """A region with a trace of its own, which says what is saved and what is recomputed."""

    @property
    def operands(self) -> tuple[TensorMeta, ...]: ...
    @property
    def policy(self) -> AbstractPolicy: ...
    def stages(self, roots: Roots) -> Stages: ...
    def forward(self, roots: Roots, save: bool) -> Forward: ...


class Call(NamedTuple):
    """One call of a region: what stays the same at every level."""

    region: Region  # what is called: a `Region`, or one that runs again
    roots: Roots  # the function and the objects among its arguments
    numerics: Numerics  # the switches in force on this thread
    labels: tuple[str, ...] = ()  # what messages call the operands
    #: Whether its own reverse derivative is refused, so nothing is saved for it.
    is_last: bool = False
    #: Whether the reverse derivative of its gradient is refused.
    is_first_order: bool = False
    #: What runs if the call needs no more than one program; else None.
    fast_path: FastPath | None = None
    #: Below which level of torch.func what waited for it has gradients of its own.
    connected_below: int = sys.maxsize
    #: From which level of torch.func on none was there when it drew: there its draws repeat.
    drawn_below: int = sys.maxsize
    #: Whether its backward may take values from the one before (`_programs.lending`).
    is_borrowing: bool = False

    def of(self, region: Region) -> Call:
        """The call of a region derived from this one's."""
        return self._replace(region=region, fast_path=None)


@dataclasses.dataclass(frozen=True)
class WithoutProgram:
    """What regions that run Python instead of a program have in common: no program, no trace."""

    # Without annotations, so that these are no fields.
    states = ()
    inputs = MappingProxyType[int, AbstractStorage]({})
    calls = Calls()
    num_draws = 0
    rules = frozenset[str]()
    was_recorded = False
    explained = None

    @property
    def held_apart(self) -> tuple[Tensor, ...]:
        """What waits for its backward outside of autograd: nothing."""
        return ()

    @property
    def runs_first(self) -> bool:
        """False: which operands the outputs depend on is known before a run."""
        return False

    def one_program(self, *_: object, **__: object) -> None:
        """None, as for each way that takes a program."""

    reached = fast_path = opened = pushed = shows_saved = note_recorded = one_program

    def recorded(self, roots: Roots) -> Self:
        """Itself: its gradients are made anew at each order."""
        return self

    saving_nothing = recorded
