"""The options of `remat`: their checks, and the errors for wrong ones."""

import dataclasses
import difflib
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypedDict, final, get_args

import torch
from torch import Tensor, nn

from remat._calls.signature import Statics
from remat._errors import (
    PolicyError,
    TraceError,
    explain,
    refusal,
    require_choice,
    require_count,
    require_hash,
    require_type,
    shown,
)
from remat.policies import AbstractPolicy, Value, as_policy, nothing_saveable
from remat.policies._as_policy import is_policy
from remat.storage import AbstractStorage, Keep

PolicyLike = AbstractPolicy | Callable[[Value], Any] | None
SavedInputs = AbstractStorage | Mapping[str, AbstractStorage] | None
Rng = Literal["keys", "preserve"] | None
Engine = Literal["trace", "rerun", "auto"]
Backend = Literal["inductor"] | None


class Options(TypedDict, total=False):
    """The options of `remat`, for type checkers."""

    policy: PolicyLike
    saved_inputs: SavedInputs
    rng: Rng
    engine: Engine
    backend: Backend
    dynamic_shapes: bool
    static_argnums: int | Iterable[int]
    static_argnames: str | Iterable[str]
    verify: bool
    cache_size: int


_CACHE_SIZE = 128
ENGINES = get_args(Engine)
_KEEP = Keep()


