"""The traces of one code with one set of options, and the routes of calls to them."""

import dataclasses
import functools
import types
import weakref
from collections.abc import Hashable
from typing import Any, final

from torch import nn

from remat._calls.advice import advise_of_inputs
from remat._calls.cache_miss import Options, compile_call
from remat._calls.entry import Entry
from remat._calls.families import Family
from remat._calls.options import Settings
from remat._calls.retraces import TraceHistory
from remat._calls.routes import Found, Route, first_holding, route_of, tensor_guard_here
from remat._calls.signature import CallSite
from remat._captures.walk import Survey
from remat._errors import RematError, TraceError, explain
from remat._graph.meta import without_symbols
from remat._regions.forwards import Calls
from remat._switches.numerics import Numerics
from remat._torch import fakes, levels, modes, tracer
from remat._tracing.open_sizes import CANNOT_OPEN
from remat._tracing.refusals import require_answers
from remat._tracing.thread import known_inside
from remat._user_lines import warn


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
    """The traces of one code with one set of options: found for a call, or made and kept."""

    def __init__(self, settings: Settings, where: str) -> None:
        self.settings = settings  # the options, `rng` among them
        self.where = where  # what messages call the regions
        self.clear()

    def clear(self) -> None:
        self.entries: dict[Hashable, list[Entry]] = {}
        self.families: dict[Hashable, Family] = {}
        self.calls = Calls()
        self.routes: list[Route] = []  # the last used first
        self.num_crowded = 0  # calls that found no room for a route of theirs
        self.hits = 0  # calls that found a trace
        self.misses = 0
        self.is_told = False  # that one of these has grown long
        self.histories = weakref.WeakKeyDictionary[object, TraceHistory]()
        #: Why calls like these run again, by what they have in common: engine="auto".
        self.refused: dict[Hashable, str] = {}

    def find(self, site: CallSite) -> Found:
        """The trace of a call and its captured tensors."""
        found = self._holding(site)
        if found is None:
            # The thread of their trace may wait for this one.
            fakes.require_own_threads(site.tensors)
            with tracer.one_trace_at_a_time():
                # Another thread may have traced it meanwhile.
                found = self._holding(site)
                if found is None:
                    return self._keep(self.entries.setdefault(site.key, []), site)
        self.hits += 1
        return found

    def find_inside(self, site: CallSite) -> Found:
        """The trace inside a trace with open sizes; the entry is kept until that one ends."""
        key = (id(self), without_symbols(site.key))
        entries: list[Entry] = known_inside().setdefault(key, [])
        found = first_holding(entries, site.roots)
        if found is not None:
            return found
        with tracer.one_trace_at_a_time():
            return self._keep(entries, site, may_open=False)

    def reaches_gradient(self, site: CallSite) -> bool:
        """Whether a captured tensor is to be differentiated."""
        found = self._holding(site)
        if found is None:
            reached = Survey(site.roots).reached
            require_answers(reached)
        else:
            reached = found[1]
        with modes.unseen_by_traces():
            return any(map(levels.requires_grad_anywhere, reached))

    def _keep(
        self, entries: list[Entry], site: CallSite, *, may_open: bool = True
    ) -> Found:
        """Makes the entry of a call that no trace holds for, and keeps it."""
        tracer.load_tracer()
        is_open = may_open and self.settings.dynamic_shapes
        entry = self._trace_entry(site, is_open)
        before = entries[0] if entries else None
        entries.insert(0, entry)
        self._drop_oldest()
        if entry.trace_s is None:
            self.hits += 1
        else:
            self.misses += 1
            self._note_trace(site, before)
            paths = [path for path, _ in self.settings.inputs.each]
            advise_of_inputs(site, entry.labels, paths, self.where)
        captured = entry.gather(site.roots)
        assert captured is not None, entry.covered.explain(site.roots)
        return entry, captured

    def _note_trace(self, site: CallSite, before: Entry | None) -> None:
        """Warns at the tenth trace of a module, or of a function of none, once for its code."""
        owners = map(_owner, site.roots)
        owner = next((each for each in owners if isinstance(each, nn.Module)), self)
        history = self.histories.setdefault(owner, TraceHistory())
        if history.add(site, before) and not self.is_told:
            self.is_told = True
            history.warn(self.where, self.settings.cache_size)

    def rerun_from_now_on(self, site: CallSite, refused: RematError) -> None:
        """Has the calls like one run again from now on, and warns, each reason once."""
        told = self.refused.values()
        if str(refused) in told:
            return
        lost = self.settings.of_traces
        effect = f" {', '.join(lost)} has no effect there." if lost else ""
        parts: dict[str, Any] = {
            "where": self.where,
            "what": 'runs the function again in its backward, as with engine="rerun", from '
            f"now on.{effect}",
            "why": f"Its trace is refused: {refused}",
            "do": 'Pass engine="rerun", and this is not told.',
        }
        text = explain(**parts)
        if text not in told:
            warn(**parts)
        self.refused[_refusal_key(site)] = text

    def warn_of_first_call(self) -> None:
        """Warns of a call that runs as it is, because a lazy module makes its parameters in it."""
        warn(
            where=self.where,
            what="runs its first call as it is, and recomputes from the next one on.",
            why="A lazy module makes its parameters in that call, and a trace has no real "
            "tensors for them.",
            do="Call the model once before, inside `with remat.disabled():`, and this is "
            "not told.",
        )

    def _trace_entry(self, site: CallSite, is_open: bool) -> Entry:
        """The entry of a trace, with open sizes if the function permits that."""
        refused = self.refused.get(_refusal_key(site)) if self.refused else None
        if refused is not None:
            raise TraceError(refused)
        options = Options(self.settings, self.calls, self.where)
        if not is_open:
            return compile_call(site, options)
        family = self.families.setdefault(site.general_key, Family(site.metas))
        known = family.find(site, options)
        if known is not None:
            return known
        fixed = family.fixed_for(site, self.where)
        error = None
        if not (family.is_static or all(map(all, fixed))):
            try:
                entry = compile_call(site, options, fixed)
            except CANNOT_OPEN as failed:
                is_refusal = isinstance(failed, RematError)
                if is_refusal and not isinstance(failed, TraceError):
                    raise
                error = failed
            else:
                family.entries.insert(0, entry)
                return entry
        entry = compile_call(site, options)
        if error is not None:
            family.give_up(error, self.where)
        return entry

    def _holding(self, site: CallSite) -> Found | None:
        """The first trace that holds for a call, and its captured tensors."""
        entries = self.entries.get(site.key)
        return None if entries is None else first_holding(entries, site.roots)

    def prefer_route(self, route: Route) -> None:
        """Tries a route first: the next layer is likely to be called like this one."""
        # The function that ran may have cleared the cache.
        if route in self.routes:
            self.routes = [route, *(each for each in self.routes if each is not route)]

    def add_route(self, site: CallSite) -> None:
        """Adds a route for calls like this one, if there is room for it or its turn has come."""
        entries, tensor_guard = self.entries.get(site.key), tensor_guard_here()
        if entries is None or not site.tensors or tensor_guard is None:
            return
        if Numerics.current() != site.numerics:
            # Tracing has run code that sets a switch and leaves it set.
            return
        others: list[Route] = []
        for route in self.routes:
            if route.entries is not entries or route.tensor_guard is not tensor_guard:
                others.append(route)
            elif route.same_thread():
                return
            # One that a change of the number of threads has broken is replaced.
        if len(others) >= _MOST_ROUTES:
            # Calls in turn must not replace each other's at each call: a route takes long to make.
            self.num_crowded += 1
            if self.num_crowded % _CALLS_A_ROUTE:
                return
        route = route_of(site, entries, tensor_guard)
        if route is not None:
            self.routes = [route, *others[: _MOST_ROUTES - 1]]

    def _drop_oldest(self) -> None:
        """Drops the entries that were used longest ago until `cache_size` are left."""
        kept = [(key, each) for key, found in self.entries.items() for each in found]
        kept.sort(key=lambda pair: pair[1].used)
        dropped = kept[: max(0, len(kept) - self.settings.cache_size)]
        for key, entry in dropped:
            entries = self.entries[key]
            if len(entries) > 1:
                entries[:] = [each for each in entries if each is not entry]
            else:
                # The list keeps its last entry: another thread may be about to read it.
                del self.entries[key]
                self.routes = [r for r in self.routes if r.entries is not entries]
        if dropped:
            templates = [entry.template for _, entry in kept[len(dropped) :]]
            for family in self.families.values():
                family.keep_only(templates)


_MOST_ROUTES = 8  # a heuristic: each route that misses costs half a microsecond
# A heuristic: as many calls without a route take longer than to make one.
_CALLS_A_ROUTE = 16


def _refusal_key(site: CallSite) -> Hashable:
    """What calls have in common whose traces are refused alike: equal layers, any sizes."""
    owners = [_owner(each) for each in site.roots]
    modules = [each.modules() for each in owners if isinstance(each, nn.Module)]
    return (site.general_key, *(tuple(map(type, each)) for each in modules))


def _owner(root: object) -> object:
    """The module whose method a function is, or fills the arguments of; else itself."""
    function: Any = root.func if isinstance(root, functools.partial) else root
    return function.__self__ if isinstance(function, types.MethodType) else function
