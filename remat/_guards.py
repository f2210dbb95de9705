"""A call like one before, recognized in C: the short way to its signature.

Most calls of a region are like the last one or the one before. Whether a call is takes a
walk over its containers, written out for their shape, and one check of all its tensors by
torch's own guards; nothing is hashed. What a guard does not recognize is signed in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from remat import _compat
from remat._signature import static_key

_Args = tuple[Any, ...]
_Take = Callable[[_Args, Mapping[str, Any]], "tuple[Tensor, ...] | None"]


@final
class Guard:
    """Recognizes calls that have one signature, all of its leaves tensors or static.

    Holds metadata and static values; nothing of the user's is kept alive.

    Attributes:
        tensors: from a call's (args, kwargs) to its tensors in the order of its leaves;
            None if it is another call.
    """

    __slots__ = ("tensors",)

    def __init__(self, args: _Args, kwargs: Mapping[str, Any]) -> None:
        """Learns a call, whose leaves `is_simple` has accepted."""
        self.tensors: _Take = _Writer().function(args, kwargs)


def is_simple(tree: Any) -> bool:
    """Whether a tree is made of tuples, lists, dicts, tensors and static leaves alone."""
    if isinstance(tree, Tensor):
        return _compat.is_plain(tree)
    if type(tree) in {tuple, list}:
        return all(map(is_simple, tree))
    if type(tree) is dict:
        return all(map(is_simple, tree.values()))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return static_key(tree) is not None


@final
class _Writer:
    """Writes a function from (args, kwargs) to the tensors of a call."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._places: list[str] = []
        self._lines: list[str] = []
        self._space: dict[str, Any] = {"static_key": static_key}

    def function(self, args: _Args, kwargs: Mapping[str, Any]) -> _Take:
        """The function that recognizes the containers and static leaves of this call."""
        self._tree("args", args)
        self._tree("kwargs", dict(kwargs))
        self._space["check"] = _compat.tensor_guard(self.tensors)
        places = ", ".join(self._places)
        self._require(f"check({places})")
        body = "".join(f"    {line}\n" for line in self._lines)
        text = f"def take(args, kwargs):\n{body}    return ({places},)\n"
        exec(compile(text, "<remat guard>", "exec"), self._space)
        return self._space["take"]

    def _tree(self, place: str, tree: Any) -> None:
        if isinstance(tree, Tensor):
            # The check at the end refuses what stands in two places.
            for known, first in zip(self.tensors, self._places, strict=True):
                if known is tree:
                    self._require(f"{place} is {first}")
                    return
            self.tensors.append(tree)
            self._places.append(place)
        elif isinstance(tree, (tuple, list)):
            kind = self._constant(type(tree))  # pyright: ignore[reportUnknownArgumentType]
            self._require(f"type({place}) is {kind} and len({place}) == {len(tree)}")  # pyright: ignore[reportUnknownArgumentType]
            self._items(place, place, tree)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(tree, dict):
            keys = self._constant(tuple(tree))  # pyright: ignore[reportUnknownArgumentType]
            self._require(f"type({place}) is dict and tuple({place}) == {keys}")
            self._items(place, f"{place}.values()", list(tree.values()))  # pyright: ignore[reportUnknownArgumentType]
        else:
            key = self._constant(static_key(tree))
            self._require(f"static_key({place}) == {key}")

    def _items(self, place: str, source: str, items: Sequence[Any]) -> None:
        if not items:
            return
        names = [f"{place}_{index}" for index in range(len(items))]
        self._lines.append(f"{', '.join(names)}, = {source}")
        for name, item in zip(names, items, strict=True):
            self._tree(name, item)

    def _require(self, clause: str) -> None:
        self._lines.append(f"if not ({clause}): return None")

    def _constant(self, value: object) -> str:
        name = f"c{len(self._space)}"
        self._space[name] = value
        return name
