"""The traces of one code with one set of options, and which calls they are known to serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor

from remat import _compat
from remat._entry import Entry
from remat._families import Family
from remat._forward import Calls
from remat._guards import Guard, is_simple
from remat._numerics import Numerics
from remat._signature import Signature


@final
@dataclasses.dataclass(frozen=True, slots=True)
class CacheInfo:
    """What the traces of one function's code have cost.

    Attributes:
        hits: calls that found a trace.
        misses: calls that had to trace.
        currsize: traces kept.
        trace_s: seconds spent tracing, for each trace kept. The first trace of a
            process also loads torch's tracer, about a second, which is not counted.
    """

    hits: int
    misses: int
    currsize: int
    trace_s: tuple[float, ...]


class Cache:
    """The traces of one code with one set of options."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all of them."""
        self.entries: dict[Hashable, list[Entry]] = {}
        self.families: dict[Hashable, Family] = {}
        self.calls = Calls()
        self.guards: list[Known] = []
        self.hits = 0
        self.misses = 0
        self.statics_seen: dict[int, set[Hashable]] = {}

    def find(self, key: Hashable, roots: tuple[object, ...]) -> Found | None:
        """The first trace that holds for these roots, and its captured tensors."""
        entries = self.entries.get(key)
        return None if entries is None else holding(entries, roots)

    def recognized(self, known: Known) -> None:
        """Counts a hit; the next layer is likely to be called like this one."""
        self.hits += 1
        if known is not self.guards[0]:
            self.guards = [known, *_without(known, self.guards)]

    def learn(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        signature: Signature,
        numerics: Numerics,
    ) -> None:
        """Recognizes calls like this one from now on, if it is one of the first kinds."""
        entries = self.entries.get((signature.key, numerics))
        if (
            entries is not None
            and len(self.guards) < _MOST_GUARDS
            and all(known.entries is not entries for known in self.guards)
            and signature.wants_gradient
            and _compat.is_quiet()
            and is_simple((args, kwargs))
        ):
            self.guards.append(Known(Guard(args, kwargs), numerics, entries))


class Known(NamedTuple):
    """Calls that are recognized: some tensor wants a gradient, no object is looked into.

    Attributes:
        guard: recognizes them.
        numerics: the switches that were in force.
        entries: their traces.
    """

    guard: Guard
    numerics: Numerics
    entries: list[Entry]


# An entry and the captured tensors of a call that it holds for.
Found = tuple[Entry, tuple[Tensor, ...]]
_MOST_GUARDS = 8  # a heuristic: each one that fails costs half a microsecond


def holding(entries: list[Entry], roots: tuple[object, ...]) -> Found | None:
    """The first trace that holds, which is then the first of all."""
    for entry in entries:
        captured = entry.gather(roots)
        if captured is not None:
            if entry is not entries[0]:
                entries[:] = [entry, *_without(entry, entries)]
            return entry, captured
    return None


def _without(one: object, things: Sequence[Any]) -> list[Any]:
    return [each for each in things if each is not one]
