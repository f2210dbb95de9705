"""The traces of one code with one set of options, and the routes of calls to them."""

import dataclasses
from collections.abc import Hashable
from typing import final

from remat._calls.call_site import CallSite
from remat._calls.entry import Entry
from remat._calls.families import Family
from remat._calls.guards import TensorGuard, is_simple, tensor_guard_here
from remat._calls.routes import Found, Route, first_holding, route_of
from remat._regions.forwards import Calls
from remat._switches.numerics import Numerics


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
        self.routes: list[Route] = []
        self.hits = 0
        self.misses = 0
        self.statics_seen: dict[int, set[Hashable]] = {}
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

    def _others(self, entries: list[Entry], tensor_guard: TensorGuard) -> list[Route]:
        return [
            route for route in self.routes if not route.serves(entries, tensor_guard)
        ]


_MOST_ROUTES = 8  # a heuristic: each route that misses costs half a microsecond
