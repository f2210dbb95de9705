"""Pytrees: leaves, paths and structure.

Obsolete when torch.utils._pytree loses its underscore.
"""

# pyright: reportPrivateUsage=false
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar, cast, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_Tree = TypeVar("_Tree")

_CONTAINERS = frozenset({tuple, list, dict})


def tensor_leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def wants_gradients(tree: Any) -> tuple[bool, ...]:
    """For each tensor among the leaves of a pytree whether it requires a gradient."""
    return tuple(each.requires_grad for each in tensor_leaves(tree))


def map_tensors(function: Callable[[Tensor], Tensor], tree: _Tree) -> _Tree:
    leaves, spec = flatten(tree)
    leaves = [function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return unflatten(leaves, spec)


def is_array(leaf: object) -> bool:
    """Whether an object is an array of numpy; a scalar of numpy cannot change."""
    kind = type(leaf)
    return hasattr(kind, "__array_interface__") and hasattr(kind, "__setitem__")


# The leaves of a pytree and what puts them together again.
flatten: Callable[[Any], tuple[list[Any], Any]] = pytree.tree_flatten


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """The pytree of these leaves; a `torch.Size`, of which torch makes a tuple, stays one."""
    return _built(spec, iter(leaves))


def _built(spec: Any, leaves: Iterator[Any]) -> Any:
    if spec.is_leaf():
        return next(leaves)
    # Most parts are leaves: each call of a region puts its results together so.
    parts = [
        next(leaves) if each.is_leaf() else _built(each, leaves)
        for each in spec.children()
    ]
    if spec.type is torch.Size:
        return torch.Size(parts)
    built, context = pytree.SUPPORTED_NODES[spec.type].unflatten_fn, spec.context
    return built(parts, None if context is None else _own_containers(context))


def _own_containers(context: Any) -> Any:
    """A context with lists and dicts of its own: what is put together may change them."""
    if type(context) in (tuple, list):
        if _CONTAINERS.isdisjoint(map(type, context)):
            return type(context)(context)
        return type(context)(map(_own_containers, context))
    if type(context) is dict:
        items = cast("dict[Any, Any]", context).items()
        return {key: _own_containers(each) for key, each in items}
    return context


def structure(spec: Any, of_part: Callable[[Any], Any]) -> Any:
    """What is around leaves, as it is now, with what a function makes of each part of a context.

    A context is what a class gives pytree beside its leaves; its lists and dicts are no parts.
    """
    if spec.is_leaf():
        return None
    inside = (structure(each, of_part) for each in spec.children())
    return (spec.type, _of_context(spec.context, of_part), *inside)


def _of_context(context: Any, of_part: Callable[[Any], Any]) -> Any:
    if isinstance(context, (tuple, list)):
        parts = cast("Sequence[Any]", context)
        return (type(parts), *(_of_context(each, of_part) for each in parts))
    if isinstance(context, dict):
        items = cast("dict[Any, Any]", context)
        parts = (_of_context(each, of_part) for each in items.values())
        return (type(items), tuple(items), *parts)
    return of_part(context)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A pytree without its tensors."""

    spec: Any
    statics: tuple[Any, ...]  # the leaves that are no tensors, in order
    is_tensor: tuple[bool, ...]  # for each leaf whether it is a tensor
    is_leaf: bool  # whether the pytree is a tensor itself

    @classmethod
    def of(cls, tree: Any, kind: type = Tensor) -> tuple[list[Any], Self]:
        """The tensors of a pytree, or what stands for these, and what is around them."""
        leaves, spec = flatten(tree)
        is_tensor = tuple(isinstance(leaf, kind) for leaf in leaves)
        statics = tuple(leaf for leaf in leaves if not isinstance(leaf, kind))
        tensors = [leaf for leaf in leaves if isinstance(leaf, kind)]
        return tensors, cls(spec, statics, is_tensor, isinstance(tree, kind))

    def around(self, tensors: Sequence[Any]) -> Any:
        if self.is_leaf:
            return tensors[0]
        if not self.statics:
            return _built(self.spec, iter(tensors))
        rest, fixed = iter(tensors), iter(self.statics)
        leaves = [next(rest) if each else next(fixed) for each in self.is_tensor]
        return _built(self.spec, iter(leaves))


def leaves_with_path(tree: Any) -> list[tuple[list[str], Any]]:
    """The leaves of a pytree, each with the keys that lead to it.

    Parts of a type that was registered without names get numbers; torch's own function raises.
    """
    leaves, spec = flatten(tree)
    return list(zip(_paths_of_leaves(tree, spec), leaves, strict=True))


def _paths_of_leaves(tree: Any, spec: Any) -> list[list[str]]:
    if spec.is_leaf():
        return [[]]
    node = pytree.SUPPORTED_NODES[spec.type]
    parts: list[Any] = list(node.flatten_fn(tree)[0])
    keys = [str(index) for index in range(len(parts))]
    if node.flatten_with_keys_fn is not None:
        keys = [_path_key_text(key) for key, _ in node.flatten_with_keys_fn(tree)[0]]
    return [
        [key, *path]
        for key, part, inner in zip(keys, parts, spec.children(), strict=True)
        for path in _paths_of_leaves(part, inner)
    ]


def _path_key_text(key: Any) -> str:
    names = ("key", "idx", "name")
    return str(next((getattr(key, name) for name in names if hasattr(key, name)), key))
