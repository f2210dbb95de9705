"""The walk: everything that a function and its static arguments reach, before the trace.

From the roots the walk goes, breadth first and so by shortest path, through closure
cells, named globals, defaults, partials, bound instances, `__wrapped__`, modules, instance
dictionaries, slots, lists, tuples, dicts, and through the user's helper functions and the
methods of the user's classes, each by the names that code mentions. It notes for each
object what stands at each of its places, so that a later look tells what a trace changed.

Library code (torch, the standard library, site-packages, this package) is not followed
into its globals; what its functions hold in closures, and its objects, are.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from remat._captures import contents, places
from remat._captures.contents import Content
from remat._captures.library import line_of_name, mentions, users_hooks
from remat._captures.places import MISSING, Label, Step, is_simple
from remat._errors import RecomputationError
from remat._torch import trees
from remat._torch.modules import made_by_hooks, refresh_second_places
from remat._torch.tensors import same_bits

# Among the names that were read: all that the object holds.
EVERYTHING = "__dict__"


@final
@dataclass(eq=False, slots=True)
class Node:
    """One reached object: a path to it, and what stood at its places."""

    value: Any
    parent: "Node | None"
    step: Step
    look: contents.Look = contents.of_roots
    content: Content = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]

    @property
    def kind(self) -> type:
        value: object = self.value
        return type(value)

    @property
    def path(self) -> tuple[tuple["Node", Step], ...]:
        """Owners and steps, from the roots to the object."""
        node, path = self, deque[tuple[Node, Step]]()
        while node.parent is not None:
            path.appendleft((node.parent, node.step))
            node = node.parent
        return tuple(path)

    @property
    def label(self) -> Label:
        """The path in the user's words, such as self.attn.weight or global `W`."""
        label = Label("", "")
        for owner, step in self.path:
            label = label.then(owner.value, step)
        return label


