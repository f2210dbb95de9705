"""Puts a region in place of a module's `forward`, and takes it out again.

The region is the attribute `forward` of the *instance*. The class does not change, nor
what other tools do by changing it (`fully_shard`, parametrizations), before or after.
"""

import contextlib
import fnmatch
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, Unpack, cast

import torch
from torch import nn

from remat._api import remat
from remat._calls.decorated import DecoratedFunction
from remat._calls.options import Options
from remat._errors import (
    TraceError,
    refusal,
    require_count,
    require_type,
    shown,
    takes,
)
from remat._user_lines import warn

_M = TypeVar("_M", bound=nn.Module)
_Class: TypeAlias = type[nn.Module]
Where: TypeAlias = _Class | tuple[_Class, ...] | str | Callable[[str, nn.Module], bool]


def apply(
    model: _M, where: Where, *, every: int = 1, **remat_options: Unpack[Options]
) -> _M:
    """Makes modules of a model recompute, in place.

    Each module that matches gets a region around its `forward`, as if its class had
    been written with `@remat`. Nothing else of it changes: parameters and their names,
    `state_dict`, class, `train()`, `to()`, `copy.deepcopy` and pickling are as before.
    Equal modules share one trace. A module's own hooks run around its region, once per
    call. Hooks of modules *inside* it are traced, so their Python runs once per trace.

    Matches may nest: the outer region's policy then decides what is held for its
    backward, and the inner regions bound the peak of its recomputation. A region that a
    module already has is replaced by one with the new options.

    Args:
        model: the model, which may itself match.
        where: a class or a tuple of classes; a glob over qualified names, in which `*`
            stands for one part ("layers.*", "layers.*.mlp") and `**` for any number of
            parts; or a predicate `(name, module) -> bool`.
        every: takes the first of the matches and each `every`-th after it.
        **remat_options: options of `remat`. Modules default to `rng="preserve"`.

    Returns:
        The model.

    Raises:
        TypeError: `where` is not one of these, or `remat` has no such option.
        ValueError: an option has a value that it cannot have.
        PolicyError: `policy` is not a policy.
        TraceError: a match is a ScriptModule. No module is changed.

    Warns:
        RematWarning: nothing matches, or a match is a container that is never called.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from remat import modules, policies
        >>> layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(4)]
        >>> model, policy = nn.Sequential(*layers), policies.save_attention_outputs
        >>> model = modules.apply(model, "*", policy=policy)
        >>> model(torch.ones(3, 1, 8, requires_grad=True)).sum().backward()
        >>> model[3].forward.cache_info().misses  # one trace serves four layers
        1
        >>> _ = modules.remove(model)
    """
    require_count("modules.apply(every=...)", every, at_least=1)
    decorate = remat(**{"rng": "preserve", **remat_options})
    for module in _with_a_forward(matching(model, where), where)[::every]:
        object.__setattr__(module, "forward", decorate(_own_forward(module)))
    return model


def remove(model: _M) -> _M:
    """Takes the regions out of a model that `apply` put there, in place.

    Args:
        model: the model, or a part of it; its submodules are searched too.

    Returns:
        The model, as it was before `apply`.

    Example:
        >>> from torch import nn
        >>> from remat import modules
        >>> model = modules.apply(nn.Sequential(nn.Linear(2, 2)), nn.Linear)
        >>> "forward" in vars(modules.remove(model)[0])
        False
    """
    require_type("modules.remove(model)", model, nn.Module, wanted="a module")
    for module in model.modules():
        if region_of(module) is None:
            continue
        own = _own_forward(module)
        # The class's `forward`, which the module has without a region.
        if own == type(module).forward.__get__(module):
            del module.__dict__["forward"]
        else:
            object.__setattr__(module, "forward", own)
    return model


@contextlib.contextmanager
def without_regions(models: Iterable[nn.Module]) -> Generator[None]:
    """Takes the regions out of models, and puts them back if what is inside raises."""
    with contextlib.ExitStack() as undo:
        for model in models:
            for module in model.modules():
                if (region := region_of(module)) is not None:
                    undo.callback(object.__setattr__, module, "forward", region)
            remove(model)
        yield
        undo.pop_all()


