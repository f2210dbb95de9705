"""A forward that is one program, and the backwards that have followed it.

Nearly every backward of a region is like an earlier one. It takes less time to recognize it
than to look it up by what is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor

from remat._graph.joint import View
from remat._programs.program import Program, Quiet
from remat._regions.forwards import Forward
from remat._switches.numerics import Numerics
from remat._torch import guards

# The last block of a stack gets the cotangent of the loss, which is often an expanded number.
# The first block computes no gradient for its input. Others are alike.
_MOST_FOLLOWED = 4


class Followed(NamedTuple):
    """A backward that followed a forward on the fast path."""

    #: Whether cotangents have the metadata of those that it was for; fails under every
    #: transform and dispatch mode.
    check: Callable[..., bool]
    #: Which arguments' gradients it gave, as autograd says it.
    wanted: tuple[bool, ...]
    #: Whether the switches are those that were in force.
    same_thread: Callable[[], bool]
    #: From what waited, and the cotangents, to the gradients.
    quiet: Quiet


class FollowedAtLevel(NamedTuple):
    """A backward that followed a forward under one level of torch.func."""

    #: Whether cotangents have the metadata of those that it was for.
    check: Callable[..., bool]
    #: Which arguments' gradients it gave, as autograd says it.
    wanted: tuple[bool, ...]
    #: Whether the switches are those that were in force.
    same_thread: Callable[[], bool]
    #: The region of the gradients.
    region: Any
    #: Its program.
    path: FastPath
    #: The switches.
    numerics: Numerics


class Mapped(NamedTuple):
    """The program of a forward under one level of vmap."""

    #: The mapped dimension of each tensor that it takes, None where it has none.
    dims: tuple[int | None, ...]
    #: The size of that dimension.
    size: int
    #: Whether physical tensors have the metadata of those that it was made for.
    check: Callable[..., bool]
    #: The program.
    quiet: Quiet
    #: The mapped dimension of each tensor that it gives.
    out_dims: tuple[int | None, ...]


@final
class FastPath:
    """A forward that is one program, and the backwards that followed it.

    Attributes:
        quiet: the program.
        num_outputs: how many of what it gives are the outputs.
        num_kept: how many are these or saved values.
        num_states: how many are generator states: the rest.
        untracked: outputs that autograd must not take for views of something.
        views: how what is returned is made; None where the outputs are it.
        numerics: the switches under which it runs.
        followed: the latest backwards of each kind.
        followed_at_level: the same under one level of torch.func.
        mapped: the latest mapped programs.
    """

    __slots__ = (
        *("num_kept", "num_outputs", "num_states"),
        *("followed", "followed_at_level", "mapped"),
        *("numerics", "quiet", "untracked", "views"),
    )

    def __init__(self, forward: Forward, views: tuple[View, ...] | None) -> None:
        self.quiet = forward.program.quiet
        self.numerics = forward.numerics
        self.untracked = forward.untracked
        self.views = views
        self.num_outputs, _, num_saved, self.num_states = forward.shape
        self.num_kept = self.num_outputs + num_saved
        self.followed: tuple[Followed, ...] = ()
        self.followed_at_level: tuple[FollowedAtLevel, ...] = ()
        self.mapped: tuple[Mapped, ...] = ()

    def learn(
        self,
        wanted: tuple[bool, ...],
        cotangents: Sequence[Tensor | None],
        program: Program,
    ) -> None:
        """Notes the backward for these cotangents, if all came back."""
        present = [each for each in cotangents if each is not None]
        if len(present) == len(cotangents) and all(map(guards.is_plain, present)):
            check, same_thread = guards.tensor_guard(present), guards.thread_guard()
            known = Followed(check, wanted, same_thread, program.quiet)
            self.followed = (known, *self.followed[: _MOST_FOLLOWED - 1])

    def learn_at_level(self, known: FollowedAtLevel) -> None:
        """Notes a backward under one level of torch.func."""
        self.followed_at_level = (
            known,
            *self.followed_at_level[: _MOST_FOLLOWED - 1],
        )

    def learn_mapped(self, known: Mapped) -> Mapped:
        """Notes a mapped program."""
        self.mapped = (known, *self.mapped[: _MOST_FOLLOWED - 1])
        return known

    def mapped_for(
        self, dims: tuple[int | None, ...], size: int, physical: Sequence[Tensor]
    ) -> Mapped | None:
        """The mapped program for these tensors, if one is known."""
        for known in self.mapped:
            is_alike = known.dims == dims and known.size == size
            if is_alike and known.check(*physical):
                return known
        return None
