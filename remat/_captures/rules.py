"""Baked knowledge: spots, each a place and the rule that must hold there.

A `Spot` says where to look (one step from another spot) and what must be true of what is
found. Both are plain data that keep nothing of the user's alive but types, code and simple
constants. Each rule says itself twice: as a test, for messages, and as an expression, for
the generated check.
"""

import types
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, final

from torch import Tensor

from remat._captures.places import (
    MISSING,
    NOT_THERE,
    Step,
    in_context,
    look,
    proxied,
    same,
)
from remat._generators import trackers


class Constants:
    """Names for the objects that generated code refers to."""

    def __init__(self) -> None:
        """Starts with what every check uses."""
        self.space: dict[str, Any] = {
            "same": same,
            "Tensor": Tensor,
            "NOT_THERE": NOT_THERE,
            "in_context": in_context,
            "proxied": proxied,
            "TRACKERS": trackers.registered,
        }
        self._names: dict[int, str] = {}
        self._num_temporaries = 0

    def name(self, value: object) -> str:
        """The name of a constant; the same object has one name."""
        name = self._names.setdefault(id(value), f"K{len(self._names)}")
        self.space[name] = value
        return name

    def temporary(self) -> str:
        """A new local name."""
        self._num_temporaries += 1
        return f"t{self._num_temporaries}"


# --- rules --------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Equal:
    """A simple value, the same by type and bits."""

    const: object

    def holds(self, value: object, values: Sequence[object]) -> bool:
        """Whether the value is still the constant."""
        del values
        return same(value, self.const)

    def clause(self, value: str, constants: Constants) -> str:
        """The same in Python."""
        return _equality(value, self.const, constants)


@final
@dataclass(frozen=True, slots=True)
class Instance:
    """An object of exactly this class."""

    kind: type

    def holds(self, value: object, values: Sequence[object]) -> bool:
        """Whether the object's class is still the same."""
        del values
        return type(value) is self.kind

    def clause(self, value: str, constants: Constants) -> str:
        """The same in Python."""
        return f"type({value}) is {constants.name(self.kind)}"


@final
@dataclass(frozen=True, slots=True)
class IsTensor:
    """A tensor of any class; `kind` is the likely one, for speed."""

    kind: type

    def holds(self, value: object, values: Sequence[object]) -> bool:
        """Whether there is still a tensor."""
        del values
        return isinstance(value, Tensor)

    def clause(self, value: str, constants: Constants) -> str:
        """The same in Python."""
        new = constants.temporary()
        kind = constants.name(self.kind)
        return f"(type({new} := {value}) is {kind} or isinstance({new}, Tensor))"


@final
@dataclass(frozen=True, slots=True)
class SameAs:
    """The same object as at an earlier spot: aliases stay aliases."""

    spot: int

    def holds(self, value: object, values: Sequence[object]) -> bool:
        """Whether both places still give one object."""
        return value is values[self.spot]

    def clause(self, value: str, constants: Constants) -> str:
        """The same in Python."""
        del constants
        return f"{value} is v{self.spot}"


@final
@dataclass(frozen=True, slots=True)
class Runs:
    """A function with this code, made anew or not."""

    code: types.CodeType

    def holds(self, value: object, values: Sequence[object]) -> bool:
        """Whether the function still runs the same code."""
        del values
        return getattr(value, "__code__", None) is self.code

    def clause(self, value: str, constants: Constants) -> str:
        """The same in Python."""
        return f"{value}.__code__ is {constants.name(self.code)}"


@final
@dataclass(frozen=True, slots=True)
class Sized:
    """A container of this class and length."""

    kind: type
    num_items: int

    def holds(self, value: object, values: Sequence[object]) -> bool:
        """Whether class and length are still the same."""
        del values
        return type(value) is self.kind and len(cast("Any", value)) == self.num_items

    def clause(self, value: str, constants: Constants) -> str:
        """The same in Python."""
        new, kind = constants.temporary(), constants.name(self.kind)
        size = f"len({new}) == {self.num_items}" if self.num_items else f"not {new}"
        return f"(type({new} := {value}) is {kind} and {size})"


@final
@dataclass(frozen=True, slots=True)
class Keyed:
    """A dictionary of this class with these keys in this order."""

    kind: type
    keys: tuple[Hashable, ...]

    def holds(self, value: object, values: Sequence[object]) -> bool:
        """Whether class and keys are still the same."""
        del values
        return type(value) is self.kind and tuple(cast("Any", value)) == self.keys

    def clause(self, value: str, constants: Constants) -> str:
        """The same in Python."""
        new, kind = constants.temporary(), constants.name(self.kind)
        keys = constants.name(self.keys)
        return f"(type({new} := {value}) is {kind} and (*{new},) == {keys})"


@final
@dataclass(frozen=True, slots=True)
class Registered:
    """The tracker of this registration: a program draws from its states, by its number."""

    number: int

    def holds(self, value: object, values: Sequence[object]) -> bool:
        """Whether that tracker still stands there."""
        del values
        return trackers.registered.get(self.number) is value

    def clause(self, value: str, constants: Constants) -> str:
        """The same in Python."""
        del constants
        return f"TRACKERS.get({self.number}) is {value}"


@final
@dataclass(frozen=True, slots=True)
class Absent:
    """No value is there: what was read came from elsewhere, or was missing."""

    def holds(self, value: object, values: Sequence[object]) -> bool:
        """Whether there is still nothing."""
        del values
        return value is MISSING


Rule: TypeAlias = (
    Equal | Instance | IsTensor | SameAs | Runs | Sized | Keyed | Registered | Absent
)

_LITERAL = (type(None), bool, type(...))


def _equality(value: str, const: object, constants: Constants) -> str:
    """`same(value, const)` as an expression, by identity where it is likely to hold."""
    if isinstance(const, _LITERAL):
        return f"{value} is {const!r}"
    name = constants.name(const)
    if isinstance(const, type):
        return f"{value} is {name}"
    new = constants.temporary()
    kind = type(const)
    if kind in {int, str, bytes} or (kind is float and const == const and const):
        rest = f"type({new}) is {kind.__name__} and {new} == {name}"
    elif kind is tuple and len(cast("tuple[object, ...]", const)) <= 16:
        items = cast("tuple[object, ...]", const)
        parts = [f"type({new}) is tuple and len({new}) == {len(items)}"]
        parts += [_equality(f"{new}[{i}]", v, constants) for i, v in enumerate(items)]
        rest = " and ".join(parts)
    else:
        rest = f"same({new}, {name})"
    return f"(({new} := {value}) is {name} or {rest})"


@final
@dataclass(frozen=True, slots=True)
class Spot:
    """One place: a step from an earlier spot (-1: from the roots), and its rule."""

    parent: int
    step: Step
    label: str
    rule: Rule


# --- following spots slowly ---------------------------------------------------------


def visit(
    spots: Sequence[Spot], roots: tuple[object, ...]
) -> Iterator[tuple[Spot, object, object, bool]]:
    """Yields each spot with its owner, what stands there now, and whether that holds.

    Places are read one after the other: if a caller repairs one before it asks for the next,
    the values below it are read from the repaired one.
    """
    values: list[object] = []
    for spot in spots:
        owner = roots if spot.parent < 0 else values[spot.parent]
        value = _look(owner, spot.step)
        yield spot, owner, value, spot.rule.holds(value, values)
        values.append(_look(owner, spot.step))


def _look(owner: object, step: Step) -> object:
    try:
        return look(owner, step)
    except NOT_THERE:
        return MISSING