def region_of(module: nn.Module) -> DecoratedFunction[..., Any] | None:
    """The region that `apply` put into a module, None where there is none."""
    found = module.__dict__.get("forward")
    return found if isinstance(found, DecoratedFunction) else None  # pyright: ignore[reportUnknownVariableType]


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    """What a module's region runs, if it has one; a shallow copy shares the original's."""
    region = region_of(module)
    if region is None:
        return module.forward
    region.follow_class()
    own = region.__wrapped__
    method = getattr(own, "__func__", None)
    return own if method is None else types.MethodType(method, module)


def _with_a_forward(
    found: Sequence[tuple[str, nn.Module]], where: Where
) -> list[nn.Module]:
    """The modules that can be called; warns of a container, and if nothing matches."""
    callable_ones: list[nn.Module] = []
    said = f"modules.apply(where={where!r})"
    for name, module in found:
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError.of(
                where=said,
                what=f"matches `{name}`, a {type(module).__name__}.",
                why="TorchScript's interpreter runs its forward, and hides its operators "
                "and the gradients of its parameters from a region.",
                do="Use the module from before torch.jit.script, or exclude it from "
                "`where`.",
            )
        if type(module).forward is nn.Module.forward:
            warn(
                where=said,
                what=f"`{name}`, a {type(module).__name__}, has no `forward`.",
                why="It is a container, of which only the parts are called.",
                do=f'Name the parts: "{name}.*".' if name else 'Name the parts: "*".',
            )
        else:
            callable_ones.append(module)
    if not found:
        warn(
            where=said,
            what="matches no module of the model.",
            why="A glob is compared part by part with qualified names, and a class with "
            "isinstance.",
            do="Look at the names with model.named_modules().",
        )
    return callable_ones


def matching(model: nn.Module, where: Where) -> list[tuple[str, nn.Module]]:
    """The modules that `where` means, each once, by its first name, in the model's order."""
    wanted = "a module; a function becomes a region by remat(function)"
    require_type("modules.apply(model)", model, nn.Module, wanted=wanted)
    matches = _matcher(where)
    found: dict[int, tuple[str, nn.Module]] = {}
    # torch has not annotated what it yields.
    named = cast("Any", model).named_modules(remove_duplicate=False)
    for name, module in cast("Iterator[tuple[str, nn.Module]]", named):
        if id(module) not in found and matches(name, module):
            found[id(module)] = (name, module)
    return [*found.values()]


def _matcher(where: Where) -> Callable[[str, nn.Module], bool]:
    if isinstance(where, str):
        glob = _name_parts(where)
        return lambda name, module: _fits_glob(_name_parts(name), glob)
    given = cast("Any", where)
    classes = cast("tuple[Any, ...]", given if isinstance(where, tuple) else (given,))
    if all(isinstance(each, type) for each in classes):
        return lambda name, module: isinstance(module, classes)
    if callable(given) and not isinstance(given, nn.Module) and takes(given, 2):
        return cast("Any", given)
    # A module is not printed whole.
    is_module = isinstance(given, nn.Module)
    got = f"a {type(given).__name__}" if is_module else shown(given)
    raise refusal(
        TypeError,
        where="modules.apply(where=...)",
        what=f"got {got}.",
        why="It is a class of modules, a tuple of classes, a glob over qualified names such "
        'as "layers.*", or a predicate of two arguments, (name, module) -> bool.',
        do="For some by name, pass lambda name, module: name in names.",
    )


def _name_parts(name: str) -> list[str]:
    """The parts of a qualified name; the model itself has none."""
    return name.split(".") if name else []


def _fits_glob(parts: Sequence[str], glob: Sequence[str]) -> bool:
    """Whether a name fits a glob, part by part; "**" stands for any number of parts."""
    if not glob:
        return not parts
    first, *rest = glob
    if first == "**":
        return any(_fits_glob(parts[skip:], rest) for skip in range(len(parts) + 1))
    is_first = bool(parts) and fnmatch.fnmatchcase(parts[0], first)
    return is_first and _fits_glob(parts[1:], rest)
