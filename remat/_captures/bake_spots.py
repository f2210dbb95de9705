"""Turns what was reached and what was read into spots and rules: what a trace depends on."""

import functools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, final

from torch import Tensor, nn

from remat._captures import contents, places
from remat._captures.covered import ABSENT, Covered, Equal, Form, Rule, Spot
from remat._captures.library import (
    is_library_module,
    mentions,
    module_of,
    user_bases,
    users_hooks,
)
from remat._captures.places import MISSING, Label, Step, is_simple
from remat._captures.walk import EVERYTHING, Node, Survey
from remat._generators import trackers
from remat._torch import modules


def cover(
    survey: Survey, reads: Mapping[int, Iterable[str]], used: Sequence[int]
) -> "Covered":
    """Bakes what a trace depends on.

    `reads` are from `recording`; `used` are the ids of the captured tensors that the trace met.
    """
    survey.follow(_names_of_classes(survey, reads))
    for identity in survey.tensors.keys() - survey.nodes.keys():
        if reads.get(identity):
            node = survey.nodes[identity] = survey.tensors[identity][0]
            node.look = contents.of_nothing
    baker = _Baker(survey, reads, {})
    baker.bake()
    hidden = [identity for identity in used if identity not in baker.tensors]
    if hidden:
        # It was reached without a read that is noted, by C code for example.
        forced: dict[int, set[Step]] = {}
        for identity in hidden:
            for owner, step in survey.tensors[identity][0].path:
                forced.setdefault(id(owner.value), set()).add(step)
        baker = _Baker(survey, reads, forced)
        baker.bake()
    untold = [
        f"{baker.spots[spot].label} ({kind.__name__})" for spot, kind in baker.untold
    ]
    return Covered(baker.finish(used), [baker.tensors[i][0] for i in used], untold)


def _names_of_classes(survey: Survey, reads: Mapping[int, Iterable[str]]) -> set[str]:
    """The names read that the user's classes have: `getattr(self, f"_{kind}")` makes some up."""
    found: set[str] = set()
    for identity, names in reads.items():
        kind = survey.nodes[identity].kind if identity in survey.nodes else Tensor
        for index in user_bases(kind):
            found.update(places.attributes(kind.__mro__[index]).keys() & set(names))
    return {name for name in found if not name.startswith("__")}


