"""Baked knowledge: spots, each a place and the rule that must hold there.

A `Spot` says where to look (one step from another spot) and what must be true of what is
found. Both are plain data that keep nothing of the user's alive but types, code and simple
constants. `clause` writes a rule as a Python expression: the generated check joins these,
and `visit` evaluates them one by one.
"""

import types
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from torch import Tensor

from remat._captures.places import MISSING, NOT_THERE, SPACE, Label, Step, look, same
from remat._generators import trackers


class Constants:
    """Names for the objects that generated code refers to."""

    def __init__(self) -> None:
        """Starts with what every check uses."""
        self.space: dict[str, Any] = {
            **SPACE,
            "same": same,
            "Tensor": Tensor,
            "NOT_THERE": NOT_THERE,
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


class Equal(NamedTuple):
    """A simple value, the same by type and bits."""

    const: object


# No value is there: what was read came from elsewhere, or was missing.
ABSENT = Equal(MISSING)


class Instance(NamedTuple):
    """An object of exactly this class."""

    kind: type


class IsTensor(NamedTuple):
    """A tensor of any class; `kind` is the likely one, for speed."""

    kind: type


class SameAs(NamedTuple):
    """An object that stands at an earlier spot too: aliases stay aliases."""

    spot: int


class Runs(NamedTuple):
    """A function with this code, made anew or not."""

    code: types.CodeType


class Sized(NamedTuple):
    """A container of this class and length."""

    kind: type
    num_items: int


class Keyed(NamedTuple):
    """A dictionary of this class with these keys in this order."""

    kind: type
    keys: tuple[Hashable, ...]


class Registered(NamedTuple):
    """The tracker of this registration: a program draws from its states, by its number."""

    number: int


Rule: TypeAlias = (
    Equal | Instance | IsTensor | SameAs | Runs | Sized | Keyed | Registered
)


def clause(rule: Rule, value: str, constants: Constants) -> str:
    """Writes what a rule says of a value as a Python expression.

    Any rule but `ABSENT`, which says it of a place. `constants` gets what the expression
    refers to.
    """
    match rule:
        case Equal(const):
            return _equality(value, const, constants)
        case Instance(kind):
            return f"type({value}) is {constants.name(kind)}"
        case IsTensor(kind):
            new, likely = constants.temporary(), constants.name(kind)
            return f"(type({new} := {value}) is {likely} or isinstance({new}, Tensor))"
        case SameAs(spot):
            return f"{value} is v{spot}"
        case Runs(code):
            return f"{value}.__code__ is {constants.name(code)}"
        case Sized(kind, num):
            new, own = constants.temporary(), constants.name(kind)
            size = f"len({new}) == {num}" if num else f"not {new}"
            return f"(type({new} := {value}) is {own} and {size})"
        case Keyed(kind, keys):
            new, own = constants.temporary(), constants.name(kind)
            has_them = f"(*{new},) == {constants.name(keys)}" if keys else f"not {new}"
            return f"(type({new} := {value}) is {own} and {has_them})"
        case Registered(number):
            return f"TRACKERS.get({number}) is {value}"


_LITERAL = (type(None), bool, type(...))


def _equality(value: str, const: object, constants: Constants) -> str:
    """The clause `same(value, const)` of a rule, by identity where it is likely to hold."""
    if isinstance(const, _LITERAL):
        return f"{value} is {const!r}"
    name = constants.name(const)
    if isinstance(const, type):
        return f"{value} is {name}"
    new = constants.temporary()
    kind = type(const)
    if kind in {int, str, bytes, frozenset} or (
        kind is float and const == const and const
    ):
        rest = f"type({new}) is {kind.__name__} and {new} == {name}"
    elif kind is tuple and len(cast("tuple[object, ...]", const)) <= 16:
        items = cast("tuple[object, ...]", const)
        parts = [f"type({new}) is tuple and len({new}) == {len(items)}"]
        parts += [_equality(f"{new}[{i}]", v, constants) for i, v in enumerate(items)]
        rest = " and ".join(parts)
    else:
        rest = f"same({new}, {name})"
    return f"(({new} := {value}) is {name} or {rest})"


class Spot(NamedTuple):
    """One place: a step from an earlier spot (-1: from the roots), and its rule."""

    parent: int
    step: Step
    label: Label
    rule: Rule


def visit(
    spots: Sequence[Spot], roots: tuple[object, ...]
) -> Iterator[tuple[Spot, object, object, bool]]:
    """Yields each spot with its owner, what stands there now, and whether that holds.

    Places are read one after the other: if a caller repairs one before it asks for the next,
    the values below it are read from the repaired one.
    """
    constants = Constants()
    values = constants.space
    for index, spot in enumerate(spots):
        name = f"v{index}"
        owner = roots if spot.parent < 0 else values[f"v{spot.parent}"]
        value = values[name] = _look_at_spot(owner, spot.step)
        yield spot, owner, value, _rule_holds(spot.rule, name, constants)
        values[name] = _look_at_spot(owner, spot.step)


def _rule_holds(rule: Rule, name: str, constants: Constants) -> bool:
    is_missing = constants.space[name] is MISSING
    if rule is ABSENT or is_missing:
        return rule is ABSENT and is_missing
    try:
        return bool(eval(clause(rule, name, constants), constants.space))
    except NOT_THERE:
        return False


def _look_at_spot(owner: object, step: Step) -> object:
    try:
        return look(owner, step)
    except NOT_THERE:
        return MISSING
