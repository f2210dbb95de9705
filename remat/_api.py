"""The decorator: check the options, find the trace of a call, run its region."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, cast, final, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from remat import _captures, _compat, _in_graph, _rerun
from remat._any_region import Asked
from remat._cache import Cache, CacheInfo
from remat._entry import Entry
from remat._errors import RematError, explain
from remat._function import Roots
from remat._hidden import require_nothing_hidden
from remat._lookup import Lookup
from remat._numerics import Numerics
from remat._options import (
    PolicyLike,
    SavedInputs,
    Settings,
    inputs_for,
    policy_for,
    require_choice,
    require_compilable,
    require_function,
    require_known,
    require_parameters,
    require_traced,
    statics_of,
    why_out_of_graphs,
)
from remat._program import Program
from remat._residuals import Residual, residuals_of_region
from remat._routes import MISSED
from remat._running import has_open_sizes, is_lifting, lift, set_aside
from remat._signature import Signature, Statics, sign
from remat._switch import is_disabled, is_inert
from remat.policies import nothing_saveable

_P = ParamSpec("_P")
_R = TypeVar("_R")


_caches: dict[Hashable, Cache] = {}
_NOTHING_KNOWN = Cache()


def call_in_graph(
    kind: str,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    part: str = "",
) -> Any:
    """A call of a region as Dynamo traces it; see `_in_graph.call`."""
    # Dynamo cannot trace a question about inference mode, but grad mode is off there too.
    if is_disabled() or not torch.is_grad_enabled():
        return fun(*args, **kwargs)
    return _in_graph.call(kind, fun, args, kwargs, part)


class Region(Generic[_P, _R]):
    """A function decorated with `remat`."""

    def __init__(
        self, fun: Callable[_P, _R], settings: Settings, where: str = ""
    ) -> None:
        self.settings = settings
        self._fun = fun
        self.rng_default = "preserve" if is_of_module(fun) else "keys"
        functools.update_wrapper(self, fun, updated=())
        self.__wrapped__ = fun
        self._where = where or _where(fun)
        self.kind = self._registered()
        # Becomes `_cache` at the first call that is looked up; a plain attribute is faster.
        self._known = _NOTHING_KNOWN

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls the function; its backward will recompute."""
        if is_dynamo_compiling():
            return call_in_graph(self.kind, self._fun, args, kwargs)
        cache = self._known
        routes = cache.routes
        for route in routes:
            returned = route.run(self._fun, args, kwargs)
            if returned is not MISSED:
                cache.hits += 1
                if route is not routes[0]:
                    cache.prefer(route)
                return returned
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Makes a call that no route recognizes: looks up its signature, or traces it."""
        if is_inert():
            return self._fun(*args, **kwargs)
        if self.settings.engine == "rerun":
            return _rerun.call(self._fun, args, kwargs, self._rng)
        self._known = self._cache
        numerics = Numerics.current()
        signature = sign(self._fun, args, kwargs, self.settings.statics)
        roots = (self._fun, *signature.objects)
        if has_open_sizes():
            return self._call_inside(signature, roots, numerics, args, kwargs)
        wants = signature.wants_gradient
        if not wants and not self._lookup.reaches_gradient(signature, roots, numerics):
            return self._plain(roots, args, kwargs)
        signature.require_traceable()
        entry, captured = self._lookup.find(signature, roots, numerics, args, kwargs)
        if _compat.is_in_compiler():
            _in_graph.require_recordable(entry, roots, self._where)
        tensors = [*signature.tensors, *captured]
        if is_lifting():
            tensors = list(map(lift, tensors))
            wants = False
        if not wants and not any(map(_compat.requires_grad_anywhere, tensors)):
            return self._plain(roots, args, kwargs)
        # A route tells objects apart by their type alone: too little for static arguments.
        if not (signature.objects and self.settings.statics.are_given):
            self._cache.learn(args, kwargs, signature, numerics)
        return entry.call(roots, tensors, numerics)

    def _call_inside(
        self,
        signature: Signature,
        roots: Roots,
        numerics: Numerics,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Makes a call inside a trace with open sizes."""
        signature.require_traceable()
        entry, captured = self._lookup.find_inside(
            signature, roots, numerics, args, kwargs
        )
        tensors = list(map(lift, [*signature.tensors, *captured]))
        if not any(map(_compat.requires_grad_anywhere, tensors)):
            return self._plain(roots, args, kwargs)
        return entry.call(roots, tensors, numerics)

    def _plain(
        self, roots: Roots, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs the function as it is: nothing that the region sees needs a gradient."""
        returned = self._fun(*args, **kwargs)
        require_nothing_hidden(returned, roots)
        return returned

    @functools.cached_property
    def _cache(self) -> Cache:
        key = (
            _captures.code_key(self._fun),
            self.settings.policy,
            self._rng,
            self.settings.engine,
            self.settings.statics,
            self.settings.verify,
            self.settings.backend,
            self.settings.inputs,
            self.settings.dynamic_shapes,
        )
        return _caches.setdefault(key, Cache())

    @functools.cached_property
    def _lookup(self) -> Lookup:
        return Lookup(self._fun, self.settings, self._rng, self._where, self._cache)

    @property
    def _rng(self) -> str:
        return self.settings.rng or self.rng_default

    def _registered(self) -> str:
        """The key by which a graph of torch.compile finds regions of this kind."""
        settings = dataclasses.replace(self.settings, rng=self._rng)
        owner: Any = getattr(self._fun, "__self__", self._fun)
        # A module that is being copied has no parts yet.
        is_module = isinstance(owner, nn.Module) and "_modules" in vars(owner)
        parts = owner.modules() if is_module else ()
        return kind_of(settings, self._where, *map(type, parts))

    def programs(self, *args: _P.args, **kwargs: _P.kwargs) -> tuple[Program, Program]:
        """The forward program and the backward program of a call; both print.

        Nothing runs but the trace. What is differentiated is what `saved_residuals`
        says; the backward is the one for cotangents laid out like the outputs.
        """
        entry, roots = self.entry_of(args, kwargs)
        region = entry.region
        joint = region.joint(roots)
        wanted = tuple(meta.requires_grad for meta in region.operands)
        num_states = len(joint.states)
        layouts = tuple(meta and meta.layout for meta in joint.layout)
        asked = Asked(layouts, wanted, num_states, Numerics.current())
        derived = region.vjp(roots, asked)
        return (
            region.forward(roots, save=True).program,
            derived.forward(roots, save=False).program,
        )

    def entry_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Entry, Roots]:
        """The trace of a call, without running it; for `saved_residuals`."""
        return self.found_for(args, kwargs)[:2]

    def found_for(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Entry, Roots, tuple[Tensor, ...]]:
        """The trace of a call and the tensors that it captures, found outside any outer trace."""
        # The tensors may be stand-ins: an outer trace must not take them for captured ones.
        with set_aside():
            signature = sign(self._fun, args, kwargs, self.settings.statics)
            signature.require_traceable()
            roots = (self._fun, *signature.objects)
            numerics = Numerics.current()
            lookup = self._lookup
            if not (
                signature.wants_gradient
                or lookup.reaches_gradient(signature, roots, numerics)
            ):
                signature = _all_wanted(signature)
            entry, captured = lookup.find(signature, roots, numerics, args, kwargs)
            return entry, roots, captured

    def saved_residuals(self, *args: _P.args, **kwargs: _P.kwargs) -> list[Residual]:
        """What a call holds between its forward and its backward, as `remat.saved_residuals`."""
        return residuals_of_region(*self.entry_of(args, kwargs))

    def cache_info(self) -> CacheInfo:
        """Hits, misses and traces of this function's code, with these options."""
        cache = self._cache
        entries = [entry for found in cache.entries.values() for entry in found]
        traces = tuple(each.trace_s for each in entries if each.trace_s is not None)
        return CacheInfo(cache.hits, cache.misses, len(traces), traces)

    def cache_clear(self) -> None:
        """Forgets the traces of this function's code, with these options."""
        self._cache.clear()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds a decorated method."""
        return self if instance is None else BoundRegion(self, instance)

    def __set_name__(self, owner: type, name: str) -> None:
        """A decorated method of a module draws like the module."""
        if issubclass(owner, nn.Module):
            self.rng_default = "preserve"
            self.kind = self._registered()

    def __reduce__(self) -> Any:
        """Pickles a decorated function by its name, another region by its parts."""
        if _by_name(self) is self:
            return self._fun.__qualname__
        return type(self), (self._fun, self.settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> Region[_P, _R]:
        """Copies what is wrapped; options are values, and may hold a device mesh."""
        if _by_name(self) is self:
            return self
        return type(self)(copy.deepcopy(self._fun, memo), self.settings)

    def __repr__(self) -> str:
        """The function and its policy."""
        return f"remat({self._fun!r}, policy={self.settings.policy!r})"


# A decorator would hide from type checkers that these are methods.
for _name in ("__call__", "__get__"):
    _compat.unseen_by_dynamo(vars(Region)[_name])


@final
class MethodRegion(Region[_P, _R]):
    """A region around a method of one module, such as its `forward`.

    `torch.compile(module)` skips torch's own frames around `forward` and begins a graph at
    the first frame below them. If a region replaces `forward`, that is the `__call__` of
    this class, which Dynamo sees; that of other regions is hidden from it.
    """

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls the method; its backward will recompute."""
        return super().__call__(*args, **kwargs)


# One number for all regions with the same options around modules of the same classes.
_numbers: dict[tuple[object, ...], int] = {}


def kind_of(settings: Settings, where: str, *classes: type) -> str:
    """Registers a kind of regions for graphs of torch.compile, and returns its key.

    Args:
        settings: their options, `rng` among them.
        where: what messages call them.
        classes: of the modules that they are around, if they are.
    """
    number = _numbers.setdefault((settings, *classes), len(_numbers))
    key = f"{where}, kind {number}"
    around = functools.partial(_around_graph, settings, where)
    _in_graph.register(key, where, around, why_out_of_graphs(settings, where))
    return key


def _around_graph(
    settings: Settings, where: str, function: Callable[..., Any]
) -> Region[..., Any]:
    """A region around a graph of torch.compile, with a cache that it shares with no other."""
    # Dynamo has guarded what is static; a graph takes tensors alone.
    settings = dataclasses.replace(settings, statics=Statics())
    region = Region(function, settings, where)
    region.__dict__["_cache"] = Cache()
    return region


def _where(function: Callable[..., Any]) -> str:
    """What messages call the region of a function."""
    fun = inspect.unwrap(function)
    name = getattr(fun, "__qualname__", type(fun).__name__)
    code = getattr(fun, "__code__", None)
    if code is None:
        kind = cast("type[object]", type(fun))
        code = getattr(getattr(kind, "forward", None), "__code__", None)
    if code is None:
        return f"the region {name}"
    file = code.co_filename.rpartition("/")[2]
    return f"the region {name} ({file}:{code.co_firstlineno})"


def _by_name(region: Region[..., Any]) -> object:
    found: Any = sys.modules.get(getattr(region, "__module__", ""))
    for name in getattr(region, "__qualname__", "<none>").split("."):
        found = getattr(found, name, None)
    return found


@final
class BoundRegion:
    """A decorated method of one object."""

    def __init__(self, region: Region[..., Any], instance: object) -> None:
        self._region = region
        self.__self__ = instance
        self.__wrapped__ = region.__wrapped__.__get__(instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method; its backward will recompute."""
        return self._region(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What regions answer about a call, with the object filled in."""
        if name in ("programs", "saved_residuals"):
            return functools.partial(getattr(self._region, name), self.__self__)
        if name == "__code__":  # torch.export names the arguments of a forward by it
            return self.__wrapped__.__code__
        return getattr(self._region, name)


class RematModule(nn.Module):
    """A module decorated with `remat`: its parameters, buffers and children are shared.

    Whatever is done to one is done to the other; `state_dict` has the module's own keys.
    """

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        super().__init__()
        shared = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
        for name in shared:
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["__wrapped__"] = module
        self.__dict__["_region"] = Region(module, settings)
        self.__dict__["settings"] = settings

    @property
    def training(self) -> bool:
        """The module's own flag."""
        return self.__dict__["__wrapped__"].training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if "__wrapped__" in self.__dict__:
            self.__dict__["__wrapped__"].training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; its backward will recompute."""
        return self.__dict__["_region"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The module's attributes, and what regions answer about a call."""
        own = self.__dict__
        if name in _ANSWERS:
            return getattr(own["_region"], name)
        return getattr(own["__wrapped__"], name)

    def __reduce__(self) -> Any:
        """Pickles with its module."""
        return RematModule, (self.__dict__["__wrapped__"], self._region.settings)


_ANSWERS = (
    "programs",
    "saved_residuals",
    "entry_of",
    "found_for",
    "cache_info",
    "cache_clear",
)


def plain_region(fun: Callable[..., Any]) -> Region[..., Any]:
    """A region for looking at a plain function; it is never called and never warns."""
    settings = Settings(nothing_saveable, "preserve", "trace", Statics(), verify=False)
    return Region(fun, settings)


def undecided(fun: Callable[..., Any]) -> Region[..., Any]:
    """The region of a function, or of what another region runs, without its policy."""
    if isinstance(fun, RematModule):
        fun = fun.__dict__["_region"]
    if not isinstance(fun, (Region, BoundRegion)):
        return plain_region(fun)
    settings: Settings = fun.settings
    rng = settings.rng or fun.rng_default
    return Region(
        fun.__wrapped__,
        dataclasses.replace(settings, policy=nothing_saveable, rng=rng),
    )


def is_of_module(fun: object) -> bool:
    """Whether a function is an nn.Module or a method of one."""
    if isinstance(fun, types.MethodType):  # which Dynamo does not find by a name
        return isinstance(fun.__self__, nn.Module)
    return isinstance(getattr(fun, "__self__", fun), nn.Module)


def _as_leaf(tensor: Tensor) -> Tensor:
    if not _compat.is_fake(tensor):
        return tensor.detach().requires_grad_()
    # A stand-in was made outside the transforms and the trace around this call.
    with _compat.isolated():
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


@overload
def remat(
    fun: Callable[_P, _R],
    /,
    *,
    policy: PolicyLike = None,
    saved_inputs: SavedInputs = None,
    rng: str | None = None,
    engine: str = "trace",
    backend: str | None = None,
    dynamic_shapes: bool = False,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    verify: bool = False,
) -> Region[_P, _R]: ...


@overload
def remat(
    fun: None = None,
    /,
    *,
    policy: PolicyLike = None,
    saved_inputs: SavedInputs = None,
    rng: str | None = None,
    engine: str = "trace",
    backend: str | None = None,
    dynamic_shapes: bool = False,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    verify: bool = False,
) -> Callable[[Callable[_P, _R]], Region[_P, _R]]: ...


@_compat.unseen_by_dynamo
def remat(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    policy: PolicyLike = None,
    saved_inputs: SavedInputs = None,
    rng: str | None = None,
    engine: str = "trace",
    backend: str | None = None,
    dynamic_shapes: bool = False,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    verify: bool = False,
    **unknown: Any,
) -> Any:
    """Makes a function drop its intermediate values and recompute them in the backward.

    A pure function becomes a *region*. Between its forward and its backward, a region holds
    its inputs and the values that the policy permits, and nothing else. Its backward
    recomputes the other values that it reads. Regions work under plain autograd and under
    every torch.func transform, nested in any order, and inside each other.

    Laws: outputs and gradients are those of `fun`, to the last bit under `.backward()` on a
    CPU unless a storage is lossy, and to rounding elsewhere. No argument is changed, except
    buffers that `fun` itself changes. A tensor that `fun` reaches without an argument gets
    its gradient too, or the call raises.

    Args:
        fun: a function, a method or an nn.Module that takes and returns pytrees, with
            tensors of any shape and dtype. Another value of a tensor reuses the trace;
            another value of any other argument traces again.
        policy: which values may be saved; None means `policies.nothing_saveable`.
        saved_inputs: how inputs wait for the backward: a storage for all of them except
            parameters of modules, or a mapping from argument paths ("x",
            "batch.tokens", "params.*") to storages. None, and any torch.func
            transform, keeps them as they are.
        rng: "keys" refuses operators that draw from a `torch.Generator`; "preserve" draws
            the same numbers again and leaves generators as without remat. None means
            "keys" for functions, "preserve" for modules and their methods.
        engine: "trace" recomputes by a program that was traced from the function; "rerun"
            runs the Python function again, for functions that cannot be traced.
        backend: "inductor" compiles the region's programs with Inductor, also under
            torch.func; the numbers then agree to rounding. None runs operator by operator.
        dynamic_shapes: whether one trace serves all sizes of the arguments' dimensions,
            except 0 and 1. That trace takes about ten times as long as a trace for one
            size. Programs are as fast, because each size still gets its own.
        static_argnums: positions of arguments that are compared as a whole, by `==` and
            hash. They are not searched for tensors.
        static_argnames: names of such arguments, however they are passed.
        verify: whether the backward compares each saved value with its recomputation.
        **unknown: raises TypeError; for an option of jax.checkpoint or of torch's
            checkpoint, the error says what to write instead.

    Returns:
        A callable that looks like `fun`, with `.saved_residuals`, `.programs`,
        `.cache_info` and `.cache_clear`; an nn.Module where `fun` is one.

    Raises:
        PolicyError: `policy` is not a policy, or cannot be used with this engine.
        TypeError: `fun` is a class, makes generators or coroutines, or cannot be called; an
            option is unknown.
        ValueError: an option has a value that it cannot have.
        RematError: by a call, where the function cannot be recomputed; each kind has a
            class, such as `TraceError`.

    Example:
        >>> import torch
        >>> from remat import policies, remat
        >>> @remat(policy=policies.save_matmul_outputs)
        ... def mlp(params, x):
        ...     return torch.tanh(x @ params["up"]).square() @ params["down"]
        >>> params = {"up": torch.ones(2, 8), "down": torch.ones(8, 2)}
        >>> grads = torch.func.grad(lambda p, x: mlp(p, x).sum())(params, torch.ones(3, 2))
        >>> grads["up"].shape
        torch.Size([2, 8])

    References:
        `jax.checkpoint`; Chen et al., "Training Deep Nets with Sublinear Memory Cost",
        2016, https://arxiv.org/abs/1604.06174.
    """
    options: dict[str, Any] = {
        "policy": policy,
        "saved_inputs": saved_inputs,
        "rng": rng,
        "engine": engine,
        "backend": backend,
        "dynamic_shapes": dynamic_shapes,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "verify": verify,
        **unknown,
    }
    if fun is None:
        if is_dynamo_compiling():
            return functools.partial(_decorate_in_graph, options)
        return functools.partial(_decorate, settings=_settings(**options))
    if is_dynamo_compiling():
        return _decorate_in_graph(options, fun)
    return _decorate(fun, _settings(**options))


def _settings(
    *,
    policy: PolicyLike,
    saved_inputs: SavedInputs,
    rng: str | None,
    engine: str,
    backend: str | None,
    dynamic_shapes: bool,
    static_argnums: int | Iterable[int],
    static_argnames: str | Iterable[str],
    verify: bool,
    **unknown: Any,
) -> Settings:
    """The options of `remat`, checked."""
    require_known(unknown, [*(remat.__kwdefaults__ or ())])
    require_choice("rng", rng, (None, "keys", "preserve"))
    require_choice("engine", engine, ("trace", "rerun"))
    require_choice("backend", backend, (None, "inductor"))
    require_compilable(backend, engine, verify)
    require_choice("dynamic_shapes", dynamic_shapes, (False, True))
    require_traced(dynamic_shapes, engine)
    return Settings(
        policy_for(policy, engine),
        rng,
        engine,
        statics_of(static_argnums, static_argnames),
        verify,
        backend,
        inputs_for(saved_inputs, engine),
        dynamic_shapes,
    )


@_compat.unseen_by_dynamo
def _decorate(fun: Any, settings: Settings) -> Any:
    if is_dynamo_compiling():
        kind = _kind_of_settings(settings, is_of_module(fun))
        return _made_in_graph(
            kind, functools.partial(_decorate, settings=settings), fun
        )
    require_function(fun)
    require_parameters(fun, settings.statics)
    if isinstance(fun, nn.Module):
        return RematModule(fun, settings)
    if is_of_module(fun):
        return MethodRegion(fun, settings)
    return Region(fun, settings)


# What Dynamo traces where `remat` is called inside of what it traces. It follows options to
# where they were made, and has no whole value for those that are made in there.


@_compat.unseen_by_dynamo
def _decorate_in_graph(options: dict[str, Any], fun: Any) -> Any:
    """`remat` with options."""
    if isinstance(options["saved_inputs"], Mapping):
        _compat.end_graph(_MADE_OUTSIDE)
    why = _why_made_outside(**options)
    if why:
        _compat.end_graph(why)
    kind = _kind_of_options(is_of_module(fun), **options)
    return _made_in_graph(kind, functools.partial(remat, **options), fun)


def _made_in_graph(kind: str, make: Callable[..., Any], fun: Any) -> Any:
    """A function as a region of a kind; `make` makes it outside of the graph."""
    if not callable(fun) or isinstance(fun, type):
        _compat.end_graph(_MADE_OUTSIDE)
    return functools.partial(_call_made, kind, make, fun)


@_compat.unseen_by_dynamo
def _call_made(
    kind: str,
    make: Callable[..., Any],
    fun: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if is_dynamo_compiling():
        return call_in_graph(kind, fun, args, kwargs)
    return make(fun)(*args, **kwargs)


@_compat.constant_for_dynamo
def _why_made_outside(**options: Any) -> str:
    """Why a graph ends in front of a call of `remat`, if it does; else empty."""
    if not all(map(_compat.has_its_attributes, options.values())):
        return _MADE_OUTSIDE
    try:
        _settings(**options)
    except (RematError, TypeError, ValueError) as error:
        return str(error)  # which is raised outside of the graph
    return ""


@_compat.constant_for_dynamo
def _kind_of_options(is_of_module: bool, **options: Any) -> str:
    return _kind_of_settings(_settings(**options), is_of_module)


@_compat.constant_for_dynamo
def _kind_of_settings(settings: Settings, is_of_module: bool) -> str:
    rng = settings.rng or ("preserve" if is_of_module else "keys")
    return kind_of(dataclasses.replace(settings, rng=rng), "remat(...)")


_MADE_OUTSIDE = explain(
    where="remat(...)",
    what="is called under torch.compile with an option that is made there, or with "
    "what is not a function.",
    why="Python's objects that a compiled function makes are there when it runs, and "
    "not yet when it is compiled.",
    do="Make policies and storages outside of the compiled function, or decorate "
    "there; or compile without fullgraph=True: two graphs then leave room for the "
    "region.",
)
