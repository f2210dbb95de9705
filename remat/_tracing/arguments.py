"""The arguments of a call: what messages call their leaves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from remat._torch import trees


def labels(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """What messages and reports call each leaf of a call: "x", "params.w", "xs.0"."""
    names = parameter_names(function, len(args))
    return tuple(
        ".".join([name, *path])
        for name, tree in [*zip(names, args, strict=True), *kwargs.items()]
        for path, _ in trees.leaves_with_path(tree)
    )


_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def positional_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that take arguments by position, in order."""
    # A module's own signature is (*args, **kwargs): what it is called with goes to forward.
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        every = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        # Builtins without a signature.
        return []
    return [each for each in every if each.kind in _BY_POSITION]


def parameter_names(function: Callable[..., Any], count: int) -> list[str]:
    """What the first arguments of a call are called; those of `*xs` are xs.0, xs.1, ..."""
    positional = positional_parameters(function)
    names: list[str] = []
    for index in range(count):
        last = min(index, len(positional) - 1)
        if not positional:
            names.append(f"args.{index}")
        elif positional[last].kind is inspect.Parameter.VAR_POSITIONAL:
            names.append(f"{positional[last].name}.{index - last}")
        else:
            names.append(positional[last].name)
    return names
