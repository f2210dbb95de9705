"""The tiles of `tiled`: a pattern that says what is cut, and a call whose arguments are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast, final

import torch
from einops import EinopsError, parsing
from torch import Tensor

from remat import random
from remat._errors import TileError
from remat._graph.meta import TensorMeta
from remat._torch import trees
from remat.layers._axis_rules import Alike, Along, Key, State
from remat.layers._links import stand_ins

_TILE_AXIS = "tile"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What a pattern says of one argument or result."""

    text: str
    #: A name for each dimension, several names for a product, "…" for any number.
    axes: tuple[str | tuple[str, ...], ...]
    #: Which of these is cut; None if none is.
    place: int | None

    @classmethod
    def of(cls, text: str) -> Part:
        """Reads it as einops does."""
        try:
            parsed = parsing.ParsedExpression(text.strip())
        except EinopsError as error:
            raise _bad_pattern(
                text, f"einops cannot read it: {str(error).rstrip('.')}."
            ) from error
        names = parsed.composition
        axes = tuple(each if isinstance(each, str) else tuple(each) for each in names)
        places = [k for k, each in enumerate(axes) if _TILE_AXIS in each]
        is_clear = all(len(axes[k]) == 2 and axes[k][0] == _TILE_AXIS for k in places)
        if not is_clear or len(places) > 1:
            raise _bad_pattern(text, "It does not cut one axis into consecutive tiles.")
        return cls(text.strip(), axes, *(places or [None]))

    def dim(self, tensor: Tensor, where: str) -> int | None:
        """Which dimension of a tensor is cut; None if none is."""
        if self.place is None:
            return None
        ndim, is_open = tensor.dim(), "…" in self.axes
        if ndim < len(self.axes) - is_open or (ndim > len(self.axes) and not is_open):
            raise TileError.of(
                where=where,
                what=f'has {ndim} dimensions, and its pattern "{self.text}" has '
                f"{len(self.axes) - is_open}.",
                why="The pattern says which dimension is cut into tiles.",
                do="Name each dimension, or write ... for any number of them.",
            )
        is_behind = is_open and self.axes.index("…") < self.place
        return self.place - len(self.axes) + ndim if is_behind else self.place


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """A whole pattern: parts for the arguments, and for the results."""

    text: str
    arguments: tuple[Part, ...]
    results: tuple[Part, ...]

    @classmethod
    def of(cls, text: object) -> Pattern:
        """Reads a pattern such as "b (tile s) d, ... -> b (tile s) d"."""
        if not isinstance(text, str) or text.count("->") != 1:
            raise _bad_pattern(text, 'It is no string with one "->" in it.')
        given, _, returned = text.partition("->")
        arguments = tuple(map(Part.of, given.split(",")))
        results = tuple(map(Part.of, returned.split(",")))
        if all(each.place is None for each in arguments):
            raise _bad_pattern(text, "No argument has the axis that is cut.")
        return cls(text, arguments, results)

    def of_arguments(self, args: Sequence[Any]) -> Iterator[tuple[Part, Any]]:
        """Each positional argument with its part; a last "..." stands for all further ones."""
        parts = self.arguments
        if parts[-1].text == "...":
            parts = parts[:-1] + parts[-1:] * (len(args) - len(parts) + 1)
        if len(parts) != len(args):
            raise TileError.of(
                where=f'tiled("{self.text}")',
                what=f"got {len(args)} positional arguments for {len(self.arguments)} patterns.",
                why="Each argument is cut, or the same for all tiles, as its pattern says.",
                do='Write ", ..." for all further arguments, which no tile cuts, or pass them '
                "by keyword.",
            )
        return zip(parts, args, strict=True)

    def of_results(self, result: Any) -> list[Part]:
        """For each tensor that was returned its part."""
        items: Any = [result] if len(self.results) == 1 else result
        if not isinstance(items, (tuple, list)) or len(items) != len(self.results):  # pyright: ignore[reportUnknownArgumentType]
            raise TileError.of(
                where=f'tiled("{self.text}")',
                what=f"the function returned a {type(result).__name__} that does not have "
                f"{len(self.results)} parts.",
                why="Several patterns stand for the items of a tuple.",
                do="Return one item for each pattern, or write one pattern for all.",
            )
        pairs = zip(self.results, cast("Sequence[Any]", items), strict=True)
        return [part for part, item in pairs for _ in trees.tensor_leaves(item)]


