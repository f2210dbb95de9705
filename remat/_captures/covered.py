"""What is baked: spots and their rules, and what is made of them.

A `Spot` says where to look (one step from another spot) and what must be true of what is found.
Both are plain data that keep nothing of the user's alive but types, code, simple constants, and
what shows nothing that it holds and cannot be referred to weakly.
`clause` writes a rule as a Python expression. `Covered` joins these into one straight-line function
that reads each common prefix once, and evaluates them one by one to say what differs.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from torch import Tensor

from remat._captures import places
from remat._captures.places import MISSING, Label, Step
from remat._captures.reads import GENERATED
from remat._errors import RecomputationError
from remat._generators import trackers


class Equal(NamedTuple):
    """A simple value, the same by type and bits."""

    const: object


class Form(NamedTuple):
    """What a value looks like: a row of `FORMS`, and its fields."""

    name: str
    fields: tuple[Any, ...]


Rule: TypeAlias = Equal | Form

# No value is there: what was read came from elsewhere, or was missing.
ABSENT = Equal(MISSING)

# Of each form: what it says of a value `v`, as Python, and of a value that breaks it. Its fields
# stand for themselves if they are whole numbers, and for constants otherwise; `t` is a local name.
FORMS = {
    # This object, which a function of no arguments gives.
    "object": ("{0}() is {v}", "was another object"),
    # An object of exactly this class.
    "instance": ("type({v}) is {0}", "was a {0.__qualname__} and is {now}"),
    # A tensor of any class, likely of this one.
    "tensor": (
        "(type(t := {v}) is {0} or isinstance(t, Tensor))",
        "was a {0.__qualname__} and is {now}",
    ),
    # An object that stands at an earlier spot too: aliases stay aliases.
    "alias": ("{v} is v{0}", "was shared with another place and is no more"),
    # A function with this code, made anew or not.
    "function": ("{v}.__code__ is {0}", "ran {0.co_qualname} and runs other code"),
    # A container of this class and length.
    "sized": (
        "(type(t := {v}) is {0} and {2}(t) == {1})",
        "was a {0.__name__} of {1} items and has changed",
    ),
    # A dictionary of this class with these keys in this order.
    "keyed": (
        "(type(t := {v}) is {0} and (*t,) == {1})",
        "was a {0.__name__} with the keys {1} and has changed",
    ),
    # The tracker of this registration: a program draws from its states, by its number.
    "tracker": ("TRACKERS.get({0}) is {v}", "was another tracker"),
}


class Spot(NamedTuple):
    """One place: a step from an earlier spot (-1: from the roots), and its rule."""

    parent: int
    step: Step
    label: Label
    rule: Rule


# What generated code refers to besides constants.
_SPACE: dict[str, Any] = {
    **places.SPACE,
    "same": places.is_same_value,
    "Tensor": Tensor,
    "NOT_THERE": places.NOT_THERE,
    "TRACKERS": trackers.registered,
}
_LITERAL = (type(None), bool, type(...))
_BY_NAME = frozenset({"attr", "inherited"})
_LISTS = frozenset({list, deque})


def _name_constant(value: object, space: dict[str, Any]) -> str:
    """The name that generated code has for an object, which `space` gets."""
    name = f"K{id(value)}"
    space[name] = value
    return name


def clause(rule: Rule, value: str, space: dict[str, Any]) -> str:
    """A rule, other than `ABSENT`, of a value as Python; `space` gets what that refers to."""
    if isinstance(rule, Form):
        fields = (
            str(f) if type(f) is int else _name_constant(f, space) for f in rule.fields
        )
        return FORMS[rule.name][0].format(*fields, v=value)
    if isinstance(rule.const, _LITERAL):
        return f"{value} is {rule.const!r}"
    name = _name_constant(rule.const, space)
    if isinstance(rule.const, type):
        return f"{value} is {name}"
    # By identity where that is likely to hold.
    return f"((t := {value}) is {name} or same(t, {name}))"


def _bind_holder(spot: Spot, lines: list[str], holders: dict[str, str]) -> str:
    """The name of the object that holds the spot, which a line binds at its first use."""
    owner = "roots" if spot.parent < 0 else f"v{spot.parent}"
    kind = places.KINDS[spot.step[0]]
    text = kind.holder.format(owner)
    if text == owner or not kind.item:
        return text
    if text not in holders:
        holders[text] = f"h{len(holders)}"
        lines.append(f"{holders[text]} = {text}")
    return holders[text]


def _key_in_code(step: Step, space: dict[str, Any]) -> str:
    kind, key = step
    if kind in _BY_NAME:
        return str(key)
    return repr(key) if type(key) in {str, int} else _name_constant(key, space)


def _generate_check(
    spots: Sequence[Spot], fetched: Sequence[int]
) -> Callable[[tuple[object, ...]], tuple[Tensor, ...] | None]:
    """A function of the roots: the tensors at `fetched`, or None if a rule is broken."""
    space: dict[str, Any] = {**_SPACE}
    lines: list[str] = []
    holders: dict[str, str] = {}
    line_reads: dict[int, list[str]] = {}
    reads: dict[int, list[str]] = {}
    bound: set[int] = {*fetched}
    for parent, step, _, rule in spots:
        reads.setdefault(parent, []).append(str(step[1]))
        bound.add(parent)
        if isinstance(rule, Form) and rule.name == "alias":
            bound.update(rule.fields)
    for index, spot in enumerate(spots):
        kind, num_lines = spot.step[0], len(lines)
        holder, key = _bind_holder(spot, lines, holders), _key_in_code(spot.step, space)
        if len(lines) > num_lines:
            # Line 1 is the `def`, line 2 the `try`.
            line_reads[len(lines) + 2] = reads[spot.parent]
        if spot.rule is ABSENT and kind in _BY_NAME:
            condition = f"not hasattr({holder}, {key!r})"
        elif spot.rule is ABSENT:
            condition = f"{key} not in {holder}"
        else:
            place = holder + places.KINDS[kind].item.format(key)
            if index in bound:
                lines.append(f"v{index} = {place}")
                place = f"v{index}"
            condition = clause(spot.rule, place, space)
        lines.append(f"if not ({condition}): return None")
    lines.append(f"return ({''.join(f'v{index}, ' for index in fetched)})")
    body = "".join(f"  {line}\n" for line in lines)
    text = f"def check(roots):\n try:\n{body} except NOT_THERE: return None\n"
    space["LINE_READS"] = line_reads
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
        self, spots: Sequence[Spot], fetched: Sequence[int], untold: Sequence[str] = ()
    ) -> None:
        self.untold = tuple(untold)
        self._spots = tuple(spots)
        self.labels = tuple(str(spots[index].label) for index in fetched)
        self.gather = _generate_check(spots, fetched)

    def check(self, roots: tuple[object, ...]) -> bool:
        return self.gather(roots) is not None

    def fetch(self, roots: tuple[object, ...]) -> tuple[Tensor, ...]:
        """The used tensors, where the state is known to be what was baked."""
        tensors = self.gather(roots)
        assert tensors is not None, self.explain(roots)
        return tensors

    def difference(self, roots: tuple[object, ...]) -> tuple[str, str]:
        """What differs first, and how, in words; of covered state nothing may."""
        for spot, _, value in self._broken(roots):
            return str(spot.label), _breach_in_words(spot, value)
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
        """Each spot whose rule is broken, with its owner and what stands there now.

        If a caller repairs one, the values below it are read from the repaired one.
        """
        values = {**_SPACE}
        for index, spot in enumerate(self._spots):
            name = f"v{index}"
            owner = roots if spot.parent < 0 else values[f"v{spot.parent}"]
            value = values[name] = places.read_place_or_missing(owner, spot.step)
            if not _rule_holds(spot.rule, name, values):
                yield spot, owner, value
                values[name] = places.read_place_or_missing(owner, spot.step)


def _rule_holds(rule: Rule, name: str, values: dict[str, Any]) -> bool:
    is_missing = values[name] is MISSING
    if rule is ABSENT or is_missing:
        return rule is ABSENT and is_missing
    try:
        return bool(eval(clause(rule, name, values), values))
    except places.NOT_THERE:
        return False


def _breach_in_words(spot: Spot, value: object) -> str:
    now = "gone" if value is MISSING else places.value_in_words(value)
    if isinstance(spot.rule, Equal):
        return f"{spot.label} was {places.value_in_words(spot.rule.const)} and is {now}"
    breach = FORMS[spot.rule.name][1].format(*spot.rule.fields, now=now)
    return f"{spot.label} {breach}"


def _mend_spot(spot: Spot, owner: Any, value: Any, undo: contextlib.ExitStack) -> None:
    try:
        match spot.rule:
            case Equal(const):
                places.write_place(owner, spot.step, const)
                undo.callback(places.write_place, owner, spot.step, value)
            case Form("sized", (kind, num, _)) if type(value) is kind in _LISTS:
                undo.callback(places.refill, value, [*value])
                places.refill(value, [*value, *[None] * num][:num])
            case Form("keyed", (kind, keys)) if type(value) is kind:
                undo.callback(places.refill, value, {**value})
                places.refill(value, {key: value.get(key) for key in keys})
            case _:
                raise TypeError("only simple values can be restored")
    except places.NOT_THERE as error:
        raise RecomputationError.of(
            where=str(spot.label),
            what=f"changed after the forward: {_breach_in_words(spot, value)}.",
            why=f"The backward needs the old value, but {error}.",
            do="Change it after the backward, or pass it as an argument.",
        ) from error
