"""The traces of one code with one set of options, and the routes of calls to them."""

import dataclasses
import weakref
from collections.abc import Hashable
from typing import final

from remat._calls.entry import Entry
from remat._calls.families import Family
from remat._calls.guards import TensorGuard, is_simple, tensor_guard_here
from remat._calls.retraces import History
from remat._calls.routes import Found, Route, first_holding, route_of
from remat._calls.signature import CallSite
from remat._regions.forwards import Calls
from remat._switches.numerics import Numerics


@final
@dataclasses.dataclass(frozen=True, slots=True)
class CacheInfo:
    """What the traces of one function's code have cost.

    Attributes:
        hits: calls that found a trace.
        misses: calls that had to trace.
        maxsize: how many traces are kept at most; those used longest ago are dropped.
        currsize: traces kept.
        trace_s: seconds spent tracing, for each trace kept. The first trace of a
            process also loads torch's tracer, about a second, which is not counted.
    """

    hits: int
    misses: int
    maxsize: int
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
        self.routes: list[Route] = []
        self.routed = 0  # calls that a route has served
        self._routed_before = 0
        self.hits = 0  # other calls that found a trace
        self.misses = 0
        self.is_told = False  # that one of these has grown long
        self.histories = weakref.WeakKeyDictionary[object, History]()
        #: Why calls like these run again, by what they have in common: engine="auto".
        self.refused: dict[Hashable, str] = {}

    def find(self, site: CallSite) -> Found | None:
        """The first trace that holds for a call, and its captured tensors."""
        entries = self.entries.get(site.key)
        return None if entries is None else first_holding(entries, site.roots)

    def prefer(self, route: Route) -> None:
        """Tries a route first: the next layer is likely to be called like this one."""
        # The function that ran may have cleared the cache.
        if route in self.routes:
            self.routes[0].entries[0].touch()
            self.routes = [route, *self._others(route.entries, route.tensor_guard)]

    def learn(self, site: CallSite) -> None:
        """Adds a route for calls like this one, if there is room for it."""
        entries, signature = self.entries.get(site.key), site.signature
        tensor_guard = tensor_guard_here()
        if entries is None or not signature.tensors or tensor_guard is None:
            return
        if Numerics.current() != site.numerics:
            # Tracing has run code that sets a switch and leaves it set.
            return
        others = self._others(entries, tensor_guard)
        # A route that a change of the number of threads has broken is replaced.
        is_known = any(
            route.serves(entries, tensor_guard) and route.same_thread()
            for route in self.routes
        )
        if (
            not is_known
            and len(others) < _MOST_ROUTES
            and is_simple((site.args, site.kwargs), signature.objects, tensor_guard)
        ):
            self.routes = [*others, route_of(site, entries, tensor_guard)]

    def drop_oldest(self, most: int) -> None:
        """Drops the entries that were used longest ago until only so many are left."""
        if self.routes and self.routed != self._routed_before:
            self._routed_before = self.routed
            self.routes[0].entries[0].touch()
        kept = [(key, each) for key, found in self.entries.items() for each in found]
        kept.sort(key=lambda pair: pair[1].used)
        dropped = kept[: max(0, len(kept) - most)]
        for key, entry in dropped:
            entries = self.entries[key]
            if len(entries) > 1:
                entries[:] = [each for each in entries if each is not entry]
            else:
                # The list keeps its last entry: another thread may be about to read it.
                del self.entries[key]
                self.routes = [
                    each for each in self.routes if each.entries is not entries
                ]
        if dropped:
            templates = [entry.template for _, entry in kept[len(dropped) :]]
            for family in self.families.values():
                family.keep_only(templates)

    def _others(self, entries: list[Entry], tensor_guard: TensorGuard) -> list[Route]:
        return [
            route for route in self.routes if not route.serves(entries, tensor_guard)
        ]


_MOST_ROUTES = 8  # a heuristic: each route that misses costs half a microsecond
