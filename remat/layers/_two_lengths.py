"""What the length of a tile does to a function, told by its traces of two lengths."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

from remat._calls.entry import Entry
from remat._errors import TileError, refusal
from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._graph.values import Ref, Value
from remat._torch import schemas


def require_same_steps(entry: Entry, other: Entry) -> None:
    """Refuses a function whose steps, numbers or results depend on the length."""
    for one, same in itertools.zip_longest(_forward(entry), _forward(other)):
        if one is None or same is None or one.op is not same.op:
            what = "is a step for tiles of one size and none for those of another."
            raise _refuse(one or same, what)
        numbers, others = _numbers(one), _numbers(same)
        names = [key for key in numbers if repr(numbers[key]) != repr(others.get(key))]
        if names and _lengths(one) == _lengths(same):
            found = ", ".join(f"{numbers[key]}" for key in names)
            rest = ", ".join(f"{others.get(key)}" for key in names)
            raise _refuse(
                one,
                "computes with a number that depends on the size of the tile: "
                f"{found}, and {rest} for another size.",
            )
    if entry.output.is_tensor != other.output.is_tensor:
        raise _refuse(None, "returns more or fewer values for a tile of another size.")
    results = [_plain(each.output.statics) for each in (entry, other)]
    if results[0] != results[1]:
        what = f"returns {results[0]}, and {results[1]} for a tile of another size."
        raise _refuse(None, what)


def sized_dims(entry: Entry, other: Entry) -> Mapping[int, frozenset[int]]:
    """For each value of a trace, by its index, the dimensions whose length is not the other's."""
    pairs = zip(
        entry.stages.joint.graph.values, other.stages.joint.graph.values, strict=False
    )
    found: dict[int, frozenset[int]] = {}
    for index, (one, same) in enumerate(pairs):
        if one.is_backward:
            break
        if isinstance(one.meta, TensorMeta) and isinstance(same.meta, TensorMeta):
            found[index] = different_dims(one.meta, same.meta)
    return found


def different_dims(one: TensorMeta, other: TensorMeta) -> frozenset[int]:
    """The dimensions in which two tensors have different lengths."""
    sizes = zip(one.shape, other.shape, strict=False)
    return frozenset(dim for dim, (size, same) in enumerate(sizes) if size != same)


def label(value: Value) -> str:
    """An operator in a message, with the line that the user wrote."""
    name = value.function or operators.short_name(value.op)
    return f"{name} at {value.source}" if value.source else name


def _refuse(value: Value | None, what: str) -> TileError:
    return refusal(
        TileError,
        where=f"tiled: {'the function' if value is None else label(value)}",
        what=what,
        why="A tile is smaller than the whole, so that the result would differ.",
        do='Write .mean() with reduce="mean" instead of a division by the size, or '
        "divide after the call.",
    )


def _forward(entry: Entry) -> list[Value]:
    """The steps of a forward, and of the views of its results."""
    joint = entry.stages.joint
    graphs = [joint.graph, *(each.path for each in joint.views if each.path)]
    return [
        value
        for graph in graphs
        for value in graph.values[graph.num_inputs :]
        if not value.is_backward
    ]


def _plain(statics: Any) -> list[Any]:
    return [each for each in statics if isinstance(each, (int, float, complex, str))]


def _numbers(value: Value) -> dict[str, Any]:
    """What a step computes with besides tensors, but for what says how long its result is."""
    if value.op is operators.constant:
        return {"values": value.args[0].tolist()}
    op: Any = value.op
    if not isinstance(op, schemas.OpOverload):
        return {}
    given = operators.arguments(op, value.args, dict(value.kwargs))
    return {
        name: each
        for name, each in given.items()
        if name not in _LENGTHS and not _has_tensors(each)
    }


# "N" is a group norm's.
_LENGTHS = frozenset(["N", "size", "shape", "repeats", "end", "steps", "n", "m"])


def _lengths(value: Value) -> object:
    """What tells constants of two lengths from two constants of one length."""
    return value.args[0].shape if value.op is operators.constant else None


def _has_tensors(argument: Any) -> bool:
    is_list = isinstance(argument, (list, tuple))
    parts = cast("Sequence[Any]", argument) if is_list else [argument]
    return any(isinstance(each, Ref) for each in parts)
