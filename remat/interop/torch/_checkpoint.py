"""The functions and switches of `torch.utils.checkpoint` of torch 2.15, by regions.

A switch for something that regions always do is silent; one for something that they
cannot do warns that it has no effect.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, SupportsIndex, TypeAlias, final

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import noop_context_fn

from remat._calls import torch_compile
from remat._calls.decorated import DecoratedFunction, kind_of
from remat._calls.options import ENGINES, Engine, Settings
from remat._errors import (
    ImplicitRandomnessError,
    refusal,
    require_choice,
    require_type,
    shown,
)
from remat._torch import dynamo
from remat._user_lines import warn
from remat.interop._shared import warn_without_effect
from remat.interop.torch._selective import Selective, SelectiveContext
from remat.policies import AbstractPolicy, nothing_saveable

ContextFn: TypeAlias = Callable[
    [], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
]

# Why what torch can do by an option or by a switch has no effect, and what to do.
_WITHOUT_EARLY_STOP = (
    "A traced region always recomputes only what some gradient needs.",
    'Leave it out, or pass engine="rerun" to checkpoint, which runs the whole function.',
)
_WITH_DEBUG = (
    "A recomputation runs the program that was traced, and cannot run other operators; "
    "errors of a trace always name the operator and the line.",
    "Leave it out; to look for a nondeterministic kernel, use remat(verify=True).",
)
_WITH_DEBUG_OF_RERUN = (
    "A function that runs again is not compared operator by operator, so there is no log "
    "of either run; its errors have their own traceback.",
    'Leave it out; engine="trace" runs one program, which cannot run other operators.',
)


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The options of `checkpoint`, with torch's names."""

    use_reentrant: bool | None = None
    preserve_rng_state: bool = True
    context_fn: ContextFn = noop_context_fn
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True
    respect_saved_tensors_hooks: bool | None = None
    engine: Engine = "trace"

    def __post_init__(self) -> None:
        require_choice("engine", self.engine, ENGINES)
        if not isinstance(self.use_reentrant, bool | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"checkpoint(use_reentrant=...): it can be True, False or None, and is a "
                f"{type(self.use_reentrant).__name__}. Functions in a row take one input."
            )
        checks, check = ("default", "none"), self.determinism_check
        require_choice("determinism_check", check, checks, "checkpoint")
        is_plain = self.context_fn is noop_context_fn and not self.debug
        is_plain = is_plain and self.respect_saved_tensors_hooks is None
        if self.use_reentrant and not is_plain:
            raise ValueError(
                "checkpoint(context_fn=..., debug=..., respect_saved_tensors_hooks=...) is "
                "only supported when use_reentrant=False, as in torch."
            )
        if not (self.early_stop or self.use_reentrant or self.engine == "rerun"):
            warn_without_effect("checkpoint(early_stop=False)", *_WITHOUT_EARLY_STOP)
        if self.respect_saved_tensors_hooks is False:
            raise refusal(
                NotImplementedError,
                where="checkpoint(respect_saved_tensors_hooks=False)",
                what="asks for saved values to be kept from surrounding saved-tensor hooks.",
                why="A region saves its values as any autograd.Function does, and torch "
                "passes them to the hooks.",
                do="Leave the option out, or make the call outside the hooks.",
            )
        if self.debug:
            reason = _WITH_DEBUG if self.engine == "trace" else _WITH_DEBUG_OF_RERUN
            warn_without_effect("checkpoint(debug=True)", *reason)

    @property
    def settings(self) -> Settings:
        """The options of `remat` that do the same."""
        policy = policy_of(self.context_fn)
        return _peer_settings(policy, self.preserve_rng_state, self.engine)

    def region(self, function: Callable[..., Any]) -> DecoratedFunction[..., Any]:
        return DecoratedFunction(function, self.settings)

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if is_dynamo_compiling():
            kind = _graph_kind(
                context_fn=self.context_fn,
                preserve_rng_state=self.preserve_rng_state,
                engine=self.engine,
            )
            return torch_compile.call(kind, function, args, kwargs)
        if self.use_reentrant and kwargs:
            raise ValueError(
                f"checkpoint(use_reentrant=True) takes no keyword arguments for the "
                f"function, as in torch, and got {', '.join(kwargs)}."
            )
        try:
            return self.region(function)(*args, **kwargs)
        except ImplicitRandomnessError as error:
            if self.preserve_rng_state:
                raise
            raise ImplicitRandomnessError.of(
                where="checkpoint(preserve_rng_state=False)",
                what=f"the function draws random numbers ({str(error).partition(': ')[0]}).",
                why="The recomputation would draw others, and gradients would be wrong.",
                do="Leave preserve_rng_state out.",
            ) from error


