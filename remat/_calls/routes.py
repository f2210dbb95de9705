"""The short way of a call that is like one before: from its arguments to its node of autograd.

A call of a small block takes as long as some of its operators. Between two calls the block's
own work drives this code out of the processor's caches, so that what counts is less what it
does than how much of it there is: few functions, and checks in C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from remat._calls.entry import Entry
from remat._calls.guards import PLAINLY, TensorGuard, guard_of
from remat._calls.signature import CallSite
from remat._regions.protocol import Call
from remat._regions.rules import run_fast
from remat._regions.short_way import run_short
from remat._switches.blocks import departures
from remat._torch import guards

# What a route gives for a call that is not its own.
MISSED = object()

# An entry and the captured tensors of a call that it holds for.
Found = tuple[Entry, tuple[Tensor, ...]]


class Route(NamedTuple):
    """The way of the calls that are like one."""

    #: From the function and its (args, kwargs) to what the call returns, or `MISSED`.
    run: Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]
    entries: list[Entry]  # the traces of such calls
    #: How their tensors are told apart: plainly, or under reverse mode.
    tensor_guard: TensorGuard
    same_thread: Callable[[], bool]  # whether the switches are those that were in force


def route_of(site: CallSite, entries: list[Entry], tensor_guard: TensorGuard) -> Route:
    """The route of a call that `_calls.guards.is_simple` accepts, some tensor among its leaves.

    Other transforms and dispatch modes are not asked for: the check of its tensors fails
    there.
    """
    take = guard_of(site.args, site.kwargs, tensor_guard)
    same_thread = guards.thread_guard()
    numerics = site.numerics
    run_fast_path = run_fast if tensor_guard is PLAINLY else run_short

    def run(
        fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        taken = take(fun, args, kwargs)
        if taken is None or departures.count or not same_thread():
            return MISSED
        tensors, roots = taken
        entry = entries[0]
        captured = entry.gather(roots)
        if captured is None:
            found = first_holding(entries, roots)
            if found is None:
                return MISSED
            entry, captured = found
        fast_path = entry.fast_path(roots, numerics)
        if fast_path is not None:
            region, labels = entry.region, entry.labels
            call = Call(region, roots, numerics, labels, False, False, fast_path)
            returned = run_fast_path(call, (*tensors, *captured))
            if returned is not None:
                return entry.output.around(returned)
        if entry.wants_gradient:
            return entry.call(roots, (*tensors, *captured), numerics)
        return MISSED

    return Route(run, entries, tensor_guard, same_thread)


def first_holding(entries: list[Entry], roots: tuple[object, ...]) -> Found | None:
    """The first trace that holds, which is then the first of all."""
    for entry in entries:
        captured = entry.gather(roots)
        if captured is not None:
            entry.touch()
            if entry is not entries[0]:
                entries[0].touch()
                entries[:] = [entry, *(each for each in entries if each is not entry)]
            return entry, captured
    return None
