"""A call of a tiled function: its arguments as leaves, and the tiles that they are cut into."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from remat import random
from remat._errors import TileError, refusal
from remat._graph.meta import TensorMeta
from remat._torch import trees
from remat.layers._axis import Alike, Along, Key, State
from remat.layers._links import stand_ins
from remat.layers._tile_pattern import Pattern


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
            raise refusal(
                TileError,
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
            yield self._tile(parts, number)

    def stand_in(self, size: int, *, is_part: bool = False) -> tuple[Any, list[State]]:
        """The arguments of a tile of some size, without data, to be traced.

        And what each of their tensors has of the axis, each tensor once. A tile as long as the
        whole lies in memory as if it were cut from a longer one if `is_part`, as others do.
        """
        metas: list[TensorMeta] = []
        states: list[State] = []
        numbers: dict[object, int] = {}
        places: dict[int, int] = {}
        for place, (leaf, dim) in enumerate(zip(self.leaves, self.dims, strict=True)):
            if not isinstance(leaf, Tensor):
                continue
            # What is cut is a tensor of its own each time.
            which = id(leaf) if dim is None else ("cut", place)
            if which not in numbers:
                numbers[which] = len(metas)
                metas.append(_of_tile(TensorMeta.of_operand(leaf), dim, size, is_part))
                states.append(_state_of(leaf, dim))
            places[place] = numbers[which]
        made = stand_ins(metas)
        leaves = [
            made[places[place]] if place in places else leaf
            for place, leaf in enumerate(self.leaves)
        ]
        return trees.unflatten(leaves, self.spec), states

    def _tile(self, parts: Sequence[Sequence[Tensor] | None], number: int) -> Any:
        leaves = [
            (random.fold_in(leaf, number) if _is_key(leaf) else leaf)
            if part is None
            else part[number]
            for leaf, part in zip(self.leaves, parts, strict=True)
        ]
        return trees.unflatten(leaves, self.spec)


def _of_tile(meta: TensorMeta, dim: int | None, size: int, is_part: bool) -> TensorMeta:
    if dim is None:
        return meta
    shape, stride = (*meta.shape[:dim], size, *meta.shape[dim + 1 :]), meta.stride
    if is_part and size >= meta.shape[dim]:
        times = -(-2 * size // max(meta.shape[dim], 1))
        stride = tuple(each * times if each > stride[dim] else each for each in stride)
    return dataclasses.replace(meta, shape=shape, stride=stride)


def _state_of(leaf: Tensor, dim: int | None) -> State:
    if dim is not None:
        return Along(dim)
    return Key() if _is_key(leaf) else Alike()


def _is_key(leaf: Any) -> bool:
    is_word = isinstance(leaf, Tensor) and leaf.dtype == torch.uint64
    return is_word and leaf.shape[-1:] == (2,)