def require_options(
    where: str, given: Iterable[str], known: Iterable[str], why: str, do: str
) -> None:
    """Refuses what is no option of `checkpoint` that `where` takes."""
    for name in given:
        if name not in known:
            raise refusal(
                TypeError,
                where=f"{where}({name}=...)",
                what=f"is no option here. The options are {', '.join(known)}.",
                why=why,
                do=do,
            )


@functools.lru_cache(maxsize=256)
def _peer_settings(
    policy: AbstractPolicy, preserve_rng_state: bool, engine: Engine
) -> Settings:
    return Settings(policy, "preserve" if preserve_rng_state else "keys", engine)


@dynamo.constant_for_dynamo
def _graph_kind(**options: Any) -> str:
    """What a graph of torch.compile calls the regions with these options."""
    return kind_of(CheckpointOptions(**options).settings, "checkpoint(...)")


@dynamo.unseen_by_dynamo
def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    engine: Engine = "trace",
    **kwargs: Any,
) -> Any:
    """Calls a function so that its backward recomputes, with torch's signature.

    The numbers are those of a plain call, under `.backward()` and under every
    torch.func transform, where torch's own checkpoint raises. The function is traced
    once per signature and does not run again: its Python side effects happen only in
    the trace. If the same code was called before, there is no new trace, even for a new
    lambda, partial or bound method.

    Args:
        function: what to run; without it, a decorator with these options is returned.
        *args: its positional arguments.
        use_reentrant: both values run the same implementation, which does what torch's
            non-reentrant variant does. True refuses what torch refuses with it.
        preserve_rng_state: whether the recomputation draws the same random numbers. If
            it is False, a function that draws raises, where torch's gradients would be
            wrong.
        context_fn: makes the contexts of `create_selective_checkpoint_contexts`, ours
            or torch's; other contexts raise.
        determinism_check: "default" or "none". A traced function is one program, and cannot
            differ from itself.
        debug: warns: errors of a trace always name the operator and the line.
        early_stop: False warns, because a traced recomputation always runs only what
            some gradient needs. `engine="rerun"` always runs the whole function. As in
            torch, the option is ignored with `use_reentrant=True`.
        respect_saved_tensors_hooks: None or True: hooks around the call see the saved
            values.
        engine: of `remat`: "trace", "rerun" for functions that cannot be traced, or "auto".
            It has no counterpart in torch.
        **kwargs: keyword arguments of the function.

    Returns:
        What `function` returns.

    Raises:
        TraceError: the function cannot be traced.
        ImplicitRandomnessError: it draws, and `preserve_rng_state` is False.
        ValueError: an option has a value that it cannot have.
        NotImplementedError: an option asks for what a region cannot do.

    Example:
        >>> import torch
        >>> from remat.interop.torch import checkpoint
        >>> x = torch.ones(3, requires_grad=True)
        >>> checkpoint(lambda x: x.sin().sin(), x, use_reentrant=False).sum().backward()
        >>> x.grad.shape
        torch.Size([3])
    """
    options = CheckpointOptions(
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
        engine=engine,
    )
    if function is not None:
        return options.run(function, args, kwargs)
    if args or kwargs:
        raise ValueError(
            "checkpoint() without a function is a decorator, and got "
            f"{', '.join(map(shown, (*args, *kwargs)))}."
        )
    return options.region