def _bad_pattern(text: object, why: str) -> TileError:
    return TileError.of(
        where="tiled(pattern=...)",
        what=f"got {text!r}.",
        why=why,
        do='Write it like "b (tile s) d -> b (tile s) d", with `tile` first in the axis that '
        "is cut.",
    )


@final
@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call, as leaves, and where each is cut."""

    leaves: tuple[Any, ...]
    spec: Any
    dims: tuple[int | None, ...]
    length: int  # of the axis

    @classmethod
    def of(
        cls, pattern: Pattern, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        leaves, spec = trees.flatten((args, kwargs))
        dims: list[int | None] = []
        for number, (part, arg) in enumerate(pattern.of_arguments(args)):
            where = f'tiled("{pattern.text}"): argument {number}'
            for leaf in trees.flatten(arg)[0]:
                dims.append(part.dim(leaf, where) if isinstance(leaf, Tensor) else None)
        dims += [None] * (len(leaves) - len(dims))
        pairs = zip(leaves, dims, strict=True)
        lengths = {leaf.shape[dim] for leaf, dim in pairs if dim is not None}
        if len(lengths) != 1:
            raise TileError.of(
                where=f'tiled("{pattern.text}")',
                what=f"got arguments whose axis has the lengths {sorted(lengths)}."
                if lengths
                else "got no tensor that has the axis.",
                why="All are cut into the same tiles.",
                do="Pass tensors of one length along the axis that is cut.",
            )
        return cls(tuple(leaves), spec, tuple(dims), *lengths)

    def sizes(self, size: int) -> list[int]:
        """The length of each tile, for one size of all but the last."""
        starts = range(0, max(self.length, 1), size)
        return [min(size, self.length - start) for start in starts]

    def tiles(self, size: int) -> Iterator[Any]:
        """The arguments of each tile."""
        parts = [
            None if dim is None else leaf.split(size, dim)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        for number, _ in enumerate(self.sizes(size)):
            leaves = [
                (random.fold_in(leaf, number) if _is_key(leaf) else leaf)
                if part is None
                else part[number]
                for leaf, part in zip(self.leaves, parts, strict=True)
            ]
            yield trees.unflatten(leaves, self.spec)

    def stand_in(self, size: int, *, is_part: bool = False) -> tuple[Any, list[State]]:
        """The arguments of a tile of some size, without data, to be traced.

        And what each of their tensors has of the axis, each tensor once. A tile as long as the
        whole lies in memory as if it were cut from a longer one if `is_part`, as others do.
        """
        pairs = [*zip(self.leaves, self.dims, strict=True)]
        # What is cut is a tensor of its own each time.
        keys = [
            (id(leaf), None if dim is None else place)
            for place, (leaf, dim) in enumerate(pairs)
        ]
        every = zip(keys, pairs, strict=True)
        tensors = {key: pair for key, pair in every if isinstance(pair[0], Tensor)}
        metas = [
            _of_tile(TensorMeta.of_operand(leaf), dim, size, is_part)
            for leaf, dim in tensors.values()
        ]
        made = dict(zip(tensors, stand_ins(metas), strict=True))
        leaves = [made.get(key, pair[0]) for key, pair in zip(keys, pairs, strict=True)]
        states: list[State] = [
            Along(dim) if dim is not None else Key() if _is_key(leaf) else Alike()
            for leaf, dim in tensors.values()
        ]
        return trees.unflatten(leaves, self.spec), states


def _of_tile(meta: TensorMeta, dim: int | None, size: int, is_part: bool) -> TensorMeta:
    if dim is None:
        return meta
    shape, stride = (*meta.shape[:dim], size, *meta.shape[dim + 1 :]), meta.stride
    if is_part and size >= meta.shape[dim]:
        times = -(-2 * size // max(meta.shape[dim], 1))
        stride = tuple(each * times if each > stride[dim] else each for each in stride)
    return dataclasses.replace(meta, shape=shape, stride=stride)


def _is_key(leaf: Any) -> bool:
    is_word = isinstance(leaf, Tensor) and leaf.dtype == torch.uint64
    return is_word and leaf.shape[-1:] == (2,)
