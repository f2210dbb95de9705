"""The trace of a call: found among those that are kept, or made and kept."""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, final

from torch import Tensor, nn

from remat import _captures
from remat._calls.advice import advise_of_inputs
from remat._calls.cache import Cache
from remat._calls.cache_miss import Options, compile_call
from remat._calls.entry import Entry
from remat._calls.families import Family
from remat._calls.options import Settings
from remat._calls.retraces import History
from remat._calls.routes import Found, first_holding
from remat._calls.signature import CallSite, Signature, Statics, sign
from remat._errors import RematError, TraceError, explain
from remat._graph.meta import without_symbols
from remat._regions.retraceable import Roots
from remat._switches.numerics import Numerics
from remat._torch import fakes, isolation, levels, tracer, trees
from remat._tracing.open_sizes import CANNOT_OPEN
from remat._tracing.refusals import raises_in_its_trace
from remat._tracing.thread import entered, known_inside
from remat._user_lines import warn


@final
@dataclasses.dataclass(frozen=True)
class Lookup:
    """Looks up the traces of one function with one set of options."""

    fun: Callable[..., Any]  # the function
    settings: Settings  # its options, `rng` among them
    where: str  # what messages call its region
    cache: Cache  # its traces, which functions of the same code share

    def site(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallSite:
        """A call of the function, under the switches of this moment."""
        signature = sign(self.fun, args, kwargs, self.settings.statics)
        return CallSite(self.fun, args, kwargs, signature, Numerics.current())

    def find(self, site: CallSite) -> Found:
        """The trace of a call and its captured tensors."""
        cache = self.cache
        holding_one = cache.find(site)
        if holding_one is None:
            with tracer.one_trace_at_a_time():
                # Another thread may have traced it meanwhile.
                holding_one = cache.find(site)
                if holding_one is None:
                    return self._keep(cache.entries.setdefault(site.key, []), site)
        cache.hits += 1
        return holding_one

    def find_inside(self, site: CallSite) -> Found:
        """The trace inside a trace with open sizes; the entry is kept until that one ends."""
        key = (id(self.cache), without_symbols(site.key))
        entries: list[Entry] = known_inside().setdefault(key, [])
        found = first_holding(entries, site.roots)
        if found is not None:
            return found
        with tracer.one_trace_at_a_time():
            return self._keep(entries, site, may_open=False)

    def find_aside(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Entry, Roots, tuple[Tensor, ...]]:
        """The trace of a call that is only looked at, what it is of, and its captured tensors.

        It is found outside any outer trace. Where no tensor requires a gradient, every
        floating one among the arguments does.
        """
        # The tensors may be stand-ins: an outer trace must not take them for captured ones.
        with entered(None):
            site = self.site(args, kwargs)
            site.require_traceable()
            if not (site.signature.wants_gradient or self.reaches_gradient(site)):
                site = dataclasses.replace(site, signature=_all_wanted(site.signature))
            entry, captured = self.find(site)
            return entry, site.roots, captured

    def reaches_gradient(self, site: CallSite) -> bool:
        """Whether a captured tensor is to be differentiated."""
        found = self.cache.find(site)
        reached = _captures.Survey(site.roots).reached if found is None else found[1]
        return any(map(levels.requires_grad_anywhere, reached))

    def _keep(
        self, entries: list[Entry], site: CallSite, *, may_open: bool = True
    ) -> Found:
        """Makes the entry of a call that no trace holds for, and keeps it."""
        tracer.load_tracer()
        is_open = may_open and self.settings.dynamic_shapes
        make = self._of_family if is_open else self._of_call
        entry = self._made_or_refused(make, site)
        before = entries[0] if entries else None
        entries.insert(0, entry)
        self.cache.drop_oldest(self.settings.cache_size)
        if entry.trace_s is None:
            self.cache.hits += 1
        else:
            self.cache.misses += 1
            self._note_trace(site, before)
            paths = [path for path, _ in self.settings.inputs.each]
            advise_of_inputs(site, entry.labels, paths, self.where)
        captured = entry.gather(site.roots)
        assert captured is not None, entry.covered.explain(site.roots)
        return entry, captured

    def _note_trace(self, site: CallSite, before: Entry | None) -> None:
        """Warns at the tenth trace of a module, or of a function of none, once for its code."""
        cache, owners = self.cache, map(_owner, site.roots)
        owner = next((each for each in owners if isinstance(each, nn.Module)), cache)
        history = cache.histories.setdefault(owner, History())
        if history.add(site, before) and not cache.is_told:
            cache.is_told = True
            history.warn(self.where, self.settings.cache_size)

    def _made_or_refused(
        self, make: Callable[[CallSite], Entry], site: CallSite
    ) -> Entry:
        """Makes an entry; with engine="auto" whatever the function raises is a refusal."""
        if self.settings.engine != "auto":
            return make(site)
        known = self.cache.refused.get(_refusal_key(site))
        if known is not None:
            raise TraceError(known)
        try:
            return make(site)
        except Exception as error:
            if isinstance(error, (RematError, Warning)):
                raise
            raise raises_in_its_trace(error) from error

    def fall_back(self, site: CallSite, refused: RematError) -> None:
        """Has the calls like one run again from now on, and warns, each reason once."""
        told = self.cache.refused.values()
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
        self.cache.refused[_refusal_key(site)] = text

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

    def _of_call(self, site: CallSite) -> Entry:
        """The entry of a trace for the sizes of a call."""
        return compile_call(site, self._options)

    def _of_family(self, site: CallSite) -> Entry:
        """The entry of a trace with open sizes; of one size if the function permits no other."""
        families, key = self.cache.families, site.general_key
        family = families.get(key) or families.setdefault(key, Family(site.signature))
        options = self._options
        known = family.find(site, options)
        if known is not None:
            return known
        fixed = family.fixed_for(site, self.where)
        error = None
        if not (family.is_static or all(map(all, fixed))):
            try:
                entry = compile_call(site, options, fixed)
            except CANNOT_OPEN as failed:
                if isinstance(failed, RematError) and not isinstance(
                    failed, TraceError
                ):
                    raise
                error = failed
            else:
                family.entries.insert(0, entry)
                return entry
        entry = compile_call(site, options)
        if error is not None:
            family.give_up(error, self.where)
        return entry

    @property
    def _options(self) -> Options:
        return Options(self.settings, self.cache.calls, self.where)


def _refusal_key(site: CallSite) -> Hashable:
    """What calls have in common whose traces are refused alike: equal layers, any sizes."""
    owners = [_owner(each) for each in site.roots]
    modules = [each.modules() for each in owners if isinstance(each, nn.Module)]
    return (site.general_key, *(tuple(map(type, each)) for each in modules))


def _owner(root: object) -> object:
    """The module whose method a function is, or fills the arguments of; else itself."""
    function: Any = root.func if isinstance(root, functools.partial) else root
    return function.__self__ if isinstance(function, types.MethodType) else function


def _all_wanted(signature: Signature) -> Signature:
    """The signature to look up, with every floating tensor to be differentiated."""

    @functools.cache  # a tensor that is given twice stays one
    def leaf(tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        # A stand-in was made outside the transforms and the trace around this call.
        is_fake = fakes.is_fake(tensor)
        with isolation.isolated() if is_fake else contextlib.nullcontext():
            return tensor.detach().requires_grad_()

    args, kwargs = trees.map_tensors(leaf, signature.arguments)
    return sign(lambda: None, args, kwargs, Statics())
