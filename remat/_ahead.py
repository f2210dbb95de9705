"""Brings what waits back before it is read: while one region's backward computes.

When the backward of a region begins, what the next one will read is sent for. The next one
is found in autograd's graph, in which every rank sees the same: not by the order of the
forwards, of which some may have been abandoned, on one rank before garbage was collected
and on another after it. So all ranks begin the same collectives in the same order.

At most two restorations are under way on a thread: that of the region whose backward runs,
and the next. They belong to one run of autograd; what it leaves is dropped.
"""

from __future__ import annotations

import heapq
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from remat import _compat
from remat.storage import Restoration, Stored

References = tuple[weakref.ref[Stored], ...]

_MOST_FLIGHTS = 2
_MOST_STEPS = 256  # a heuristic: how far to look for the next region, in nodes


class _Thread(threading.local):
    """What is under way on a thread.

    Attributes:
        task: the run of autograd to which it belongs.
        flights: the restorations, by what they restore.
    """

    def __init__(self) -> None:
        self.task = -1
        self.flights: dict[tuple[int, ...], Restoration] = {}


_thread = _Thread()


def references(storeds: Sequence[Stored]) -> References:
    """References to what a forward stored, if some of it comes back jointly.

    Only that is worth sending for.
    """
    if not any(map(_is_joint, storeds)):
        return ()
    if not _compat.in_backward():
        # Left by a backward that ended in an error outside of all regions.
        drop()
    return tuple(map(weakref.ref, storeds))


def start(node: Any) -> None:
    """Sends for what a node of autograd reads, and for what the next one will read.

    Args:
        node: whose backward begins; like all nodes of regions it has `waiting`.
    """
    if not node.waiting:
        return
    task = _compat.graph_task()
    if _thread.task != task:
        drop()
        _thread.task = task
        _compat.at_end_of_task(drop)
    _send_for(node.waiting)
    following = _following(node)
    if following is not None:
        _send_for(following.waiting)


def finish(storeds: Sequence[Stored]) -> list[Tensor]:
    """The values, sent for before or only now."""
    flight = _thread.flights.pop(_key(storeds), None)
    return (flight or Restoration(storeds)).finish()


def drop() -> None:
    """Forgets what is under way on this thread."""
    _thread.task = -1
    _thread.flights.clear()


def _send_for(waiting: References) -> None:
    storeds = [stored for each in waiting if (stored := each()) is not None]
    key = _key(storeds)
    is_freed = len(storeds) < len(waiting)
    if is_freed or key in _thread.flights or len(_thread.flights) >= _MOST_FLIGHTS:
        return
    _thread.flights[key] = Restoration(storeds)


def _following(node: Any) -> Any:
    """Of the regions to which this node's gradients flow, the one that autograd runs first.

    Autograd runs the node first that was made last, and so does this walk.
    """
    seen = {node}
    pending: list[tuple[int, int, Any]] = []
    for _ in range(_MOST_STEPS):
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                number = _compat.node_number(below)
                heapq.heappush(pending, (-number, len(seen), below))
        if not pending:
            return None
        node = heapq.heappop(pending)[2]
        if getattr(node, "waiting", ()):
            return node
    return None


def _key(storeds: Sequence[Stored]) -> tuple[int, ...]:
    return tuple(map(id, storeds))


def _is_joint(part: Stored | Tensor) -> bool:
    if isinstance(part, Tensor):
        return False
    return part.joint is not None or any(map(_is_joint, part.parts))
