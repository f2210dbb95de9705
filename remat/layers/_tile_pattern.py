"""The pattern of `tiled`: which dimension of which argument and result is cut into tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, cast, final

from einops import EinopsError, parsing
from torch import Tensor

from remat._errors import TileError, refusal
from remat._torch import trees

TILE = "tile"

Axes: TypeAlias = tuple[str | tuple[str, ...], ...]
"""The dimensions of one part: a name each, several names for a product, "…" for any number."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What a pattern says of one argument or result."""

    text: str
    axes: Axes

    @classmethod
    def of(cls, text: str) -> Part:
        """Reads it as einops does."""
        try:
            parsed = parsing.ParsedExpression(text.strip())
        except EinopsError as error:
            raise _refuse(
                text, f"einops cannot read it: {str(error).rstrip('.')}."
            ) from error
        composition = parsed.composition
        axes = tuple(
            each if isinstance(each, str) else tuple(each) for each in composition
        )
        found = [each for each in axes if isinstance(each, tuple) and TILE in each]
        if any(len(each) != 2 or each[0] != TILE for each in found) or len(found) > 1:
            raise _refuse(text, "It does not cut one axis into consecutive tiles.")
        return cls(text.strip(), axes)

    @property
    def is_cut(self) -> bool:
        """Whether it has the axis."""
        return any(isinstance(each, tuple) and TILE in each for each in self.axes)

    def dim(self, tensor: Tensor | None, where: str) -> int | None:
        """Which dimension of a tensor is cut; None if none is."""
        if not self.is_cut:
            return None
        ndim = 0 if tensor is None else tensor.dim()
        places = [
            k
            for k, each in enumerate(self.axes)
            if isinstance(each, tuple) and TILE in each
        ]
        place, is_open = places[0], "…" in self.axes
        if ndim < len(self.axes) - is_open or (ndim > len(self.axes) and not is_open):
            raise refusal(
                TileError,
                where=where,
                what=f'has {ndim} dimensions, and its pattern "{self.text}" has '
                f"{len(self.axes) - is_open}.",
                why="The pattern says which dimension is cut into tiles.",
                do="Name each dimension, or write ... for any number of them.",
            )
        is_behind = is_open and self.axes.index("…") < place
        return place - len(self.axes) + ndim if is_behind else place


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
            raise _refuse(text, 'It is no string with one "->" in it.')
        given, _, returned = text.partition("->")
        arguments = tuple(map(Part.of, given.split(",")))
        results = tuple(map(Part.of, returned.split(",")))
        if not any(each.is_cut for each in arguments):
            raise _refuse(text, "No argument has the axis that is cut.")
        return cls(text, arguments, results)

    def of_arguments(self, args: Sequence[Any]) -> Iterator[tuple[Part, Any]]:
        """Each positional argument with its part; a last "..." stands for all further ones."""
        parts = list(self.arguments)
        if len(parts) < len(args) and parts[-1].text == "...":
            parts += [parts[-1]] * (len(args) - len(parts))
        if len(parts) == len(args) + 1 and parts[-1].text == "...":
            parts.pop()
        if len(parts) != len(args):
            raise refusal(
                TileError,
                where=f'tiled("{self.text}")',
                what=f"got {len(args)} positional arguments for {len(self.arguments)} patterns.",
                why="Each argument is cut, or the same for all tiles, as its pattern says.",
                do='Write ", ..." for all further arguments, which no tile cuts, or pass them '
                "by keyword.",
            )
        return zip(parts, args, strict=True)

    def of_results(self, result: Any) -> list[Part]:
        """For each tensor that was returned its part."""
        if len(self.results) == 1:
            return [self.results[0]] * len(trees.tensor_leaves(result))
        if not isinstance(result, (tuple, list)) or len(result) != len(self.results):  # pyright: ignore[reportUnknownArgumentType]
            kind = type(result).__name__  # pyright: ignore[reportUnknownArgumentType]
            raise refusal(
                TileError,
                where=f'tiled("{self.text}")',
                what=f"the function returned a {kind} that does not have "
                f"{len(self.results)} parts.",
                why="Several patterns stand for the items of a tuple.",
                do="Return one item for each pattern, or write one pattern for all.",
            )
        parts: list[Part] = []
        for part, item in zip(self.results, cast("Sequence[Any]", result), strict=True):
            parts += [part] * len(trees.tensor_leaves(item))
        return parts


def _refuse(text: object, why: str) -> TileError:
    return refusal(
        TileError,
        where="tiled(pattern=...)",
        what=f"got {text!r}.",
        why=why,
        do='Write it like "b (tile s) d -> b (tile s) d", with `tile` first in the axis that '
        "is cut.",
    )
