"""What `scan` and `chain` share: whether to recompute at all, and how to run a stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from remat import _captures, _compat
from remat._api import Region, RematModule, is_inert
from remat._bind import Call, bind
from remat._entry import Entry
from remat._errors import MutationError, explain
from remat._graph import TensorMeta
from remat._numerics import Numerics
from remat._trace import is_running, lift
from remat.layers._links import Link
from remat.layers._scheduled import scheduled
from remat.layers._stack import Stack
from remat.schedules import Action


def records(functions: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Whether some reverse mode wants a gradient of a tensor or of what is captured."""
    if is_inert():
        return False
    if any(map(_compat.requires_grad_anywhere, tensors)):
        return True
    reached = _captures.survey(tuple(functions)).reached
    return any(map(_compat.requires_grad_anywhere, reached))


class Captured:
    """The tensors that the links of a stack reach, each once.

    Attributes:
        tensors: these.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def places(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Where these are; new ones come last."""
        return tuple(map(self._place, tensors))

    def _place(self, tensor: Tensor) -> int:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._places[id(tensor)]


def link_of(
    region: Region[..., Any] | RematModule,
    args: tuple[Any, ...],
    num_state: int,
    captured: Captured,
) -> tuple[Link, Entry]:
    """A stage, traced for arguments like these (fake ones will do).

    Raises:
        MutationError: it changes buffers, and would change them again.
    """
    entry, roots = region.entry_of(args, {})
    if entry.written:
        names = ", ".join(entry.labels[index] for index in entry.written)
        raise MutationError(
            explain(
                where=f"a stage of a scheduled stack, {region!r}",
                what=f"changes {names} in place.",
                why="A schedule runs a stage several times, from states of its own.",
                do="Put the module into eval mode, keep what changes in the carry, or "
                "leave the schedule out.",
            )
        )
    found = entry.gather(roots)
    assert found is not None, "the trace was found a moment ago"
    link = Link(entry.region, roots, entry.labels, num_state, captured.places(found))
    return link, entry


def run_scheduled(
    stack: Stack,
    actions: Sequence[Action],
    flows: tuple[bool, ...],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """What the stack returns, run by a schedule's actions."""
    region = scheduled(stack, actions, flows)
    if is_running():
        tensors = list(map(lift, tensors))
    call = Call(region, (), Numerics.current(), ())
    return [each for each in bind(call, tensors) if each is not None]


def metas_of(tensors: Sequence[Tensor]) -> list[TensorMeta]:
    """The metadata of tensors, and whether some reverse mode wants their gradient."""
    return [
        TensorMeta.of(each, requires_grad=_compat.requires_grad_anywhere(each))
        for each in tensors
    ]

