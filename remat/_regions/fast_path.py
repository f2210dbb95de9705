"""A forward that is one program, and the backwards that have followed it.

Nearly every backward of a region is like an earlier one. It takes less time to recognize it
than to look it up by what is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, final

from torch import Tensor

from remat._graph.joint import View
from remat._programs.program import Quiet
from remat._regions.forwards import Forward
from remat._switches.numerics import Numerics
from remat._torch import guards

_T = TypeVar("_T")

# The last block of a stack gets the cotangent of the loss, which is often an expanded number.
# The first block computes no gradient for its input. Others are alike.
_MOST_KNOWN = 4


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

    @classmethod
    def of(
        cls,
        wanted: tuple[bool, ...],
        cotangents: Sequence[Tensor],
        pulled: tuple[Any, Forward],
        numerics: Numerics,
    ) -> Followed:
        """Of the region for these cotangents, and its forward."""
        check, same_thread = guards.tensor_guard(cotangents), guards.thread_guard()
        region, forward = pulled
        path = FastPath(forward, None)
        return cls(check, wanted, same_thread, region, path, numerics)


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
        self.followed_at_level: tuple[Followed, ...] = ()
        self.mapped: tuple[Mapped, ...] = ()


def latest(known: _T, others: tuple[_T, ...]) -> tuple[_T, ...]:
    """What is known now, the oldest of which goes when there are many."""
    return (known, *others[: _MOST_KNOWN - 1])