@final
@dataclass
class _Baker:
    """Walks from the roots through covered places, and writes a spot for each."""

    survey: Survey
    reads: Mapping[int, Iterable[str]]
    #: By the id of an object, steps that are covered whether or not they were read.
    forced: Mapping[int, set[Step]]
    spots: list[Spot] = field(default_factory=list[Spot])
    #: By the id of a tensor, its spots; by the id of any other object, its first.
    tensors: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    known: dict[int, int] = field(default_factory=dict[int, int])
    pending: deque[Node] = field(default_factory=deque[Node])
    #: The spots of objects whose contents are not compared, and their classes.
    untold: list[tuple[int, type]] = field(default_factory=list[tuple[int, type]])

    def bake(self) -> None:
        """Writes the spots, nearest first."""
        self.pending.append(self.survey.roots)
        while self.pending:
            node = self.pending.popleft()
            for step in self.steps(node):
                self.cover_place(node, step)
        self.cover_overrides()
        nodes = [self.survey.nodes[identity] for identity in self.known]
        if any(isinstance(node.value, nn.Module) for node in nodes):
            step = ("hooks", "hooks for all modules")
            self.write(self.survey.roots, step, Equal((*users_hooks(),)))
        self.cover_names([n for n in nodes if n.look is contents.of_user_function])

    def finish(self, used: Sequence[int]) -> list[Spot]:
        """The spots, with aliases of the tensors that are used."""
        spots = list(self.spots)
        for identity in dict.fromkeys(used):
            first, *others = self.tensors[identity]
            for other in others:
                spots[other] = spots[other]._replace(rule=Form("alias", (first,)))
        return spots

    def steps(self, node: Node) -> Iterable[Step]:
        """The covered places of a reached object; writes those without a value at once."""
        names = self.reads.get(id(node.value), (EVERYTHING,))
        if EVERYTHING in names or node.look not in contents.WATCHED:
            for step in _containers_to_bake(node):
                self.cover_shape(node, step)
            for name in names if isinstance(node.value, Tensor) else ():
                if name not in {EVERYTHING, *places.attributes(node.value)}:
                    self.write(node, ("var", name), ABSENT)
            return node.content
        found = dict.fromkeys(self.forced.get(id(node.value), ()))
        found |= {s: None for s in node.content if s[0] in {*places.ITEMS, "type"}}
        for name in names:
            self.cover_name(node, name, found)
        return found

    def cover_name(self, node: Node, name: str, found: dict[Step, None]) -> None:
        """Adds the places that a read of this name depends on."""
        if name in modules.second_places(node.kind):
            return
        if isinstance(node.value, nn.Module) and name in contents.REGISTERED:
            self.cover_shape(node, ("var", name))
            kind = contents.REGISTERED[name]
            found |= {step: None for step in node.content if step[0] == kind}
            return
        for kind in ("var", "attr", *contents.REGISTERED.values()):
            if (kind, name) in node.content:
                found[kind, name] = None
                return
        self.cover_absence(node, name)

    def cover_absence(self, node: Node, name: str) -> None:
        """Covers a name that the object lacked: it came from the class, or was missing."""
        kind = node.kind
        held = places.attributes(node.value)
        if name in held and places.is_kept_property(kind, name):  # found in the trace
            self.write(node, ("var", name), Equal(held[name]))
            return
        if name in contents.slots(kind):
            self.write(node, ("attr", name), ABSENT)
        if not _has_dict_to_bake(node.value) or (name[:2] == "__" == name[-2:]):
            return
        for base in kind.__mro__:
            if name in base.__dict__:
                given: object = base.__dict__[name]
                if not hasattr(cast("Any", type(given)), "__set__"):
                    self.write(node, ("var", name), ABSENT)
                if is_simple(given) and not isinstance(given, type):
                    self.write(node, ("inherited", name), Equal(given))
                return
        self.cover_missing(node, name)

    def cover_missing(self, node: Node, name: str) -> None:
        """Neither an object nor its class has what was read: none may come to have it."""
        self.write(node, ("var", name), ABSENT)
        if not hasattr(node.kind, name):  # else its metaclass has it, for itself alone
            self.write(node, ("inherited", name), ABSENT)
        if isinstance(node.value, nn.Module):
            for registered in contents.REGISTERED.values():
                self.write(node, (registered, name), ABSENT)

    def cover_overrides(self) -> None:
        """Covers that no class before the base that defines a name gets that name."""
        overridable: dict[tuple[int, str], None] = {}
        for identity in self.known:
            kind = self.survey.nodes[identity].value
            before: list[type] = []
            named: set[str] = set()
            for base in kind.__mro__ if isinstance(kind, type) else ():
                names = places.attributes(base).keys() & {*self.survey.names, "forward"}
                for name in names - named:
                    overridable |= {(id(each), name): None for each in before}
                before.append(base)
                named |= names
        # What modes are made to hear while functions run (`_torch.autograd`) comes and goes.
        overridable.pop((id(Tensor), "as_subclass"), None)
        for identity, name in overridable:
            if identity in self.known:
                node = self.survey.nodes[identity]
                self.write(node, ("var", name), ABSENT)

    def cover_names(self, functions: Sequence[Node]) -> None:
        """Covers what code names that is not there: globals, and attributes of what it names."""
        missing: dict[tuple[int, str], Node] = {}
        asked: dict[tuple[int, str], None] = {}
        tried: set[str] = set()
        for node in functions:
            space: dict[str, object] = node.value.__globals__
            named = mentions(node.value.__code__)
            tried |= named.tried
            for name in named.globals - space.keys():
                missing.setdefault((id(space), name), node)
            cells = node.value.__code__.co_freevars
            for name, attribute in named.asked:
                cell = (
                    ("cell", cells.index(name)) if name in cells else ("global", name)
                )
                owner = node.content.get(cell)
                if type(owner) in _NAMED and id(owner) in self.known:
                    asked[id(owner), attribute] = None
        for (_, name), node in missing.items():
            self.write(node, ("global", name), ABSENT)
        for identity, name in asked:
            self.cover_attribute(self.survey.nodes[identity], name)
        self.cover_tried(sorted(tried))

    def cover_tried(self, names: Sequence[str]) -> None:
        """Covers that no class of the user's has what code asks for that is not there."""
        for identity in [*self.known]:
            node = self.survey.nodes[identity]
            kind = node.value
            if isinstance(kind, type) and not is_library_module(module_of(kind)):
                for name in names:
                    if not hasattr(kind, name):
                        self.write(node, ("var", name), ABSENT)

    def cover_attribute(self, node: Node, name: str) -> None:
        """Covers what a function or a Python module may get, or a library changes."""
        held = places.attributes(node.value)
        is_library = node.look is contents.of_nothing
        if name in held and is_library and type(held[name]) in _SWITCHES:
            self.write(node, ("var", name), Equal(held[name]))
        elif not held.keys() & {name, "__getattr__"}:
            self.write(node, ("var", name), ABSENT)

    def cover_shape(self, node: Node, step: Step) -> None:
        """Covers the size or the keys of a container that belongs to the object."""
        found = places.read_place_or_missing(node.value, step)
        self.write(node, step, ABSENT if found is MISSING else _rule_to_bake(found))

    def cover_place(self, node: Node, step: Step) -> None:
        """Writes the spot of one value, and continues from each value once."""
        value = node.content[step]
        if isinstance(value, Tensor):
            spot = self.write(node, step, Form("tensor", (type(value),)))
            self.tensors.setdefault(id(value), []).append(spot)
            if id(value) in self.survey.nodes.keys() - self.known.keys():
                self.known[id(value)] = spot
                self.pending.append(self.survey.nodes[id(value)])
        elif id(value) not in self.survey.nodes:
            if is_simple(value):
                self.write(node, step, Equal(value))
        elif id(value) not in self.known:
            spot = self.write(node, step, _rule_to_bake(value))
            self.known[id(value)] = spot
            self.pending.append(self.survey.nodes[id(value)])
            is_library = node.look is contents.of_library_function
            if not (is_library or contents.is_compared(value)):
                self.untold.append((spot, type(value)))
        elif step[0] not in contents.AS_CLASS:
            same = Form("alias", (self.known[id(value)],))
            self.write(node, step, Equal(value) if is_simple(value) else same)

    def write(self, node: Node, step: Step, rule: Rule) -> int:
        parent = self.known.get(id(node.value), -1)
        above = self.spots[parent].label if parent >= 0 else Label("", "")
        label = above.then(node.value, step)
        self.spots.append(Spot(parent, step, label, rule))
        return len(self.spots) - 1