@final
class Survey:
    """What the roots reach, as it stood before the trace. Holds the objects alive.

    Attributes:
        names: what the user's code that was reached mentions.
        nodes: each reached object that has places, by its id, nearest first.
        tensors: a node for each path to each reached tensor, by its id, shortest first.
    """

    def __init__(self, roots: tuple[object, ...]) -> None:
        self.roots = Node(roots, None, ("root", 0))
        self.nodes: dict[int, Node] = {}
        self.tensors: dict[int, tuple[Node, ...]] = {}
        self.names: set[str] = set()
        self._walk()

    @property
    def reached(self) -> list[Tensor]:
        """The reached tensors, each once."""
        return [nodes[0].value for nodes in self.tensors.values()]

    def is_buffer(self, identity: int) -> bool:
        """Whether the tensor of this id is registered as a buffer of some module."""
        nodes = self.tensors.get(identity, ())
        return any(node.step[0] == "buffer" for node in nodes)

    def hooks(self) -> tuple[int, ...]:
        """The registrations of hooks for all modules; none if no module is reached to call them."""
        calls = any(isinstance(node.value, nn.Module) for node in self.nodes.values())
        return (*users_hooks(),) if calls else ()

    def line_of(self, name: str) -> str:
        """The first "file.py:line" of the user's code that mentions a name; "" if none does."""
        for node in self.nodes.values():
            if node.look is contents.of_user_function:
                code = node.value.__code__
                line = line_of_name(code, name)
                if line is not None:
                    return f"{code.co_filename.rpartition('/')[2]}:{line}"
        return ""

    def follow(self, names: Set[str]) -> None:
        """Goes on to what these names lead to, where the user's code mentions them not."""
        if not names <= self.names:
            self.names |= names
            self._walk()

    def follow_counts(self) -> None:
        """Goes on to numbers and the like that are set on tensors: a library's hooks count there."""
        held = [pair for t in self.reached for pair in places.attributes(t).items()]
        self.follow({name for name, value in held if is_simple(value)})

    def _walk(self) -> None:
        self._pending = deque([self.roots])
        while self._pending:
            while self._pending:
                self._open(self._pending.popleft())
            # Names that were met later may be attributes of namespaces met earlier.
            for node in [*self.nodes.values()]:
                if node.look in contents.BY_NAME:
                    self._open(node)

    def _open(self, node: Node) -> None:
        known, node.content = node.content, node.look(node.value, self.names)
        for step, value in node.content.items():
            if type(value) not in places.SIMPLE_TYPES and step not in known:
                self._meet(value, node, step)

    def _meet(self, value: object, owner: Node, step: Step) -> None:
        if Tensor in type(value).__mro__:  # isinstance is slow for tensors
            others = self.tensors.get(id(value), ())
            self.tensors[id(value)] = (*others, Node(value, owner, step))
            if not places.attributes(value):
                return
        node = self.nodes.get(id(value))
        if node is None and (isinstance(value, type) or not places.is_plain(value)):
            node = self.nodes[id(value)] = Node(value, owner, step)
            node.look = contents.look_for(value, step)
            if node.look is contents.of_user_function:
                self.names |= mentions(node.value.__code__).names
            self._pending.append(node)
        elif (
            node and node.look is contents.of_class and step[0] not in contents.AS_CLASS
        ):
            node.look = contents.of_called_class
            self._pending.append(node)

    def changes(self, reads: Mapping[int, Iterable[str]] | None = None) -> str | None:
        """The first reached state that differs from what it was, in words.

        With `reads` (of `recording`), an attribute that was only written, never read
        before, counts only if a tensor was left in it: nothing that the trace did rests on
        it. What a `functools.cached_property` has kept may be simple: `cover` goes by it.
        """
        for node, step, before, after in self._differences():
            if reads is not None and step[0] in {"var", "attr"}:
                names = reads.get(id(node.value), (EVERYTHING,))
                name = cast("str", step[1])
                is_found = before is MISSING and is_simple(after)
                is_kept = is_found and places.is_kept_property(node.kind, name)
                is_read = EVERYTHING in names or (name in names and not is_kept)
                new = Survey((after,)).tensors.keys() - self.tensors.keys()
                if not (new or is_read or node.look in contents.BY_NAME):
                    continue
            label = node.label.then(node.value, step)
            was, became = map(places.value_in_words, (before, after))
            became = "another" if was == became else became
            return f"{label} was {was} and became {became}"
        return None

    def assigned(self) -> list[tuple[object, Step, object]]:
        """Owner, step and value of each reached place that holds another value than it did."""
        return [(node.value, step, now) for node, step, _, now in self._differences()]

    def put_back(self, stand_ins: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Replaces each stand-in that was assigned over its own tensor by that tensor."""
        own = {id(each): real for each, real in zip(stand_ins, tensors, strict=True)}
        for node, step, before, after in list(self._differences()):
            if step[0] != "key" and own.get(id(after)) is before is not None:
                places.write_place(node.value, step, before)
        self._refresh()

    def replace(self, others: Mapping[int, Tensor]) -> None:
        """Puts others in place of tensors, by id, that stand no more where the survey met them.

        Containers that hold them are replaced by copies: the survey lets go of the tensors.
        """

        def other(tensor: Tensor) -> Tensor:
            return others.get(id(tensor), tensor)

        for node, step, before, _ in [*self._differences()]:
            if any(id(each) in others for each in trees.tensor_leaves(before)):
                node.content[step] = trees.map_tensors(other, before)
        for identity, replaced in others.items():
            ends = self.tensors[id(replaced)] = self.tensors.pop(identity)
            for end in ends:
                end.value, path = replaced, end.path
                for place, (owner, step) in enumerate(path[:-1], 1):
                    if owner.content.get(step) is not path[place][0].value:
                        end.parent, end.step = owner, step
                        for holder, _ in path[place:]:
                            self.nodes.pop(id(holder.value), None)
                        break

    def restore(
        self,
        numbers: Iterable[tuple[Tensor, Tensor]] = (),
        but: frozenset[int] = frozenset(),
    ) -> None:
        """Puts back, in place, all reached state that has changed, except tensors of these ids."""
        for node, step, before, _ in [*self._differences()]:
            if step[0] == "referent" or id(before) in but:
                continue
            if step[0] in places.ITEMS:
                _refill(node)
            elif before is not places.Unset.UNSET:
                places.write_place(node.value, step, before)
        self._refresh()
        with torch.no_grad():
            for tensor, held in numbers:
                if not (tensor.is_meta or same_bits(tensor.detach(), held)):
                    tensor.copy_(held)

    def _refresh(self) -> None:
        for node in self.nodes.values():
            refresh_second_places(node.value)

    @contextlib.contextmanager
    def in_place(self, but: Iterable[Tensor] = ()) -> Generator[None]:
        """Inside, all reached state is what it was in the survey, except numbers in tensors.

        The current state, such as a parameter that `functional_call` has put back, stands there again
        at the end. Weak references stay as they are, and so do the places of the tensors in `but`.
        Raises `RecomputationError` if a place is no more.
        """
        left = frozenset(map(id, but))
        filled: set[int] = set()
        with contextlib.ExitStack() as undo:
            for node, step, before, after in [*self._differences()]:
                owner = node.value
                if step[0] == "referent" or id(before) in left:
                    continue
                if step[0] in places.ITEMS:
                    if id(owner) not in filled:
                        filled.add(id(owner))
                        is_dict = isinstance(owner, dict)
                        undo.callback(
                            places.refill, owner, {**owner} if is_dict else [*owner]
                        )
                        _refill(node)
                    continue
                try:
                    places.write_place(owner, step, before)
                except places.NOT_THERE as error:
                    raise RecomputationError.of(
                        where=str(node.label.then(owner, step)),
                        what="cannot be restored to its value in the forward.",
                        why="The function runs again in the backward, and would see "
                        "another value.",
                        do="Change it after backward(), or pass the tensor as an argument.",
                    ) from error
                undo.callback(places.write_place, owner, step, after)
            # What is changed inside, too, where the current state is that of the survey.
            undo.callback(self.restore, but=left)
            yield

    def _differences(self) -> Iterator[tuple[Node, Step, object, object]]:
        for node in (self.roots, *self.nodes.values()):
            then, now = node.content, node.look(node.value, self.names)
            for step in then if then.keys() == now.keys() else {**then, **now}:
                before, after = then.get(step, MISSING), now.get(step, MISSING)
                if before is not after and not (
                    is_simple(before) and places.is_same_value(after, before)
                ):
                    yield node, step, before, after


def _refill(node: Node) -> None:
    """Makes a list, a deque or a dict hold what it held in the survey."""
    before = {
        node.content["key", key] if kind == "value" else key: value
        for (kind, key), value in node.content.items()
        if kind in {"item", "value"}
    }
    is_dict = isinstance(node.value, dict)
    places.refill(node.value, before if is_dict else [*before.values()])


def put_back_hooked(survey: Survey) -> tuple[tuple[Step, ...], ...]:
    """Removes the stand-ins of a trace from the weights that torch's older hooks compute.

    `torch.nn.utils.spectral_norm`, `weight_norm` and pruning store the weight in a plain
    attribute before each call. Returns the steps from the roots to each module whose hooks ran.
    """
    ways: list[tuple[Step, ...]] = []
    for node in survey.nodes.values():
        if not isinstance(node.value, nn.Module):
            continue
        held = vars(node.value)
        names = [
            name
            for name, _ in made_by_hooks(node.value)
            if held.get(name) is not node.content["var", name]
        ]
        for name in names:
            places.write_place(node.value, ("var", name), node.content["var", name])
        if names:
            ways.append(tuple(step for _, step in node.path))
    return tuple(ways)


def refresh_hooked(way: tuple[Step, ...], roots: tuple[object, ...]) -> None:
    """Computes what hooks compute again, in the module that stands at the end of `way`.

    It is computed from the parameters and buffers as the call left them, so that the attribute
    holds what it would without remat, gradient included.
    """
    module = functools.reduce(places.read_place, way, roots)
    assert isinstance(module, nn.Module)
    for name, make in made_by_hooks(module):
        setattr(module, name, make())
