"""What is baked: spots and their rules, and what is made of them.

A `Spot` says where to look (one step from another spot) and what must be true of what is
found. Both are plain data that keep nothing of the user's alive but types, code and simple
constants. `clause` writes a rule as a Python expression. `Covered` joins these into one
straight-line function that reads each common prefix once, and evaluates them one by one to
say what differs.
"""

import contextlib
import types
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from torch import Tensor

from remat._captures.places import (
    KINDS,
    MISSING,
    NOT_THERE,
    SPACE,
    Label,
    Step,
    fill,
    in_words,
    look,
    put,
    same,
)
from remat._captures.reads import GENERATED
from remat._errors import RecomputationError, refusal
from remat._generators import trackers


class Equal(NamedTuple):
    """A simple value, the same by type and bits."""

    const: object


# No value is there: what was read came from elsewhere, or was missing.
ABSENT = Equal(MISSING)


# Of each further rule: what it says of a value `v`, as Python, and of a value that breaks it.
# Its fields stand for themselves if they are whole numbers, and for constants otherwise; `t` is
# a local name of its own.


class Instance(NamedTuple):
    """An object of exactly this class."""

    kind: type

    clause = "type({v}) is {0}"
    breach = "was a {0.__qualname__} and is {now}"


class IsTensor(NamedTuple):
    """A tensor of any class; `kind` is the likely one, for speed."""

    kind: type

    clause = "(type({t} := {v}) is {0} or isinstance({t}, Tensor))"
    breach = Instance.breach


class SameAs(NamedTuple):
    """An object that stands at an earlier spot too: aliases stay aliases."""

    spot: int

    clause = "{v} is v{0}"
    breach = "was shared with another place and is no more"


class Runs(NamedTuple):
    """A function with this code, made anew or not."""

    code: types.CodeType

    clause = "{v}.__code__ is {0}"
    breach = "ran {0.co_qualname} and runs other code"


class Sized(NamedTuple):
    """A container of this class and length."""

    kind: type
    num_items: int

    clause = "(type({t} := {v}) is {0} and len({t}) == {1})"
    breach = "was a {0.__name__} of {1} items and has changed"


class Keyed(NamedTuple):
    """A dictionary of this class with these keys in this order."""

    kind: type
    keys: tuple[Hashable, ...]

    clause = "(type({t} := {v}) is {0} and (*{t},) == {1})"
    breach = "was a {0.__name__} with the keys {1} and has changed"


class Registered(NamedTuple):
    """The tracker of this registration: a program draws from its states, by its number."""

    number: int

    clause = "TRACKERS.get({0}) is {v}"
    breach = "was another tracker"


Rule: TypeAlias = (
    Equal | Instance | IsTensor | SameAs | Runs | Sized | Keyed | Registered
)


class Spot(NamedTuple):
    """One place: a step from an earlier spot (-1: from the roots), and its rule."""

    parent: int
    step: Step
    label: Label
    rule: Rule


class _Constants:
    """Names for the objects that generated code refers to."""

    def __init__(self) -> None:
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


def clause(rule: Rule, value: str, constants: _Constants) -> str:
    """Writes what a rule, other than `ABSENT`, says of a value as a Python expression.

    `constants` gets what the expression refers to.
    """
    if isinstance(rule, Equal):
        return _equality(value, rule.const, constants)
    fields = [str(f) if type(f) is int else constants.name(f) for f in rule]
    return rule.clause.format(*fields, v=value, t=constants.temporary())


_LITERAL = (type(None), bool, type(...))


def _equality(value: str, const: object, constants: _Constants) -> str:
    """The clause `same(value, const)` of a rule, by identity where it is likely to hold."""
    if isinstance(const, _LITERAL):
        return f"{value} is {const!r}"
    name = constants.name(const)
    if isinstance(const, type):
        return f"{value} is {name}"
    new = constants.temporary()
    return f"(({new} := {value}) is {name} or same({new}, {name}))"


@final
class _Writer:
    """Writes the lines of one function over `roots`."""

    def __init__(self, spots: Sequence[Spot]) -> None:
        self.constants = _Constants()
        self.lines: list[str] = []
        self.line_reads: dict[int, tuple[str, ...]] = {}
        self._holders: dict[str, str] = {}
        self._reads: dict[int, list[str]] = {}
        for spot in spots:
            self._reads.setdefault(spot.parent, []).append(str(spot.step[1]))

    def holder(self, spot: Spot) -> str:
        """The name of the object that holds the spot, which a line binds at its first use."""
        owner = "roots" if spot.parent < 0 else f"v{spot.parent}"
        kind = KINDS[spot.step[0]]
        text = kind.holder.format(owner)
        if text == owner or not kind.item:
            return text
        if text not in self._holders:
            name = self._holders[text] = f"h{len(self._holders)}"
            self.lines.append(f"{name} = {text}")
            # Line 1 is the `def`, line 2 the `try`.
            self.line_reads[len(self.lines) + 2] = tuple(self._reads[spot.parent])
        return self._holders[text]

    def key(self, spot: Spot) -> str:
        """The key of a spot's step, written out or as a constant."""
        kind, key = spot.step
        if kind in _BY_NAME:
            return str(key)
        return repr(key) if type(key) in {str, int} else self.constants.name(key)


_BY_NAME = frozenset({"attr", "inherited"})