# Values whose attributes code names by the name of the value.
_NAMED = frozenset({types.FunctionType, types.ModuleType})
# Values of a library's globals that may be its switches.
_SWITCHES = frozenset({bool, int, float, str, type(None)})


def _has_dict_to_bake(value: object) -> bool:
    return type(value).__dictoffset__ != 0 or isinstance(value, threading.local)


def _containers_to_bake(node: Node) -> Iterable[Step]:
    """The containers that stand between an object and its places."""
    value: object = node.value
    if isinstance(value, types.FunctionType) and value.__defaults__:
        return (("attr", "__defaults__"),)
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return (("attr", "args"), ("attr", "keywords"))
    shapes: list[Step] = []
    # Every hook dictionary is an OrderedDict, which gets no attributes of its own.
    own_dict = _has_dict_to_bake(value) and node.kind.__module__ != "collections"
    if node.look in contents.WATCHED and own_dict:
        shapes.append(("attr", "__dict__"))
    if isinstance(value, nn.Module):
        shapes += [("var", name) for name in contents.REGISTERED]
    return shapes


_CONTAINERS = (list, tuple, deque, set, dict)


def _rule_to_bake(value: object) -> Rule:
    kind, is_shown = type(value), contents.shows_members(value)
    number = trackers.number_of(value)
    if number is not None:
        return Form("tracker", (number,))
    if isinstance(value, types.FunctionType):
        return Form("function", (value.__code__,))
    is_module = isinstance(value, types.ModuleType)
    if is_simple(value) or (is_module and is_library_module(value.__name__)):
        return Equal(value)
    if isinstance(value, dict):
        entries = cast("dict[Hashable, object]", value)
        if all(is_simple(key) for key in entries):
            return Form("keyed", (kind, tuple(entries)))
    if not is_shown and isinstance(value, _CONTAINERS):
        # A class of the user's may say otherwise how long it is, or refuse to.
        own: Any = kind
        base: Any = next(each for each in kind.__mro__ if each in _CONTAINERS)
        count: Any = len if own.__len__ is base.__len__ else base.__len__
        return Form("sized", (kind, count(value), count))
    found = cast("object", value)
    if contents.is_told_by_contents(found):
        return Form("instance", (kind,))
    return Form("object", (_leading_to(found),))


def _leading_to(value: object) -> Callable[[], object]:
    """A function that gives an object; it does not keep it alive, if it can."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
