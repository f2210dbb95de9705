"""The short way of a call that is like one before: from its arguments to its node of autograd.

A call of a small block takes as long as some of its operators. Between two calls the block's
own work drives this code out of the processor's caches, so that what counts is less what it
does than how much of it there is: few functions, and checks in C.

A *guard* checks that a call has the signature of an earlier one, by a walk over the call's
containers, generated for their structure, and by one check of all tensors with torch's own
guards. Nothing is hashed. A call that no guard accepts gets a full signature. A guard holds
metadata, static values and types; it keeps no object of the user alive.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast, final

from torch import Tensor

from remat._calls.entry import Entry, clock
from remat._calls.signature import CallSite, static_key
from remat._captures.contents import shows_contents
from remat._regions.protocol import Call
from remat._regions.rules import run_fast
from remat._regions.short_way import run_short
from remat._switches.blocks import departures
from remat._torch import guards

_Args = tuple[Any, ...]

# From a function and its (args, kwargs) to the tensors among the leaves, in their order, and
# the roots: the function, and the leaves to be looked into. None if it is another call.
Guard = Callable[
    [object, _Args, Mapping[str, Any]],
    "tuple[tuple[Tensor, ...], tuple[object, ...]] | None",
]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class TensorGuard:
    """How a guard tells tensors apart."""

    #: Whether it can tell one from all that are unlike it.
    is_told: Callable[[Tensor], bool]
    #: The check that given tensors are like these.
    guard: Callable[[Sequence[Tensor]], Callable[..., bool]]


#: Where neither a transform nor a mode is active.
PLAINLY = TensorGuard(guards.is_plain, guards.tensor_guard)

#: Where reverse mode of torch.func is the innermost transform.
BY_WRAPPERS = TensorGuard(guards.is_told_by_wrapper, guards.wrapped_guard)


def tensor_guard_here() -> TensorGuard | None:
    """How guards tell tensors apart in this thread's state; None if they cannot."""
    if guards.is_quiet():
        return PLAINLY
    return BY_WRAPPERS if guards.is_under_reverse_mode() else None


def guard_of(
    args: _Args,
    kwargs: Mapping[str, Any],
    objects: Sequence[object] = (),
    tensor_guard: TensorGuard = PLAINLY,
) -> Guard | None:
    """Recognizes calls that have the signature of this one; None if a guard cannot.

    It can if the call is made of tuples, lists, dicts, and leaves that it tells apart; `objects`
    are those that are looked into.
    """
    return _GuardWriter(objects, tensor_guard).function(args, kwargs)


@final
class _GuardWriter:
    def __init__(self, objects: Sequence[object], tensor_guard: TensorGuard) -> None:
        self._known = objects
        self._told = tensor_guard
        self._tensors: list[Tensor] = []
        self._places: list[str] = []
        self._objects: list[str] = []
        self._lines: list[str] = []
        self._space: dict[str, Any] = {"static_key": static_key}

    def function(self, args: _Args, kwargs: Mapping[str, Any]) -> Guard | None:
        """The function that recognizes the containers and the leaves of this call."""
        if not (self._tree("args", args) and self._tree("kwargs", dict(kwargs))):
            return None
        self._space["check"] = self._told.guard(self._tensors)
        self._require(f"check({', '.join(self._places)})")
        tensors, roots = _tuple(self._places), _tuple(["fun", *self._objects])
        lines = [*self._lines, f"return {tensors}, {roots}"]
        body = "".join(f"    {line}\n" for line in lines)
        text = f"def take(fun, args, kwargs):\n{body}"
        exec(compile(text, "<remat guard>", "exec"), self._space)
        return self._space["take"]

    def _tree(self, place: str, tree: Any) -> bool:
        """Writes the checks of a part of the call; False if it cannot be told apart."""
        if isinstance(tree, Tensor):
            # The check at the end refuses an object that is in two places.
            for known, first in zip(self._tensors, self._places, strict=True):
                if known is tree:
                    self._require(f"{place} is {first}")
                    return True
            self._tensors.append(tree)
            self._places.append(place)
            return self._told.is_told(tree)
        kind = cast("type[object]", type(tree))
        if kind in {tuple, list}:
            name = self._constant(kind)
            self._require(f"type({place}) is {name} and len({place}) == {len(tree)}")
            return self._items(place, place, tree)
        if kind is dict:
            keys = self._constant(tuple(tree))
            same = f"tuple({place}) == {keys}" if tree else f"not {place}"
            self._require(f"type({place}) is dict and {same}")
            return self._items(place, f"{place}.values()", list(tree.values()))
        if (key := static_key(tree)) is not None:
            self._require(f"static_key({place}) == {self._constant(key)}")
            return True
        self._objects.append(place)
        self._require(f"type({place}) is {self._constant(kind)}")
        is_object = any(tree is each for each in self._known)
        is_object = is_object and not isinstance(tree, type)
        return is_object and shows_contents(kind)

    def _items(self, place: str, source: str, items: Sequence[Any]) -> bool:
        if not items:
            return True
        names = [f"{place}_{index}" for index in range(len(items))]
        self._lines.append(f"{', '.join(names)}, = {source}")
        return all(map(self._tree, names, items))

    def _require(self, clause: str) -> None:
        self._lines.append(f"if not ({clause}): return None")

    def _constant(self, value: object) -> str:
        name = f"c{len(self._space)}"
        self._space[name] = value
        return name


def _tuple(names: Sequence[str]) -> str:
    """A tuple of these names in the text of a guard."""
    return "(" + "".join(f"{name}, " for name in names) + ")"


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


def route_of(
    site: CallSite, entries: list[Entry], tensor_guard: TensorGuard
) -> Route | None:
    """The route of a call, some tensor among its leaves; None if no guard recognizes it.

    Other transforms and dispatch modes are not asked for: the check of its tensors fails there.
    """
    take = guard_of(site.args, site.kwargs, site.objects, tensor_guard)
    if take is None:
        return None
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
                if not entry.passed:
                    return entry.output.around(returned)
                return entry.result(returned, roots)
        if entry.wants_gradient:
            return entry.call(roots, (*tensors, *captured), numerics)
        return MISSED

    return Route(run, entries, tensor_guard, same_thread)


def first_holding(entries: list[Entry], roots: tuple[object, ...]) -> Found | None:
    """The first trace that holds, which is then the first of all."""
    for entry in entries:
        captured = entry.gather(roots)
        if captured is not None:
            entry.used = next(clock)
            if entry is not entries[0]:
                entries[:] = [entry, *(each for each in entries if each is not entry)]
            return entry, captured
    return None
