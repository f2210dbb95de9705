"""A decorated function, method or module: it finds the trace of a call, and runs its region."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Mapping
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeGuard,
    TypeVar,
    cast,
    final,
    overload,
)

from torch import Tensor, fx, nn
from torch.compiler import is_dynamo_compiling

from remat._calls import torch_compile
from remat._calls.as_function import NoGlobals, SignatureOfWrapped
from remat._calls.cache import Cache, CacheInfo
from remat._calls.entry import Entry
from remat._calls.options import Settings, why_out_of_graphs
from remat._calls.residuals import Residual, residuals_of
from remat._calls.routes import MISSED
from remat._calls.signature import CallSite, Statics, call_site, require_static
from remat._captures.contents import code_key
from remat._errors import RematError, TraceError, require_callable
from remat._partition.stages import Stages
from remat._programs.program import Program
from remat._regions.out_of_memory import name_of
from remat._regions.protocol import Asked
from remat._rerun import flat_call
from remat._rerun.dependence import require_nothing_hidden
from remat._switches.blocks import is_inert, stand_in
from remat._switches.numerics import Numerics
from remat._torch import dynamo, levels, tracer
from remat._torch.modules import calling_module, copied, forward_of, is_copy
from remat._tracing.refusals import LazyModuleError, advises_rerun
from remat._tracing.thread import entered, has_open_sizes, is_lifting, is_running, lift
from remat._user_lines import warn
from remat.policies import AbstractPolicy, nothing_saveable

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Bound = ParamSpec("_Bound")  # without the object


# By the code and the options.
_caches: dict[tuple[Hashable, Settings], Cache] = {}
_MOST_OPTIONS = 256  # of one code, a heuristic: more than a model has layers
_NOTHING_KNOWN = Cache(Settings(), "")


class DecoratedFunction(Generic[_P, _R]):
    """A function decorated with `remat`."""

    __signature__ = SignatureOfWrapped()
    __globals__ = NoGlobals()

    def __init__(
        self, fun: Callable[_P, _R], settings: Settings, where: str = ""
    ) -> None:
        self.settings = settings
        self._fun = fun
        self.rng_default = "preserve" if is_of_module(fun) else "keys"
        functools.update_wrapper(self, fun, updated=())
        self.__isabstractmethod__ = getattr(fun, "__isabstractmethod__", False)
        self.__wrapped__ = fun
        self._where = where or _where(fun)
        is_function = isinstance(fun, types.FunctionType)
        inner_name = fun.__qualname__.rpartition("<locals>.")[2] if is_function else ""
        self._takes_self = "." in inner_name  # it was written in a class
        self.kind = self._registered()
        # Becomes `_calls.cache` at the first call that is looked up; a plain attribute is faster.
        self._known = _NOTHING_KNOWN

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls the function; its backward will recompute."""
        if is_dynamo_compiling():
            return torch_compile.call(self.kind, self._fun, args, kwargs)
        if tracer.is_in_torchscript():
            return self._fun(*args, **kwargs)
        if self._takes_self and args:
            through = calling_module()  # of a types.MethodType in an attribute
            if is_copy(through, args[0]):
                return self.of_copy(through, args[0])(through, *args[1:], **kwargs)
        cache = self._known
        routes = cache.routes
        try:
            for route in routes:
                returned = route.run(self._fun, args, kwargs)
                if returned is not MISSED:
                    cache.hits += 1
                    if route is not routes[0]:
                        cache.prefer_route(route)
                    return returned
        except RematError as refused:
            site = call_site(self._fun, args, kwargs, self.settings.statics)
            return self._call_instead(refused, site)
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Makes a call that no route recognizes: looks up its signature, or traces it."""
        if is_inert():
            return self._fun(*args, **kwargs)
        instead = stand_in()
        if instead is not None:
            return instead(self, args, kwargs)
        if self.settings.engine == "rerun":
            require_static(self._fun, args, kwargs, self.settings.statics)
            return flat_call.call(self._fun, args, kwargs, self._rng)
        self._known = self._cache
        site = call_site(self._fun, args, kwargs, self.settings.statics)
        if any(isinstance(each, fx.Proxy) for each in site.objects):
            return self._fun(*args, **kwargs)  # torch.fx.symbolic_trace records it
        try:
            return self._call_traced(site)
        except RematError as refused:
            return self._call_instead(refused, site)

    def _call_instead(self, refused: RematError, site: CallSite) -> Any:
        """Makes a call whose trace is refused without one, where the engine says so."""
        # In a trace, the one around is refused with it.
        is_auto = self.settings.engine == "auto" and not is_running()
        if is_auto and isinstance(refused, LazyModuleError):
            self._cache.warn_of_first_call()
            return self._fun(*site.args, **site.kwargs)
        if not (is_auto and advises_rerun(refused)):
            raise refused
        returned = flat_call.call(self._fun, site.args, site.kwargs, self._rng)
        self._cache.rerun_from_now_on(site, refused)
        return returned

    def of_copy(self, module: object, original: object) -> Callable[..., Any]:
        """The region of a copy of a module: around the forward of its class, if this is one's."""
        is_own = forward_of(original) in (self, self._fun)
        if type(module) is type(original) or not is_own:
            return self
        own = forward_of(module)
        if is_region(own):
            return own
        return DecoratedFunction(own, self.settings, self._where)

    def _call_traced(self, site: CallSite) -> Any:
        """Makes a call by its trace, which is found or made."""
        cache, is_inside, wants = self._cache, has_open_sizes(), site.wants_gradient
        if tracer.proxy_is_active() and not is_inside:
            site.require_numbers()
        if not (wants or is_inside or cache.reaches_gradient(site)):
            return _call_plainly(site)
        site.require_traceable()
        entry, captured = cache.find_inside(site) if is_inside else cache.find(site)
        if tracer.is_in_compiler():
            torch_compile.require_recordable(entry, self._where)
        tensors = [*site.tensors, *captured]
        if is_lifting():
            tensors = list(map(lift, tensors))
            wants = False
        if not wants and not any(map(levels.requires_grad_anywhere, tensors)):
            return _call_plainly(site)
        # A route tells objects apart by their type alone: too little for static arguments.
        has_static_objects = site.objects and self.settings.statics.are_given
        if not (has_static_objects or is_inside):
            cache.add_route(site)
        return entry.call(site.roots, tensors, site.numerics)

    @functools.cached_property
    def _cache(self) -> Cache:
        code, settings = code_key(self._fun), self._resolved
        key = (code, settings)
        if key not in _caches:
            own = [each for each in list(_caches) if each[0] == code]  # of all threads
            if len(own) >= _MOST_OPTIONS:
                _caches.pop(own[0], None)
                warn(
                    where=self._where,
                    what=f"was decorated with more than {_MOST_OPTIONS} sets of options; "
                    "the traces of the first are dropped.",
                    why="Traces belong to the code and its options: a policy that is made "
                    "anew for each call is another one each time, and is traced again.",
                    do="Make the policy once, outside of the loop.",
                )
        return _caches.setdefault(key, Cache(settings, self._where))

    @property
    def _rng(self) -> str:
        return self.settings.rng or self.rng_default

    @property
    def _resolved(self) -> Settings:
        """The options with the `rng` that is meant where none is given."""
        return dataclasses.replace(self.settings, rng=self._rng)

    def _registered(self) -> str:
        """The key by which a graph of torch.compile finds regions of this kind."""
        owner: Any = getattr(self._fun, "__self__", self._fun)
        # A module that is being copied has no parts yet.
        is_module = isinstance(owner, nn.Module) and "_modules" in vars(owner)
        parts = owner.modules() if is_module else ()
        return kind_of(self._resolved, self._where, *map(type, parts))

    def programs(
        self, /, *args: _P.args, **kwargs: _P.kwargs
    ) -> tuple[Program, Program]:
        """The forward program and the backward program of a call; both print.

        Nothing runs but the trace. What is differentiated is what `saved_residuals`
        says; the backward is the one for cotangents laid out like the outputs.
        """
        entry, site, _ = self.entry_of(args, kwargs)
        region, roots = entry.region, site.roots
        joint = region.stages(roots).joint
        wanted = tuple(meta.requires_grad for meta in region.operands)
        num_states = len(joint.states)
        layouts = tuple(meta and meta.layout for meta in joint.layout)
        asked = Asked(layouts, wanted, num_states, Numerics.current())
        derived = region.vjp(roots, asked)
        return (
            region.forward(roots, save=True).program,
            derived.forward(roots, save=False).program,
        )

    def stages(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Stages:
        """What becomes of a call, stage by stage: joint graph, decisions, cut; it prints.

        Nothing runs but the trace; `programs` shows the two programs that the last stage
        gives. What is differentiated is what `saved_residuals` says.
        """
        return self.entry_of(args, kwargs)[0].stages

    def entry_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Entry, CallSite, tuple[Tensor, ...]]:
        """The trace of a call that is looked at, the call, and what it captures.

        It is found outside any outer trace. Where no tensor requires a gradient, every
        floating one among the arguments does.
        """
        # The tensors may be stand-ins: an outer trace must not take them for captured ones.
        with entered(None):
            site = call_site(self._fun, args, kwargs, self.settings.statics)
            site.require_traceable()
            wants = site.wants_gradient
            if not (wants or self._cache.reaches_gradient(site)):
                site = site.with_all_wanted()
            try:
                entry, captured = self._cache.find(site)
            except TraceError as refused:
                if self.settings.engine != "rerun":
                    raise
                raise TraceError.of(
                    where=self._where,
                    what=f"cannot be looked at by a trace: {refused}",
                    why='With engine="rerun" it has none when it runs, either.',
                    do="Measure what a call holds: remat.report(f, *args).",
                ) from refused
            return entry, site, captured

    def saved_residuals(self, /, *args: _P.args, **kwargs: _P.kwargs) -> list[Residual]:
        """What a call holds between its forward and its backward, as `remat.saved_residuals`."""
        entry, site, captured = self.entry_of(args, kwargs)
        return residuals_of(entry, (*site.tensors, *captured))

    def cache_info(self) -> CacheInfo:
        """Hits, misses and traces of this function's code, with these options."""
        cache = self._cache
        entries = [entry for found in cache.entries.values() for entry in found]
        traces = tuple(each.trace_s for each in entries if each.trace_s is not None)
        most = self.settings.cache_size
        return CacheInfo(cache.hits, cache.misses, most, len(traces), traces)

    def follow_class(self) -> None:
        """Only the method of a module does."""

    def cache_clear(self) -> None:
        """Forgets the traces of this function's code, with these options."""
        self._cache.clear()

    def __prepare_scriptable__(self) -> Callable[_P, _R]:
        """torch.jit.script, which has no backward of ours, takes the plain function."""
        return self._fun

    def decide_by(self, policy: AbstractPolicy) -> None:
        """Gives it another policy, in place: later calls are traced for that one."""
        self.settings = dataclasses.replace(self.settings, policy=policy)
        self.__dict__.pop("_cache", None)
        self._known = _NOTHING_KNOWN
        self.kind = self._registered()

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(
        self: DecoratedFunction[Concatenate[Any, _Bound], _R],
        instance: object,
        owner: type | None = None,
    ) -> BoundRegion[_Bound, _R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds a decorated method."""
        return self if instance is None else BoundRegion(self, instance)

    def __set_name__(self, owner: type, name: str) -> None:
        """A decorated method of a module draws like the module."""
        if issubclass(owner, nn.Module):
            self.rng_default = "preserve"
            self.kind = self._registered()

    def __reduce__(self) -> Any:
        """Pickles a decorated function by its name, another region by its parts as they are now."""
        self.follow_class()
        if _decorated_by_name(self) is self:
            return self._fun.__qualname__
        return type(self), (self._fun, self.settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> DecoratedFunction[_P, _R]:
        """Copies what is wrapped now; options are values, and may hold a device mesh."""
        self.follow_class()
        if _decorated_by_name(self) is self:
            return self
        return type(self)(copy.deepcopy(self._fun, memo), self.settings)

    def __repr__(self) -> str:
        return f"remat({self._fun!r}, policy={self.settings.policy!r})"


def _call_plainly(site: CallSite) -> Any:
    """Runs a decorated function as it is: nothing that the region sees needs a gradient."""
    returned = site.function(*site.args, **site.kwargs)
    require_nothing_hidden(returned, site.roots, site.tensors)
    return returned


# A decorator would hide from type checkers that these are methods.
for _name in ("__call__", "__get__"):
    dynamo.unseen_by_dynamo(vars(DecoratedFunction)[_name])


# One number for all regions with the same options around modules of the same classes.
_numbers: dict[tuple[object, ...], int] = {}


def kind_of(settings: Settings, where: str, *classes: type) -> str:
    """Registers a kind of decorated functions for graphs of torch.compile; returns its key.

    Their options have an `rng`; `classes` are those of the modules that they are around.
    """
    number = _numbers.setdefault((settings, *classes), len(_numbers))
    key = f"{where}, kind {number}"
    around = functools.partial(_decorated_graph, settings, where)
    torch_compile.register(key, where, around, why_out_of_graphs(settings, where))
    return key


def _decorated_graph(
    settings: Settings, where: str, function: Callable[..., Any]
) -> DecoratedFunction[..., Any]:
    """A graph of torch.compile, decorated, with a cache that it shares with no other."""
    # Dynamo has guarded what is static; a graph takes tensors alone, and what is refused there
    # runs between two graphs.
    settings = dataclasses.replace(settings, engine="trace", statics=Statics())
    region = DecoratedFunction(function, settings, where)
    region.__dict__["_cache"] = Cache(settings, where)
    return region


def _where(function: Callable[..., Any]) -> str:
    """What messages call a decorated function."""
    fun = inspect.unwrap(function)
    if isinstance(fun, functools.partial):  # as transformers calls its layers
        return _where(fun.func)
    kind = cast("type[object]", type(fun))
    runs = fun if hasattr(fun, "__code__") else getattr(kind, "forward", None)
    code, region = getattr(runs, "__code__", None), f"the region {name_of(fun)}"
    if code is None:
        return region
    return f"{region} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"


def _decorated_by_name(region: DecoratedFunction[..., Any]) -> object:
    found: Any = sys.modules.get(getattr(region, "__module__", ""))
    for name in getattr(region, "__qualname__", "<none>").split("."):
        found = getattr(found, name, None)
    return found


@final
class BoundRegion(Generic[_P, _R]):
    """A decorated method of one object."""

    __signature__ = SignatureOfWrapped()

    def __init__(self, region: DecoratedFunction[..., _R], instance: object) -> None:
        self.__func__ = region
        self.__self__ = instance
        self.__wrapped__ = region.__wrapped__.__get__(instance)

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls the method; its backward will recompute."""
        instance = self.__self__
        # A bound method that is kept is also in a copy of the attributes.
        if "forward" in getattr(instance, "__dict__", ()) and not is_dynamo_compiling():
            through = calling_module()
            if is_copy(through, instance):
                region = self.__func__.of_copy(through, instance)
                return region(through, *args, **kwargs)
        return self.__func__(instance, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What regions answer about a call, with the object filled in."""
        if name in ("programs", "saved_residuals", "stages"):
            return functools.partial(getattr(self.__func__, name), self.__self__)
        if name == "__code__":  # torch.export names the arguments of a forward by it
            return self.__wrapped__.__code__
        return getattr(self.__func__, name)

    def __eq__(self, other: object) -> bool:
        """Whether both are one method of one object, as of Python's bound methods."""
        if not isinstance(other, BoundRegion):
            return NotImplemented
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[int, int]:
        own = vars(self)  # Dynamo makes one without attributes, and hashes it
        return id(own.get("__self__")), id(own.get("__func__"))

    def __repr__(self) -> str:
        return f"remat({self.__wrapped__!r}, policy={self.__func__.settings.policy!r})"

    def __reduce__(self) -> Any:
        """Pickles as Python's bound methods do: by its object and its name."""
        return getattr, (self.__self__, self.__wrapped__.__name__)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundRegion[_P, _R]:
        """Binds to a copy of its object, as a copy of a bound method is."""
        return BoundRegion(self.__func__, copy.deepcopy(self.__self__, memo))


class RematModule(nn.Module):
    """A module decorated with `remat`: its parameters, buffers and children are shared.

    Whatever is done to one is done to the other; `state_dict` has the module's own keys.
    """

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        super().__init__()
        for name in _SHARED:
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["__wrapped__"] = module
        self.__dict__["_region"] = DecoratedFunction(module, settings)

    @property
    def training(self) -> bool:
        """The module's own flag."""
        return self.__dict__["__wrapped__"].training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if "__wrapped__" in self.__dict__:
            self.__dict__["__wrapped__"].training = mode

    def _around(self) -> nn.Module:
        """What it is around; of a copy of these attributes, a module with the copy's parts."""
        own = self.__dict__
        module = own["__wrapped__"]
        # At each call: a generator would take a frame of Python for each name.
        for name in _SHARED:
            if own[name] is not module.__dict__[name]:
                return copied(module, **{name: own[name] for name in _SHARED})
        return module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; its backward will recompute."""
        own, module = self.__dict__, self._around()
        if module is own["__wrapped__"]:
            return own["_region"](*args, **kwargs)
        return DecoratedFunction(module, self.settings)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The module's attributes, and what regions answer about a call."""
        answers = name in _ANSWERS
        return getattr(self.__dict__["_region"] if answers else self._around(), name)

    def __repr__(self) -> str:
        policy = self.__dict__["_region"].settings.policy
        return f"remat({self._around()!r}, policy={policy!r})"

    def __reduce__(self) -> Any:
        """Pickles with its module."""
        return RematModule, (self.__dict__["__wrapped__"], self.settings)


_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_ANSWERS = {"settings", *(name for name in vars(DecoratedFunction) if name[0] != "_")}


def is_region(fun: object) -> TypeGuard[DecoratedFunction[..., Any]]:
    """Whether `remat` made it: of a function, a method or a module."""
    return isinstance(fun, (DecoratedFunction, BoundRegion, RematModule))


def plain_region(fun: Callable[..., Any]) -> DecoratedFunction[..., Any]:
    """A region for looking at a plain function; it is never called and never warns."""
    require_callable("the function to look at", fun)
    return DecoratedFunction(fun, Settings(rng="preserve"))


def undecided(fun: Callable[..., Any]) -> DecoratedFunction[..., Any]:
    """The region of a function, or of what another region runs, without its policy."""
    if isinstance(fun, RematModule):
        fun = fun.__dict__["_region"]
    if not isinstance(fun, (DecoratedFunction, BoundRegion)):
        return plain_region(fun)
    settings: Settings = fun.settings
    rng = settings.rng or fun.rng_default
    return DecoratedFunction(
        fun.__wrapped__, dataclasses.replace(settings, policy=nothing_saveable, rng=rng)
    )


def is_of_module(fun: object) -> bool:
    """Whether what is to be decorated is an nn.Module or a method of one."""
    if isinstance(fun, types.MethodType):  # which Dynamo does not find by a name
        return isinstance(fun.__self__, nn.Module)
    return isinstance(getattr(fun, "__self__", fun), nn.Module)
