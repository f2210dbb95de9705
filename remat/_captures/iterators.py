"""Iterators that a function reaches: whether a trace has advanced one, which nothing takes back."""

import itertools
import operator
import types
import warnings
from collections.abc import Iterator
from typing import Any, cast

from remat._captures.walk import Survey

_Position = tuple[object, ...]
_OF_C = frozenset({"builtins", "itertools", "collections", "_collections"})
#: What messages call an iterator, itself, and where it stood.
Stood = tuple[str, Iterator[Any], _Position]


def advanced_since(known: list[Stood]) -> str | None:
    """What messages call the first iterator that stands elsewhere now; None if none does."""
    moved = (name for name, each, at in known if not _is_same(at, _position(each)))
    return next(moved, None)


def positions(survey: Survey) -> list[Stood]:
    """Where each iterator stands that was reached; an `itertools.count` is there to count runs."""
    return [
        (f"{node.label} ({node.kind.__name__})", node.value, _position(node.value))
        for node in survey.nodes.values()
        if node.kind.__module__ in _OF_C
        and hasattr(node.kind, "__next__")
        and node.kind is not itertools.count
    ]


def _position(iterator: Any) -> _Position:
    """Where an iterator stands, as far as it tells: with another one it has been advanced.

    A generator tells its locals, one of C's how many are left, or what it is made of. Those of
    a user's class stand in attributes, which are watched.
    """
    if isinstance(iterator, types.GeneratorType):
        held = cast("Any", iterator)
        frame, below = held.gi_frame, held.gi_yieldfrom
        inner = _position(below) if hasattr(below, "__next__") else ()
        return () if frame is None else (frame.f_lasti, inner, *frame.f_locals.values())
    try:
        left = operator.length_hint(iterator, -1)
        made_of = [*_made_of(iterator)] if left < 0 else []
    except TypeError:  # it cannot be copied
        return ()
    inner = [each for each in made_of if hasattr(each, "__next__")]
    counts = [each for each in made_of if isinstance(each, int)]
    return (left, len(made_of), *counts, *map(_position, inner))


def _made_of(iterator: Any) -> Iterator[object]:
    """What one of C's iterators is made of, and its state.

    Of those of itertools Python 3.14 does not tell it; 3.12 and 3.13 warn of that.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        _, *parts = iterator.__reduce__()
    return _leaves(tuple(parts))


def _leaves(tree: object) -> Iterator[object]:
    if isinstance(tree, tuple):
        for part in cast("tuple[object, ...]", tree):
            yield from _leaves(part)
    else:
        yield tree


def _is_same(one: object, other: object) -> bool:
    """Whether two positions are one: numbers are compared, and objects must be the same."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        before, now = cast("_Position", one), cast("_Position", other)
        return len(before) == len(now) and all(map(_is_same, before, now))
    is_number = isinstance(one, int) and isinstance(other, int)
    return one == other if is_number else one is other
