"""The arguments of a call: what messages call their leaves, and that they stay as they are."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from remat._errors import MutationError, SideEffectError
from remat._torch import levels, trees
from remat._torch.tensors import storage_key
from remat._user_lines import user_line

_BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
_BY_VALUE = frozenset({bool, int, float, complex, str, bytes, set})


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


def positional_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that take arguments by position, in order."""
    # A module's own signature is (*args, **kwargs): what it is called with goes to forward.
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        every = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return []
    return [each for each in every if each.kind not in _BY_KEYWORD]


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


@final
class Given:
    """The arguments of one run of a function, and what their containers hold before it."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self._before = [*map(_contents, (*args, *kwargs.values()))]

    def require_unchanged(self, function: Callable[..., Any]) -> None:
        """Refuses a run of a function that put something in, took out, or exchanged.

        A region calls its function with containers of its own.
        """
        now = (*self.args, *self.kwargs.values())
        for place, (before, tree) in enumerate(zip(self._before, now, strict=True)):
            (leaves, around), (found, around_now) = before, _contents(tree)
            if around == around_now and all(map(_is_same, leaves, found)):
                continue
            names = [*parameter_names(function, len(self.args)), *self.kwargs]
            raise SideEffectError.of(
                where=f"the argument `{names[place]}` of the call at {user_line()}",
                what=f"is a {type(tree).__name__}, and the function changes what it holds.",
                why="A region works on a copy: the caller's would stay as it was, and the "
                "gradient of what was put in would be lost.",
                do="Return what is new, and let the caller put it in; or let the function "
                "change a copy, as by list(x) or dict(x).",
            )


def require_apart(
    tensors: Sequence[Tensor], written: Iterable[int], labels: Sequence[str]
) -> None:
    """Refuses operands of which the function writes to one that shares memory with another."""
    below = levels.all_unwrapped(tensors)
    places = range(len(below))
    keys = [
        storage_key(each) if type(each) in _STRIDED else -place
        for place, each in zip(places, below, strict=True)
    ]
    if len({*keys}) == len(keys):
        return
    for place, other in itertools.product(written, places):
        if place == other or keys[place] != keys[other]:
            continue
        if _have_a_number_in_common(below[place], below[other]):
            names = (labels[place], labels[other])
            one, same = (each if "`" in each else f"`{each}`" for each in names)
            raise MutationError.of(
                where=f"the call at {user_line()}",
                what=f"{one} shares memory with {same}, and the function writes to it.",
                why="A trace takes each for memory of its own: what is written to one "
                "would not show in the other.",
                do="Pass the tensor that both are views of, and make these inside; or "
                'use engine="rerun".',
            )


def _have_a_number_in_common(one: Tensor, other: Tensor) -> bool:
    """Whether two strided tensors of one storage share a number there."""
    if not (one.numel() and other.numel()):
        return False
    starts, ends = zip(*map(_stretch_of, (one, other)), strict=True)
    low, high = max(starts), min(ends)
    if low >= high:
        return False
    first, size = min(starts), max(ends) - min(starts)
    marked, asked = (torch.zeros(size, dtype=torch.bool, device="cpu") for _ in "ab")
    for tensor, marks in ((one, marked), (other, asked)):
        step = tensor.itemsize
        strides = [stride * step for stride in tensor.stride()]
        place = tensor.storage_offset() * step - first
        marks.as_strided((*tensor.shape, step), (*strides, 1), place).fill_(True)
    return bool((marked & asked).any())


def _stretch_of(tensor: Tensor) -> tuple[int, int]:
    """Where in its storage a tensor begins and ends, in bytes."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    first, size = int(tensor.storage_offset()), tensor.itemsize
    return first * size, (first + last + 1) * size


# Fake tensors are looked at where they were made.
_STRIDED = frozenset((Tensor, nn.Parameter, nn.Buffer))


def _contents(tree: Any) -> tuple[list[Any], Any]:
    leaves, spec = trees.flatten(tree)
    return [*map(own_set, leaves)], trees.structure(spec, _Part)


@final
class _Part:
    """A part of a context, equal to itself, and to one of its class that calls itself equal."""

    def __init__(self, part: object) -> None:
        self._part: Any = own_set(part)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Part):
            return False
        one, same = self._part, other._part
        if one is same or type(one) is not type(same):
            return one is same
        # Arrays and tensors have no one truth.
        try:
            return bool(one == same)
        except (TypeError, ValueError, RuntimeError):
            return False


def own_set(leaf: Any) -> Any:
    """A copy of a set, which pytree takes for a leaf; any other leaf itself."""
    return leaf.copy() if type(leaf) is set else leaf  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _is_same(one: object, other: object) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and type(one) in _BY_VALUE and one == other
