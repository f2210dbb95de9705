"""Finds modules of a model by class, by name, or by a predicate."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

from torch import nn

Where: TypeAlias = (
    type[nn.Module]
    | tuple[type[nn.Module], ...]
    | str
    | Callable[[str, nn.Module], bool]
)


def matching(model: nn.Module, where: Where) -> list[tuple[str, nn.Module]]:
    """The modules that `where` means, each once, by its first name, in the model's order.

    Raises:
        TypeError: `model` is not a module, or `where` is not one of the forms that it can
            have.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"modules.apply looks for modules in an nn.Module, not in {model!r}, of type "
            f"{type(model).__name__}. To make a function a region, use remat(function)."
        )
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
        glob = _parts(where)
        return lambda name, module: _fits(_parts(name), glob)
    if isinstance(where, (type, tuple)):
        classes = cast(
            "tuple[Any, ...]", where if isinstance(where, tuple) else (where,)
        )
        if not all(isinstance(each, type) for each in classes):
            raise _not_a_place(where)
        return lambda name, module: isinstance(module, classes)
    if isinstance(where, nn.Module) or not callable(where):
        raise _not_a_place(cast("object", where))
    return where


def _parts(name: str) -> list[str]:
    """The parts of a qualified name; the model itself has none."""
    return name.split(".") if name else []


def _fits(parts: Sequence[str], glob: Sequence[str]) -> bool:
    """Whether a name fits a glob, part by part; "**" stands for any number of parts."""
    if not glob:
        return not parts
    first, *rest = glob
    if first == "**":
        return any(_fits(parts[skip:], rest) for skip in range(len(parts) + 1))
    return (
        bool(parts) and fnmatch.fnmatchcase(parts[0], first) and _fits(parts[1:], rest)
    )


def _not_a_place(where: Any) -> TypeError:
    modules = isinstance(where, nn.Module | list | tuple | set | frozenset)
    found = type(where).__name__ if isinstance(where, nn.Module) else repr(where)
    text = (
        f"modules.apply looks for a class of modules, a tuple of classes, a glob over "
        f'qualified names such as "layers.*", or a predicate (name, module) -> bool, not '
        f"for {found}."
    )
    hint = " For some by name: lambda name, module: name in names." if modules else ""
    return TypeError(text + hint)
