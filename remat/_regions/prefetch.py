"""Prefetch: starts to restore stored values while the backward before theirs computes.

When the backward of a region begins, it also starts to restore what the next regions will
read. The next regions are found in autograd's graph, which is the same on every rank, so
that all ranks begin the same collectives in the same order. The order of the forwards would
not do: some of them may have been abandoned, and ranks collect garbage at different times.

A region is restored as many regions ahead as its storages say, at the least: one for what
is gathered from other ranks, `prefetch` for what is offloaded. Each thread has at most as
many restorations under way as the largest of these numbers, of regions that are near enough,
besides that of the region whose backward runs. Restorations belong to one run of autograd;
those that the run does not use are dropped at its end.
"""

import heapq
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor

from remat._torch import autograd
from remat.storage import Restoration, Stored

_MOST_STEPS = 256  # a heuristic: how far to look for the next regions, in nodes


@final
class Awaited(NamedTuple):
    """What a region's backward will read, if some of it can be restored ahead."""

    references: tuple[weakref.ref[Stored], ...]  # to what its forward stored
    num_ahead: int  # how many regions before that backward it may be restored


class _Thread(threading.local):
    def __init__(self) -> None:
        self.task = -1  # the run of autograd to which it belongs
        # The restorations, by what they restore.
        self.flights: dict[tuple[int, ...], Restoration] = {}


_thread = _Thread()
# How many regions ahead any may be restored that this process has met: a walk ends there.
_distances = {1}


def awaited(storeds: Sequence[Stored]) -> Awaited | None:
    """What a forward stored, if some of it is restored jointly; None if none is."""
    joints = [joint for stored in storeds for joint in stored.joints]
    if not joints:
        return None
    if not autograd.in_backward():
        # A backward that failed outside all regions may have left restorations.
        drop()
    num_ahead = min(joint.num_ahead for joint in joints)
    _distances.add(num_ahead)
    return Awaited(tuple(map(weakref.ref, storeds)), num_ahead)


def start(node: Any) -> None:
    """Starts to restore what a node of autograd reads, and what the next ones will read."""
    if node.waiting is None:
        return
    task = autograd.graph_task()
    if _thread.task != task:
        drop()
        _thread.task = task
        autograd.at_end_of_task(drop)
    following = itertools.islice(_following(node), max(_distances))
    wanted = [node.waiting]
    wanted += [each for far, each in enumerate(following, 1) if far <= each.num_ahead]
    most = max(each.num_ahead for each in wanted)
    for each in wanted:
        _send_for(each, most)


def finish(storeds: Sequence[Stored]) -> list[Tensor]:
    """The restored values; starts the restoration now if `start` has not."""
    flight = _thread.flights.pop(_awaited_key(storeds), None)
    return (flight or Restoration(storeds)).finish()


def drop() -> None:
    """Drops the restorations that are under way on this thread."""
    _thread.task = -1
    _thread.flights.clear()


def _send_for(waiting: Awaited, most: int) -> None:
    storeds = [stored for each in waiting.references if (stored := each()) is not None]
    key = _awaited_key(storeds)
    is_freed = len(storeds) < len(waiting.references)
    is_full = len(_thread.flights) > most
    if not is_freed and not is_full and key not in _thread.flights:
        _thread.flights[key] = Restoration(storeds)


def _following(node: Any) -> Iterator[Awaited]:
    """The regions to which this node's gradients flow, in the order of their backwards.

    Autograd runs the node that was made last first, and this walk does the same.
    """
    seen = {node}
    pending: list[tuple[int, int, Any]] = []
    for _ in range(_MOST_STEPS):
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                number = autograd.node_number(below)
                heapq.heappush(pending, (-number, len(seen), below))
        if not pending:
            return
        node = heapq.heappop(pending)[2]
        waiting: Awaited | None = getattr(node, "waiting", None)
        if waiting is not None:
            yield waiting


def _awaited_key(storeds: Sequence[Stored]) -> tuple[int, ...]:
    return tuple(map(id, storeds))
