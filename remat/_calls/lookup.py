"""The trace of a call: found among those that are kept, or made and kept."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor

from remat import _captures
from remat._calls.advice import advise, advise_once
from remat._calls.cache import Cache
from remat._calls.entry import Entry
from remat._calls.families import Family
from remat._calls.first_call import Options, make_entry, make_open_entry
from remat._calls.options import Settings
from remat._calls.routes import Found, holding
from remat._calls.signature import Signature, Statics, labels, sign
from remat._errors import RematError, TraceError
from remat._graph.values import named
from remat._messages import warn
from remat._regions.function import Roots
from remat._switches.numerics import Numerics
from remat._torch import fakes, isolation, levels, tracer
from remat._tracing.open_sizes import CANNOT_OPEN
from remat._tracing.thread import known_inside, set_aside


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Missed:
    """A call for which no kept trace holds.

    Attributes:
        signature: of the call.
        roots: the function and the objects among its arguments.
        numerics: the switches in force.
        names: what messages call the leaves of its arguments.
    """

    signature: Signature
    roots: Roots
    numerics: Numerics
    names: tuple[str, ...]

    @property
    def tensor_names(self) -> list[str]:
        """The names of the leaves that are tensors."""
        pairs = zip(self.names, self.signature.layout.kinds, strict=True)
        return [name for name, kind in pairs if kind == "tensor"]

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """For tensors that were passed more than once: the further names, by the first."""
        firsts, layout = self.tensor_names, self.signature.layout
        again = iter(layout.again)
        found: dict[str, tuple[str, ...]] = {}
        for name, kind in zip(self.names, layout.kinds, strict=True):
            if kind == "again":
                first = firsts[next(again)]
                found[first] = (*found.get(first, ()), name)
        return found


@final
@dataclasses.dataclass(frozen=True)
class Lookup:
    """Looks up the traces of one function with one set of options.

    Attributes:
        fun: the function.
        settings: its options.
        rng: "keys" or "preserve".
        where: what messages call its region.
        cache: its traces, which functions of the same code share.
    """

    fun: Callable[..., Any]
    settings: Settings
    rng: str
    where: str
    cache: Cache

    def find(
        self,
        signature: Signature,
        roots: Roots,
        numerics: Numerics,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Found:
        """The trace of a call and its captured tensors."""
        cache = self.cache
        key = (signature.key, numerics)
        found = cache.find(key, roots)
        if found is not None:
            cache.hits += 1
            return found
        with tracer.one_trace_at_a_time():
            found = cache.find(key, roots)
            if found is not None:
                cache.hits += 1
                return found
            missed = self._missed(signature, roots, numerics, args, kwargs)
            entries = cache.entries.setdefault(key, [])
            if self.settings.dynamic_shapes:
                entry = self._of_family(missed)
            else:
                entry = self._make(make_entry, missed)
            return self._keep(entries, entry, missed)

    def find_inside(
        self,
        signature: Signature,
        roots: Roots,
        numerics: Numerics,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Found:
        """The same inside a trace with open sizes; the entry is kept until that trace ends."""
        key = (id(self.cache), named((signature.key, numerics)))
        entries: list[Entry] = known_inside().setdefault(key, [])
        found = holding(entries, roots)
        if found is not None:
            return found
        with tracer.one_trace_at_a_time():
            missed = self._missed(signature, roots, numerics, args, kwargs)
            return self._keep(entries, self._make(make_entry, missed), missed)

    def find_aside(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Entry, Roots, tuple[Tensor, ...]]:
        """The trace of a call that is only looked at, what it is of, and its captured tensors.

        It is found outside any outer trace. Where no tensor requires a gradient, every
        floating one among the arguments does.
        """
        # The tensors may be stand-ins: an outer trace must not take them for captured ones.
        with set_aside():
            signature = sign(self.fun, args, kwargs, self.settings.statics)
            signature.require_traceable()
            roots = (self.fun, *signature.objects)
            numerics = Numerics.current()
            if not (
                signature.wants_gradient
                or self.reaches_gradient(signature, roots, numerics)
            ):
                signature = _all_wanted(signature)
            entry, captured = self.find(signature, roots, numerics, args, kwargs)
            return entry, roots, captured

    def _missed(
        self,
        signature: Signature,
        roots: Roots,
        numerics: Numerics,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> _Missed:
        """A call that has to be traced."""
        tracer.load_tracer()
        names = labels(self.fun, args, kwargs)
        return _Missed(signature, roots, numerics, names)

    def reaches_gradient(
        self, signature: Signature, roots: Roots, numerics: Numerics
    ) -> bool:
        """Whether a captured tensor is to be differentiated."""
        found = self.cache.find((signature.key, numerics), roots)
        if found is not None:
            return any(map(levels.requires_grad_anywhere, found[1]))
        reached = _captures.survey(roots).reached
        return any(map(levels.requires_grad_anywhere, reached))

    def _of_family(self, missed: _Missed) -> Entry:
        """The entry of a trace with open sizes; of one size if the function permits no other."""
        signature, roots = missed.signature, missed.roots
        families, key = self.cache.families, (signature.general_key, missed.numerics)
        family = families.get(key) or families.setdefault(key, Family(signature))
        found = family.find(signature, roots)
        if found is not None:
            return found
        fixed = family.fixed_for(signature, roots, missed.tensor_names, self.where)
        error = None
        if not (family.is_static or all(map(all, fixed))):
            make = functools.partial(make_open_entry, fixed=fixed)
            try:
                known = self._make(make, missed)
            except CANNOT_OPEN as failed:
                if isinstance(failed, RematError) and not isinstance(
                    failed, TraceError
                ):
                    raise
                error = failed
            else:
                family.entries.insert(0, known)
                return known.first
        entry = self._make(make_entry, missed)
        if error is not None:
            family.give_up(error, self.where)
        return entry

    def _make(self, make: Callable[..., Any], missed: _Missed) -> Any:
        """Traces the function."""
        options = Options(
            self.settings.policy,
            self.rng,
            self.settings.verify,
            self.settings.backend,
            functools.partial(self.settings.inputs.of, aliases=missed.aliases),
            self.cache.calls,
        )
        return make(
            missed.roots,
            missed.signature,
            missed.numerics,
            options,
            missed.tensor_names,
            self.where,
        )

    def _keep(self, entries: list[Entry], entry: Entry, missed: _Missed) -> Found:
        """Keeps an entry; if it is a new trace, gives the warnings that it calls for."""
        cache, roots = self.cache, missed.roots
        entries.insert(0, entry)
        if entry.trace_s is None:
            cache.hits += 1
        else:
            cache.misses += 1
            self._advise_of_statics(missed)
            self._advise_of_inputs(entry, missed)
            advise(
                entry.region,
                roots,
                _captures.code_key(self.fun),
                self.where,
                self.settings.verify,
            )
        captured = entry.gather(roots)
        assert captured is not None, entry.covered.explain(roots)
        return entry, captured

    def _advise_of_statics(self, missed: _Missed) -> None:
        """Warns at the tenth trace that one static value has caused."""
        layout = missed.signature.layout
        places = [place for place, kind in enumerate(layout.kinds) if kind == "static"]
        for place, value in zip(places, layout.values, strict=True):
            seen = self.cache.statics_seen.setdefault(place, set())
            seen.add(repr(value))
            if len(seen) == 10:
                seen.add("said")
                warn(
                    where=self.where,
                    what=f"was traced for a tenth value of the static argument "
                    f"`{missed.names[place]}`.",
                    why="Every leaf that is not a tensor is part of the signature, "
                    "and a trace takes a tenth of a second or more.",
                    do="Pass a 0-d tensor: torch.tensor(value).",
                )

    def _advise_of_inputs(self, entry: Entry, missed: _Missed) -> None:
        """Warns of a path in `saved_inputs` that no input has."""
        if not self.settings.inputs.each:
            return
        names = [*entry.labels, *itertools.chain(*missed.aliases.values())]
        for path, _ in self.settings.inputs.each:
            if not any(fnmatch.fnmatchcase(name, path) for name in names):
                advise_once(
                    (_captures.code_key(self.fun), "input", path),
                    where=self.where,
                    what=f'has no input "{path}", which saved_inputs names.',
                    why=f"Its inputs are {', '.join(entry.labels)}.",
                    do="Correct the path, or leave it out.",
                )


def _as_leaf(tensor: Tensor) -> Tensor:
    if not fakes.is_fake(tensor):
        return tensor.detach().requires_grad_()
    # A stand-in was made outside the transforms and the trace around this call.
    with isolation.isolated():
        return tensor.detach().requires_grad_()


def _all_wanted(signature: Signature) -> Signature:
    """The signature with every floating tensor to be differentiated."""
    tensors = tuple(
        _as_leaf(tensor)
        if tensor.is_floating_point() or tensor.is_complex()
        else tensor
        for tensor in signature.tensors
    )
    args, kwargs = signature.layout.arguments(tensors, signature.objects)
    return sign(lambda: None, args, kwargs, Statics())
