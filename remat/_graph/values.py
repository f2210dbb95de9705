"""What a legal graph is: its values, the check, how one prints, how one is written from others.

A graph is a straight line of values in static single assignment: each value is an input,
a constant, or one pure operator applied to earlier values. A joint graph holds a forward
and its backward; `is_backward` says to which a value belongs. Pruning, merging, cutting a joint
graph in two and putting barriers into a backward are all done by `Building`.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from remat._graph import operators
from remat._graph.meta import Meta, TensorMeta, is_open, metas_in


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Ref:
    """A use of the value at `index`."""

    index: int

    def __repr__(self) -> str:
        return f"%{self.index}"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One step of a graph."""

    op: Callable[..., Any] | None  # what makes the value; None for an input
    #: Positional arguments, with a `Ref` wherever another value is used.
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()  # keyword arguments, likewise
    #: One tensor's metadata, a tuple for an operator with several outputs.
    meta: Meta = None
    #: Whether the value belongs to the backward half of a joint graph.
    is_backward: bool = False
    #: What the user called this value with `checkpoint_name`.
    names: tuple[str, ...] = ()
    source: str = ""  # the user's "file.py:line"
    function: str = ""  # the torch function that the user called to make it
    #: The generator state, recorded just before, that a draw starts from.
    state: Ref | None = None
    #: Whether a draw sets that state first, instead of finding it.
    is_redraw: bool = False
    #: Whose state in a tracker the draw takes and moves, "" for the generator's.
    stream: str = ""
    #: Whether the user's draw filled a tensor, whose strides then say which element gets
    #: which number.
    in_place: bool = False
    #: In a program, which of the forward's values the step computes, counted in the
    #: forward's order; -1 for a step of the derivative's own.
    rank: int = -1

    @property
    def is_repeat(self) -> bool:
        """Whether a backward's step computes what the forward has computed before."""
        return self.is_backward and self.rank >= 0

    @property
    def has_effect(self) -> bool:
        """Whether a step matters even if nothing reads it: it draws, or may raise."""
        is_draw = operators.draws(self) and not self.is_redraw
        return is_draw or operators.is_check(self.op)

    @property
    def uses(self) -> tuple[int, ...]:
        """The indices of the values that this one reads."""
        found = list(refs((self.args, self.kwargs)))
        if self.state is not None:
            found.append(self.state.index)
        return tuple(found)


def by_sizes(value: Value, values: Sequence[Value]) -> frozenset[int]:
    """The values of which a step reads the sizes and strides alone, where these are known."""
    found: set[int] = set()
    for index in refs([*operators.read_by_sizes(value)]):
        meta = values[index].meta
        is_known = isinstance(meta, TensorMeta) and not is_open(meta)
        if is_known and value.uses.count(index) == 1:
            found.add(index)
    return frozenset(found)


def without_numbers(meta: TensorMeta) -> Value:
    """A step that makes a tensor of this metadata, for what reads nothing else of it."""
    kwargs = (("dtype", meta.dtype), ("device", meta.device))
    args = (meta.shape, meta.stride)
    op = torch.ops.aten.empty_strided.default
    return Value(op, args, kwargs, meta, is_backward=True)


def refs(tree: Any) -> Iterator[int]:
    """The indices of every `Ref` in nested tuples, lists and slices."""
    if isinstance(tree, Ref):
        yield tree.index
    elif isinstance(tree, (tuple, list)):
        for item in tree:  # pyright: ignore[reportUnknownVariableType]
            yield from refs(item)