@dynamo.unseen_by_dynamo
def checkpoint_sequential(
    functions: nn.Sequential | nn.ModuleList | Sequence[Callable[[Any], Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Runs functions one after the other, in segments that recompute but for the last.

    Args:
        functions: an `nn.Sequential`, or a list of modules or functions of one argument.
        segments: the number of parts into which they are divided, at most their number.
        input: what the first of them takes.
        use_reentrant: see `checkpoint`.
        **kwargs: `preserve_rng_state`, and `engine`; see `checkpoint`.

    Returns:
        What the last of them returns.

    Raises:
        ValueError: `segments` is out of bounds.
        TypeError: there is no such option.

    Warns:
        RematWarning: there is one segment, which is the last, and recomputes nothing.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from remat.interop.torch import checkpoint_sequential
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        >>> checkpoint_sequential(model, 3, torch.ones(2, 4), use_reentrant=False).shape
        torch.Size([2, 4])
    """
    require_options(
        "checkpoint_sequential",
        kwargs,
        ("preserve_rng_state", "engine"),
        why="As in torch, functions in a row take no keyword arguments.",
        do="Leave it out, or call checkpoint for each part.",
    )
    options = CheckpointOptions(use_reentrant=use_reentrant, **kwargs)
    wanted = "modules or functions that run one after the other"
    where = "checkpoint_sequential(functions, ...)"
    require_type(where, functions, Iterable, wanted=wanted)
    where = "checkpoint_sequential(segments=...)"
    require_type(where, segments, SupportsIndex, wanted="an int")
    is_module = isinstance(functions, nn.Sequential)
    parts = tuple(functions.children() if is_module else functions)
    if not 1 <= segments <= len(parts):
        raise ValueError(
            f"checkpoint_sequential(segments={segments!r}): {len(parts)} functions can be "
            f"divided into 1 to {len(parts)} segments."
        )
    if segments == 1:
        warn(
            where="checkpoint_sequential(segments=1)",
            what="recomputes nothing.",
            why="The last segment is not recomputed, and it is the only one.",
            do="Use more segments, or checkpoint(nn.Sequential(...), input).",
        )
    size = len(parts) // segments
    last = size * (segments - 1)
    for start in range(0, last, size):
        segment = functools.partial(_run_segment, parts[start : start + size])
        input = options.run(segment, (input,), {})
    return _run_segment(parts[last:], input)


def _run_segment(functions: tuple[Callable[[Any], Any], ...], value: Any) -> Any:
    for function in functions:
        value = function(value)
    return value


def policy_of(context_fn: ContextFn) -> AbstractPolicy:
    """The policy that a `context_fn` of `checkpoint` carries; refuses other contexts."""
    if context_fn is noop_context_fn:
        return nothing_saveable
    first, second = context_fn()
    if isinstance(first, SelectiveContext):
        return first.policy
    # Torch's own context, known by its module, so that this one is not imported.
    is_of_torch = type(first).__module__ == "torch.utils.checkpoint"
    peer = getattr(first, "policy_fn", None) if is_of_torch else None
    if peer is not None:
        return Selective.of(peer)
    if all(isinstance(each, contextlib.nullcontext) for each in (first, second)):
        return nothing_saveable
    raise refusal(
        NotImplementedError,
        where=f"checkpoint(context_fn={context_fn!r})",
        what=f"makes the contexts {first!r} and {second!r}.",
        why="The backward runs a program, not the function, so there is no "
        "second run for a context to enclose.",
        do="Enter the first context around the call; to choose what is saved, use "
        "create_selective_checkpoint_contexts or a policy of remat.",
    )


@contextlib.contextmanager
def set_checkpoint_early_stop(enable: bool) -> Generator[None]:
    """Does nothing: a recomputation always ends with the last value that is needed.

    Args:
        enable: True has no effect, because it always holds.

    Warns:
        RematWarning: it is False, which has no effect.

    Example:
        >>> from remat.interop.torch import set_checkpoint_early_stop
        >>> with set_checkpoint_early_stop(True):
        ...     pass
    """
    if not enable:
        warn_without_effect("set_checkpoint_early_stop(False)", *_WITHOUT_EARLY_STOP)
    yield


@contextlib.contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Generator[None]:
    """Does nothing: there is one program, and no log to compare.

    Args:
        enabled: None and False have no effect, because they always hold.

    Warns:
        RematWarning: it is True, which has no effect.

    Example:
        >>> from remat.interop.torch import set_checkpoint_debug_enabled
        >>> with set_checkpoint_debug_enabled(None):
        ...     pass
    """
    if enabled:
        warn_without_effect("set_checkpoint_debug_enabled(True)", *_WITH_DEBUG)
    yield


@final
class GraphExecGroup:
    """In torch, backwards inside it recompute a region once; here each one does.

    Gradients are the same. A region is one node of the graph, and its recomputed values
    are freed when that node has run.

    Warns:
        RematWarning: it is entered, which has no effect.

    Example:
        >>> import warnings
        >>> from remat.interop.torch import GraphExecGroup
        >>> with warnings.catch_warnings(action="ignore"), GraphExecGroup():
        ...     pass
    """

    def __enter__(self) -> Self:
        warn_without_effect(
            "GraphExecGroup()",
            "A region is one node of the graph: each backward through it recomputes.",
            "Leave it out, and take gradients that share a region in one call.",
        )
        return self

    def __exit__(self, *details: object) -> None:
        """Does nothing."""


@final
class CheckpointFunction:
    """The `autograd.Function` of torch's reentrant variant, for its `apply`.

    Example:
        >>> import torch
        >>> from remat.interop.torch import CheckpointFunction
        >>> x = torch.ones(3, requires_grad=True)
        >>> CheckpointFunction.apply(torch.sin, True, x).sum().backward()
        >>> x.grad.shape
        torch.Size([3])
    """

    @staticmethod
    def apply(
        run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any
    ) -> Any:
        """Calls `checkpoint(run_function, *args, use_reentrant=True)`, which see."""
        return checkpoint(
            run_function,
            *args,
            use_reentrant=True,
            preserve_rng_state=preserve_rng_state,
        )