@final
@dataclasses.dataclass(frozen=True)
class InputStorages:
    """How inputs wait: `saved_inputs`."""

    #: For a path, which may be a glob, the storage.
    each: tuple[tuple[str, AbstractStorage], ...] = ()
    #: For inputs that no path names; parameters of modules are kept as they are.
    others: AbstractStorage = _KEEP
    #: Whether `others` is for arguments of a floating or complex dtype alone: not for masks
    #: and indices, nor for what the function captures.
    activations_only: bool = False

    @property
    def keeps(self) -> bool:
        """Whether all inputs wait as they are."""
        return self.others.keeps and all(storage.keeps for _, storage in self.each)

    def of(
        self, paths: Sequence[str], tensor: Tensor, *, is_argument: bool
    ) -> AbstractStorage:
        """The storage of one input, an argument or a captured tensor, which has these paths."""
        for glob, storage in self.each:
            if any(fnmatch.fnmatchcase(path, glob) for path in paths):
                return storage
        is_number = tensor.is_floating_point() or tensor.is_complex()
        is_kept = self.activations_only and not (is_argument and is_number)
        return _KEEP if is_kept or isinstance(tensor, nn.Parameter) else self.others


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `remat`, checked."""

    # Regions inside a traced function are told apart by their options.
    __remat_compares_as_a_whole__: ClassVar[bool] = True

    policy: AbstractPolicy = nothing_saveable
    rng: Rng = None
    engine: Engine = "trace"
    statics: Statics = dataclasses.field(default_factory=Statics)
    verify: bool = False
    backend: Backend = None
    inputs: InputStorages = InputStorages()
    dynamic_shapes: bool = False
    cache_size: int = _CACHE_SIZE

    def __post_init__(self) -> None:
        """Refuses options that have no effect together, or cannot be met together."""
        for option in self.of_traces if self.engine == "rerun" else ():
            name = option.partition("=")[0]
            raise refusal(
                PolicyError if name == "policy" else ValueError,
                where=f'remat(engine="rerun", {option})',
                what="has no effect with this engine.",
                why="It runs the Python function again, on arguments of any sizes as they "
                "are: it has no programs, and no graph whose values could be saved or "
                "compared one by one.",
                do=f'Leave `{name}` out, or use engine="trace".',
            )
        if self.verify and self.backend is not None:
            raise refusal(
                ValueError,
                where=f"remat(verify=True, backend={self.backend!r})",
                what="cannot be combined with a backend.",
                why="verify=True compares bits, and compiled programs round "
                "differently from single operators.",
                do="Verify without `backend`.",
            )

    @property
    def of_traces(self) -> list[str]:
        """The options that are given, and that a function which runs again cannot follow."""
        options = {
            f"policy={self.policy!r}": self.policy != nothing_saveable,
            "saved_inputs=...": not self.inputs.keeps,
            "verify=True": self.verify,
            f"backend={self.backend!r}": self.backend is not None,
            "dynamic_shapes=True": self.dynamic_shapes,
            f"cache_size={self.cache_size}": self.cache_size != _CACHE_SIZE,
        }
        return [option for option, is_given in options.items() if is_given]


def settings_of(
    *,
    policy: PolicyLike,
    saved_inputs: SavedInputs,
    rng: Rng,
    engine: Engine,
    backend: Backend,
    dynamic_shapes: bool,
    static_argnums: int | Iterable[int],
    static_argnames: str | Iterable[str],
    verify: bool,
    cache_size: int,
    **unknown: Any,
) -> Settings:
    """Checks the options of `remat`.

    Raises:
        PolicyError: `policy` is not a policy, or cannot be used with this engine.
        TypeError: an option is unknown, or of a wrong type.
        ValueError: an option has a value that it cannot have.
    """
    require_known(unknown, _NAMES)
    require_choice("rng", rng, (None, "keys", "preserve"))
    require_choice("engine", engine, ENGINES)
    require_choice("backend", backend, (None, "inductor"))
    require_choice("dynamic_shapes", dynamic_shapes, (False, True))
    require_choice("verify", verify, (False, True))
    require_count("remat(cache_size=...)", cache_size, at_least=1)
    positions = [static_argnums] if isinstance(static_argnums, int) else static_argnums
    names = [static_argnames] if isinstance(static_argnames, str) else static_argnames
    listed = (("static_argnums", positions), ("static_argnames", names))
    for name, given in listed:
        wanted = "a position or a name, or a tuple of these"
        require_type(f"remat({name}=...)", given, Iterable, wanted=wanted)
    return Settings(
        as_policy(policy),
        rng,
        engine,
        Statics(frozenset(positions), frozenset(names)),
        verify,
        backend,
        inputs_for(saved_inputs),
        dynamic_shapes,
        cache_size,
    )


_NAMES = inspect.getfullargspec(settings_of).kwonlyargs
_LEAVE_OUT = "Leave it out."
_OF_OTHERS: dict[str, tuple[str, str]] = {
    "fun": ("The function is passed by position.", "Write remat(fun, ...)."),
    "prevent_cse": (
        "No pass here merges a recomputation with the forward.",
        _LEAVE_OUT,
    ),
    "concrete": (
        "A trace has no values.",
        'Leave it out; a function that branches on values takes engine="rerun".',
    ),
    "use_reentrant": ("One implementation does what both variants do.", _LEAVE_OUT),
    "preserve_rng_state": (
        "`rng` says how random draws are repeated.",
        'Pass rng="preserve", the default of modules, or rng="keys".',
    ),
    "context_fn": (
        "`policy` says what is saved.",
        "Pass policy=policies.by_op(...), or call remat.interop.torch.checkpoint, which "
        "takes contexts.",
    ),
    "determinism_check": (
        "A trace is one program, so the recomputation runs the same operators.",
        "Leave it out; verify=True looks for nondeterministic kernels.",
    ),
    "debug": (
        "The errors of a trace name the operator and the line anyway.",
        "Leave it out; region.programs(*args) shows what runs.",
    ),
    "early_stop": (
        "A backward recomputes only what some gradient needs anyway.",
        _LEAVE_OUT,
    ),
}


def require_known(unknown: Iterable[str], known: Sequence[str]) -> None:
    """Refuses an option that `remat` does not have; of one of a peer it says what to write."""
    for name in unknown:
        near = difflib.get_close_matches(name, known, 1)
        do = f"Write `{near[0]}`." if near else "Use one of these."
        of_remat = f"The options are {', '.join(known)}.", do
        why, do = _OF_OTHERS.get(name, of_remat)
        where, what = f"remat({name}=...)", "is not an option of remat."
        raise refusal(TypeError, where=where, what=what, why=why, do=do)


def require_function(fun: Any) -> None:
    """Refuses what is not a function, and what does its work after its call has ended."""
    if is_policy(fun):
        raise refusal(
            TypeError,
            where=f"remat({fun!r})",
            what="got a policy in the place of the function.",
            why="A policy can be called too, but a region is put around the function.",
            do=f"Pass it by keyword: @remat(policy={fun!r}).",
        )
    if not callable(fun):
        raise refusal(
            TypeError,
            where=f"remat({shown(fun)})",
            what="is no function.",
            why="A region is put around what is called, and options are passed by keyword.",
            do="Pass the function, not what it returns: remat(f, policy=...)(x).",
        )
    if isinstance(fun, type):
        raise refusal(
            TypeError,
            where=f"remat({fun.__qualname__})",
            what="is a class.",
            why="Its construction would be recomputed, but not the calls of its objects.",
            do="Decorate the method, as in `@remat` above `def forward`; wrap an "
            f"object, remat({fun.__name__}(...)); or give the modules of a model their "
            "regions with modules.apply.",
        )
    if isinstance(fun, torch.jit.ScriptModule) and "_parameters" not in vars(fun):
        raise TraceError.of(
            where=f"remat({type(fun).__name__})",
            what="is a module that torch.jit.trace has made.",
            why="TorchScript's interpreter runs its forward, and hides its operators and "
            "the gradients of its parameters from a region.",
            do="Decorate the module from before torch.jit.trace.",
        )
    yields = inspect.isgeneratorfunction(fun) or inspect.isasyncgenfunction(fun)
    if yields or inspect.iscoroutinefunction(fun):
        raise refusal(
            TypeError,
            where=f"remat({getattr(fun, '__qualname__', repr(fun))})",
            what=f"makes a {'generator' if yields else 'coroutine'}.",
            why="Calling it computes nothing yet: the work would be done after the "
            "region has ended.",
            do="Return a list of what it yields."
            if yields
            else "Decorate the function that computes, and call it from there.",
        )


def require_parameters(fun: Any, statics: Statics) -> None:
    """Refuses static arguments that the function does not have."""
    if not statics.are_given:
        return
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        # Builtins without a signature.
        return
    kinds = {parameter.kind for parameter in parameters.values()}
    count = len(parameters)
    unknown = sorted(statics.names.difference(parameters))
    beyond = sorted(statics.positions.difference(range(-count, count)))
    for option, wrong, others in (
        ("static_argnames", unknown, inspect.Parameter.VAR_KEYWORD),
        ("static_argnums", beyond, inspect.Parameter.VAR_POSITIONAL),
    ):
        if wrong and others not in kinds:
            raise refusal(
                ValueError,
                where=f"remat({option}=...)",
                what=f"{wrong[0]!r} is not a parameter of the function.",
                why=f"Its parameters are {', '.join(parameters)}.",
                do="Correct the name or the position.",
            )


def why_out_of_graphs(settings: Settings, where: str) -> str:
    """Why a region with these options can be in no graph of torch.compile; else empty."""
    options = {
        'engine="rerun"': settings.engine == "rerun",
        "verify=True": settings.verify,
        # Arguments of a graph have no names.
        "saved_inputs={...}": settings.inputs.each,
    }
    given = [option for option, is_set in options.items() if is_set]
    if not given:
        return ""
    return explain(
        where=where,
        what=f"has {' and '.join(given)}, and is called under torch.compile.",
        why="What it does in the backward cannot be part of a graph.",
        do="Leave it out, or compile without fullgraph=True: the region then runs "
        "between two graphs.",
    )


def inputs_for(saved_inputs: SavedInputs) -> InputStorages:
    if saved_inputs is None:
        return InputStorages()
    where = "remat(saved_inputs=...)"
    is_map = isinstance(saved_inputs, Mapping)
    each = tuple(saved_inputs.items()) if is_map else ()
    found = InputStorages(each, others=_KEEP if is_map else saved_inputs)
    for path, _ in found.each:
        if not isinstance(path, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f'{where} names arguments by strings, such as "x", not by {path!r}.'
            )
    wanted = (
        "a storage value, such as storage.Keep(), or a mapping from argument paths to "
        "storage values"
    )
    for storage in (*(storage for _, storage in found.each), found.others):
        require_type(where, storage, AbstractStorage, wanted=wanted)
        require_hash(where, storage)
    return found