def replace_refs(tree: Any, rename: Callable[[int], Any]) -> Any:
    """Nested tuples and lists with every `Ref` replaced."""
    if isinstance(tree, Ref):
        return rename(tree.index)
    if isinstance(tree, tuple):
        return tuple(replace_refs(item, rename) for item in tree)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(tree, list):
        return [replace_refs(item, rename) for item in tree]  # pyright: ignore[reportUnknownVariableType]
    return tree


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Values in an order in which they can be computed, the inputs first."""

    values: tuple[Value, ...]  # the steps; the first `num_inputs` are inputs
    num_inputs: int  # how many values are given from outside
    outputs: tuple[Ref | None, ...]  # what is returned; None stands for no value

    def __str__(self) -> str:
        inputs = [f"%{k}: {self.values[k].meta}" for k in range(self.num_inputs)]
        lines = [f"program({', '.join(inputs)}):"]
        for index in range(self.num_inputs, len(self.values)):
            value = self.values[index]
            arguments = [repr(argument) for argument in value.args]
            arguments += [f"{key}={argument!r}" for key, argument in value.kwargs]
            call = f"{operators.short_name(value.op)}({', '.join(arguments)})"
            lines.append(f"  %{index} = {call}{comment(value)}")
        return "\n".join([*lines, f"  return {', '.join(map(repr, self.outputs))}"])

    def metas(self, uses: Iterable[Ref | None]) -> list[TensorMeta]:
        """The metadata of values, each of which is one tensor."""
        found = [self.values[ref.index].meta for ref in uses if ref is not None]
        return [meta for meta in found if isinstance(meta, TensorMeta)]

    @property
    def operators(self) -> tuple[str, ...]:
        """The names of the operators that a run executes, views included, in order."""
        return tuple(
            operators.short_name(value.op)
            for value in self.values
            if value.op not in (None, operator.getitem)
            and not operators.ends_gradient(value)
        )


def comment(value: Value) -> str:
    """What is printed behind a step: dtype[shape], its names and its line."""
    notes = [str(value.meta) if isinstance(value.meta, TensorMeta) else ""]
    notes += [f'"{name}"' for name in value.names] + [value.source]
    return "  # " + " ".join(filter(None, notes)) if any(notes) else ""


def check(graph: Graph) -> Graph:
    """Returns the graph if it is legal; an illegal one is a mistake of this package.

    Legal means: inputs come first and nowhere else, every use follows its definition,
    outputs exist, no forward value reads a backward one, and nothing writes in place.
    """
    for index, value in enumerate(graph.values):
        is_input = value.op is None
        assert is_input == (index < graph.num_inputs), f"%{index} is a misplaced input"
        for use in value.uses:
            assert use < index, f"%{index} reads %{use} before it is made"
            reads_ahead = graph.values[use].is_backward and use >= graph.num_inputs
            assert value.is_backward or not reads_ahead, (
                f"forward value %{index} reads backward value %{use}"
            )
        assert not operators.is_mutable(value.op), f"%{index} writes in place"
    for output in graph.outputs:
        assert output is None or output.index < len(graph.values), f"no {output}"
    return graph


def step_behind(value: Value, values: Sequence[Value]) -> Value:
    """The step that makes a value: itself, or what it is one of several outputs of."""
    if value.op is not operator.getitem:
        return value
    index: int = value.args[0].index
    return values[index]


def roots(graph: Graph) -> tuple[int, ...]:
    """For each value the value that owns its storage: itself unless it is a view."""
    found: list[int] = []
    for index, value in enumerate(graph.values):
        # split, unbind and chunk return several views of one tensor.
        base = operators.viewed(step_behind(value, graph.values))
        found.append(index if base is None else found[base])
    return tuple(found)


def read_as_real(graph: Graph) -> list[int]:
    """The inputs that the operator reads which refuses lazy conjugates."""
    owners, values = roots(graph), graph.values
    reads = {owners[k] for k, each in enumerate(values) if each.op is operators.AS_REAL}
    return [index for index in range(graph.num_inputs) if index in reads]


def last_uses(graph: Graph) -> dict[int, list[int]]:
    """For each step the values that nothing reads after it."""
    kept = {ref.index for ref in graph.outputs if ref is not None}
    last: dict[int, int] = {}
    for index, value in enumerate(graph.values):
        last[index] = index
        for use in value.uses:
            last[use] = index
    found: dict[int, list[int]] = {}
    for index, step in last.items():
        if index not in kept and step >= graph.num_inputs:
            found.setdefault(step, []).append(index)
    return found


def label(graph: Graph, index: int) -> str:
    """A value in a message: its names, dtype[shape], operator and line."""
    value = graph.values[index]
    names = ", ".join(f'"{name}"' for name in value.names)
    made = f"made by {operators.made_by(value, graph.values)}"
    first = next(map(str, metas_in(value.meta)), "")
    place = f"at {value.source}" if value.source else ""
    return " ".join(filter(None, [names, first, made, place]))


@final
class Building:
    """A program that is being written: its values so far, and their places by the other's."""

    def __init__(self, inputs: Iterable[Value], places: Mapping[int, int]) -> None:
        self.values = [*inputs]
        self.places = dict(places)

    def copy(self, index: int, value: Value) -> None:
        """Writes a step in place of the other program's step at `index`, which it may be."""
        copied = renumbered(value, self.places)
        self.places[index] = len(self.values)
        self.values.append(copied)

    def graph(self, num_inputs: int, outputs: Iterable[Ref | None]) -> Graph:
        """The program, with these outputs of the other one."""
        return Graph(tuple(self.values), num_inputs, self.refs(outputs))

    def refs(self, refs: Iterable[Ref | None]) -> tuple[Ref | None, ...]:
        """Uses of values of the other program as uses of what was written for them."""
        return tuple(
            None if ref is None else Ref(self.places[ref.index]) for ref in refs
        )


def renumbered(value: Value, places: Mapping[int, int]) -> Value:
    reads = (value.args, value.kwargs, value.state)
    args, kwargs, state = replace_refs(reads, lambda use: Ref(places[use]))
    return dataclasses.replace(value, args=args, kwargs=kwargs, state=state)


def needed_for(graph: Graph, wanted: Iterable[int]) -> set[int]:
    """These values, and all that they are made from."""
    needed = {*wanted}
    for index in range(len(graph.values) - 1, -1, -1):
        if index in needed:
            needed.update(graph.values[index].uses)
    return needed


def prune(
    graph: Graph, keep: Iterable[int] | None = None, num_inputs: int | None = None
) -> Graph:
    """The graph of what its outputs or `keep` need, and its first `num_inputs` inputs, or all.

    Unless told otherwise it keeps each step that has an effect.
    """
    count = graph.num_inputs if num_inputs is None else num_inputs
    if keep is None:
        keep = (k for k, value in enumerate(graph.values) if value.has_effect)
    outputs = (ref.index for ref in graph.outputs if ref is not None)
    new = Building((), {})
    for index in sorted(needed_for(graph, [*range(count), *keep, *outputs])):
        new.copy(index, graph.values[index])
    return new.graph(count, graph.outputs)
