"""The decorator: check the options, and put a region around what is decorated."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

from torch import nn
from torch.compiler import is_dynamo_compiling

from remat._calls import decorated_in_graph
from remat._calls.decorated import (
    DecoratedFunction,
    RematModule,
    is_of_module,
)
from remat._calls.method_region import MethodRegion
from remat._calls.options import (
    Backend,
    Engine,
    Options,
    PolicyLike,
    Rng,
    SavedInputs,
    Settings,
    require_function,
    require_parameters,
    settings_of,
)
from remat._torch import dynamo

_M = TypeVar("_M", bound=nn.Module)
_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Decorator(Protocol):
    """`remat` with options, and without the function."""

    @overload
    def __call__(self, fun: _M, /) -> _M: ...

    @overload
    def __call__(self, fun: Callable[_P, _R], /) -> DecoratedFunction[_P, _R]: ...


# As type checkers see it, a decorated module is of its own class.
@overload
def remat(fun: _M, /, **options: Unpack[Options]) -> _M: ...


@overload
def remat(
    fun: Callable[_P, _R], /, **options: Unpack[Options]
) -> DecoratedFunction[_P, _R]: ...


@overload
def remat(fun: None = None, /, **options: Unpack[Options]) -> _Decorator: ...


@dynamo.unseen_by_dynamo
def remat(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    policy: PolicyLike = None,
    saved_inputs: SavedInputs = None,
    rng: Rng = None,
    engine: Engine = "trace",
    backend: Backend = None,
    dynamic_shapes: bool = False,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    verify: bool = False,
    cache_size: int = 128,
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
            runs the Python function again, for functions that cannot be traced; "auto"
            traces, and where a trace is refused runs such calls again from then on, with
            one warning.
        backend: "inductor" compiles the region's programs with Inductor, also under
            torch.func; the numbers then agree to rounding. None runs operator by operator.
        dynamic_shapes: whether one trace serves all sizes of the arguments' dimensions,
            except 0 and 1. That trace takes about ten times as long as a trace for one
            size. Programs are as fast, because each size still gets its own.
        static_argnums: positions of arguments that are compared as a whole, by `==` and
            hash. They are not searched for tensors.
        static_argnames: names of such arguments, however they are passed.
        verify: whether the backward compares each saved value with its recomputation.
        cache_size: how many traces of the function's code are kept, each for about half a
            megabyte of host memory; at the limit the one used longest ago is dropped.
        **unknown: raises TypeError; for an option of jax.checkpoint or of torch's
            checkpoint, the error says what to write instead.

    Returns:
        A callable that looks like `fun`, with `.saved_residuals`, `.programs`,
        `.cache_info` and `.cache_clear`; an nn.Module where `fun` is one, which for type
        checkers is of the class of `fun`.

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
        "cache_size": cache_size,
        **unknown,
    }
    if fun is None:
        if is_dynamo_compiling():
            return functools.partial(decorated_in_graph.with_options, remat, options)
        return functools.partial(_remat_with, settings=settings_of(**options))
    if is_dynamo_compiling():
        return decorated_in_graph.with_options(remat, options, fun)
    return _remat_with(fun, settings_of(**options))


@dynamo.unseen_by_dynamo
def _remat_with(fun: Any, settings: Settings) -> Any:
    if is_dynamo_compiling():
        return decorated_in_graph.with_settings(_remat_with, settings, fun)
    if isinstance(fun, (staticmethod, classmethod)):
        method = cast("staticmethod[..., Any] | classmethod[Any, ..., Any]", fun)
        return type(method)(_remat_with(method.__func__, settings))
    require_function(fun)
    require_parameters(fun, settings.statics)
    if isinstance(fun, nn.Module):
        return RematModule(fun, settings)
    if is_of_module(fun):
        return MethodRegion(fun, settings)
    return DecoratedFunction(fun, settings)