def _generate_check(
    spots: Sequence[Spot], fetched: Sequence[int]
) -> Callable[[tuple[object, ...]], tuple[Tensor, ...] | None]:
    """A function of the roots: the tensors at `fetched`, or None if a rule is broken."""
    writer = _Writer(spots)
    bound = {spot.parent for spot in spots} | set(fetched)
    bound |= {spot.rule.spot for spot in spots if isinstance(spot.rule, SameAs)}
    for index, spot in enumerate(spots):
        kind, holder, key = spot.step[0], writer.holder(spot), writer.key(spot)
        if spot.rule is ABSENT and kind in _BY_NAME:
            condition = f"not hasattr({holder}, {key!r})"
        elif spot.rule is ABSENT:
            condition = f"{key} not in {holder}"
        else:
            place = holder + KINDS[kind].item.format(key)
            if index in bound:
                writer.lines.append(f"v{index} = {place}")
                place = f"v{index}"
            condition = clause(spot.rule, place, writer.constants)
        writer.lines.append(f"if not ({condition}): return None")
    writer.lines.append(f"return ({''.join(f'v{index}, ' for index in fetched)})")
    body = "".join(f"  {line}\n" for line in writer.lines)
    text = f"def check(roots):\n try:\n{body} except NOT_THERE: return None\n"
    space = writer.constants.space
    space["LINE_READS"] = writer.line_reads
    exec(compile(text, GENERATED, "exec"), space)
    return space.pop("check")


@final
class Covered:
    """Frozen knowledge of what a trace depends on besides its arguments.

    Attributes:
        gather: the used tensors, found anew from the roots; None if the check fails.
        labels: the fetched tensors in the user's words, in the same order.
        untold: the read objects whose contents are not compared, in the user's words.
    """

    __slots__ = ("__weakref__", "_spots", "gather", "labels", "untold")

    def __init__(
        self,
        spots: Sequence[Spot],
        fetched: Sequence[int],
        untold: Sequence[str] = (),
    ) -> None:
        self.untold = tuple(untold)
        self._spots = tuple(spots)
        self.labels = tuple(str(spots[index].label) for index in fetched)
        self.gather: Callable[[tuple[object, ...]], tuple[Tensor, ...] | None]
        self.gather = _generate_check(spots, fetched)

    def check(self, roots: tuple[object, ...]) -> bool:
        """Whether the covered state equals what was baked."""
        return self.gather(roots) is not None

    def fetch(self, roots: tuple[object, ...]) -> tuple[Tensor, ...]:
        """The used tensors, where the state is known to be what was baked."""
        tensors = self.gather(roots)
        assert tensors is not None, self.explain(roots)
        return tensors

    def difference(self, roots: tuple[object, ...]) -> tuple[str, str]:
        """What differs first, and how, in words; of covered state nothing may."""
        for spot, _, value in self._broken(roots):
            return str(spot.label), _breach(spot, value)
        return "a captured tensor", "nothing that is covered has changed"

    def explain(self, roots: tuple[object, ...]) -> str:
        """The first difference in words, or that there is none."""
        return self.difference(roots)[1]

    @contextlib.contextmanager
    def restored(self, roots: tuple[object, ...]) -> Generator[None, None, None]:
        """Sets covered simple values to what was baked, and undoes that at the end.

        Raises:
            RecomputationError: something else changed, or a place cannot be written.
        """
        if self.check(roots):
            yield
            return
        with contextlib.ExitStack() as undo:
            for spot, owner, value in self._broken(roots):
                _mend_spot(spot, owner, value, undo)
            yield

    def _broken(
        self, roots: tuple[object, ...]
    ) -> Iterator[tuple[Spot, object, object]]:
        """Yields each spot whose rule is broken, with its owner and what stands there now.

        If a caller repairs one before it asks for the next, the values below it are read from
        the repaired one.
        """
        constants = _Constants()
        values = constants.space
        for index, spot in enumerate(self._spots):
            name = f"v{index}"
            owner = roots if spot.parent < 0 else values[f"v{spot.parent}"]
            value = values[name] = _look_at_spot(owner, spot.step)
            if not _rule_holds(spot.rule, name, constants):
                yield spot, owner, value
                values[name] = _look_at_spot(owner, spot.step)


def _rule_holds(rule: Rule, name: str, constants: _Constants) -> bool:
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


def _breach(spot: Spot, value: object) -> str:
    now = "gone" if value is MISSING else in_words(value)
    if isinstance(spot.rule, Equal):
        return f"{spot.label} was {in_words(spot.rule.const)} and is {now}"
    return f"{spot.label} {spot.rule.breach.format(*spot.rule, now=now)}"


def _mend_spot(spot: Spot, owner: Any, value: Any, undo: contextlib.ExitStack) -> None:
    try:
        match spot.rule:
            case Equal(const):
                put(owner, spot.step, const)
                undo.callback(put, owner, spot.step, value)
            case Sized(kind, num) if type(value) is kind and kind in {list, deque}:
                undo.callback(fill, value, [*value])
                fill(value, [*value, *[None] * num][:num])
            case Keyed(kind, keys) if type(value) is kind:
                undo.callback(fill, value, {**value})
                fill(value, {key: value.get(key) for key in keys})
            case _:
                raise TypeError("only simple values can be restored")
    except NOT_THERE as error:
        raise refusal(
            RecomputationError,
            where=str(spot.label),
            what=f"changed after the forward: {_breach(spot, value)}.",
            why=f"The backward needs the old value, but {error}.",
            do="Change it after the backward, or pass it as an argument.",
        ) from error
