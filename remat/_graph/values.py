"""What a legal graph is: values, their numbers, the check, and how one prints.

A graph is a straight line of values in static single assignment: each value is an input,
a constant, or one pure operator applied to earlier values. A joint graph holds a forward
and its backward; `is_backward` says to which a value belongs.

Two values with one *value number* are equal at run time to the last bit: the same
operator on equal values and equal literals. Names and `detach` are gone before a graph is
built; an operator that draws random numbers shares its number only with the redraws that
read its own recorded generator state. This is the value numbering of compilers (Cocke and
Schwartz, 1970), and what replaces tags on operators for nested regions.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, cast, final

import torch

from remat._graph import operators
from remat._torch import autocast, dtensor, levels, modes, sizes


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Ref:
    """A use of the value at `index`."""

    index: int

    def __repr__(self) -> str:
        return f"%{self.index}"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class TensorMeta:
    """All that a trace may know of a tensor: no data, no storage.

    Attributes:
        shape: its shape; a DTensor's is that of the part that this rank holds.
        stride: its strides, likewise.
        dtype: its dtype.
        device: its device.
        requires_grad: whether it is to be differentiated.
        placement: how a DTensor is spread over the ranks; None for any other tensor.
        is_cast_each_time: whether autocast keeps casts for later uses, but not of it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    placement: Any = None
    is_cast_each_time: bool = False

    @classmethod
    def of_operand(cls, tensor: torch.Tensor) -> TensorMeta:
        """The metadata of what a region gets, to be differentiated by whichever transform."""
        meta = cls.of(tensor, requires_grad=levels.requires_grad_anywhere(tensor))
        if not autocast.is_cast_each_time(tensor):
            return meta
        return dataclasses.replace(meta, is_cast_each_time=True)

    @classmethod
    def of(
        cls, tensor: torch.Tensor, *, requires_grad: bool | None = None
    ) -> TensorMeta:
        """The metadata of a tensor, of any kind."""
        wanted = tensor.requires_grad if requires_grad is None else requires_grad
        placement = dtensor.placement(tensor)
        if placement is None:
            return cls.of_whole(tensor, requires_grad=wanted)
        # A trace sees what users' code touches, and knows the DTensor but not its part.
        with modes.without_torch_function():
            local = dtensor.local_part(levels.unwrapped(tensor))
            whole = cls.of_whole(local, requires_grad=wanted)
        return dataclasses.replace(whole, placement=placement)

    @classmethod
    def of_whole(cls, tensor: torch.Tensor, *, requires_grad: bool) -> TensorMeta:
        """The metadata of a tensor; of a DTensor that of the whole, as if it were plain."""
        shape = tuple(tensor.shape)
        return cls(shape, tensor.stride(), tensor.dtype, tensor.device, requires_grad)

    def empty(self) -> torch.Tensor:
        """A leaf like it, whose numbers are not set."""
        local = torch.empty_strided(
            self.shape,
            self.stride,
            dtype=self.dtype,
            device=self.device,
            requires_grad=self.is_leaf,
        )
        return self._spread(local)

    @property
    def is_leaf(self) -> bool:
        """Whether a tensor of this shape and strides is itself to be differentiated."""
        return self.requires_grad and self.placement is None

    def stand_in(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor for the function to use, or the DTensor of which it is this rank's part.

        Gradients are taken by the DTensor, and so are spread as without a region.
        """
        return self.cast_alike(self._spread(local))

    def _spread(self, local: torch.Tensor) -> torch.Tensor:
        if self.placement is None:
            return local
        return dtensor.in_place_of(
            local, self.placement, requires_grad=self.requires_grad
        )

    def of_result(self) -> TensorMeta:
        """The same of a tensor that an operator made, and not the user."""
        is_apart = self.requires_grad and self.dtype is torch.float32
        is_apart = is_apart and autocast.autocast_keeps_casts()
        return dataclasses.replace(self, is_cast_each_time=is_apart)

    def cast_alike(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in place of an operand, which autocast casts as often as the operand."""
        return autocast.cast_each_time(tensor) if self.is_cast_each_time else tensor

    @property
    def layout(self) -> Layout:
        """Its fields; see `layout_of`."""
        fields = (self.shape, self.stride, self.dtype, self.device, self.requires_grad)
        if self.placement is None and not self.is_cast_each_time:
            return fields
        return (*fields, self.placement, self.is_cast_each_time)

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, each counted once, at the sizes of the traced call."""
        return self.dtype.itemsize * math.prod(self.hints)

    @property
    def once(self) -> TensorMeta:
        """The same at the sizes of the traced call, an expanded dimension with one element."""
        stride = tuple(map(sizes.hint, self.stride))
        shape = tuple(once(self.hints, stride))
        return dataclasses.replace(self, shape=shape, stride=stride)

    @property
    def hints(self) -> tuple[int, ...]:
        """The shape, with the size of the traced call for each open size."""
        return tuple(map(sizes.hint, self.shape))

    @property
    def is_differentiable(self) -> bool:
        """Whether tensors of this dtype have gradients."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, self.shape))}]"


def once(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """A shape without the repetitions of an expanded tensor."""
    return [
        size if step else min(size, 1) for size, step in zip(shape, stride, strict=True)
    ]


# Shape, strides, dtype, device, whether it is differentiated; the other fields where they say
# something.
Layout = tuple[Any, ...]


def layout_of(tensor: torch.Tensor) -> Layout:
    """The fields of a tensor's `TensorMeta`, cheap to read and to hash."""
    if autocast.is_cast_each_time(tensor) or dtensor.placement(tensor) is not None:
        return TensorMeta.of_operand(tensor).layout
    wanted = levels.requires_grad_anywhere(tensor)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, wanted)


def whole_layout(layout: Layout) -> Layout:
    """The layout of a tensor; that of a DTensor is the layout of the whole."""
    if not is_spread(layout):
        return layout
    _, _, dtype, device, wanted, placement, _ = layout
    return (placement.shape, placement.stride, dtype, device, wanted)


def is_spread(layout: Layout) -> bool:
    """Whether a layout is that of a DTensor."""
    return len(layout) > 5 and layout[5] is not None


def is_open(meta: TensorMeta) -> bool:
    """Whether a size or stride is a symbol of a running trace."""
    return any(isinstance(each, torch.SymInt) for each in (*meta.shape, *meta.stride))


def named(key: Any) -> Hashable:
    """A key with strings instead of symbols, which cannot be hashed."""
    if isinstance(key, torch.SymInt):
        return ("size", str(key))
    if isinstance(key, TensorMeta):
        return named(key.layout)
    if isinstance(key, tuple):
        return tuple(map(named, cast("tuple[Any, ...]", key)))
    return key


Meta = TensorMeta | tuple["TensorMeta | None", ...] | None


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One step of a graph.

    Attributes:
        op: what makes the value; None for an input.
        args: positional arguments, with a `Ref` wherever another value is used.
        kwargs: keyword arguments, likewise.
        meta: one tensor's metadata, a tuple for an operator with several outputs.
        is_backward: whether the value belongs to the backward half of a joint graph.
        names: what the user called this value with `checkpoint_name`.
        source: the user's "file.py:line".
        function: the torch function that the user called to make it.
        state: the generator state, recorded just before, that a draw starts from.
        is_redraw: whether a draw sets that state first, instead of finding it.
        stream: whose state in a tracker the draw takes and moves, "" for the generator's.
        in_place: whether the user's draw filled a tensor, whose strides then say which
            element gets which number.
        rank: in a program, which of the forward's values the step computes, counted in
            the forward's order; -1 for a step of the derivative's own.
    """

    op: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    meta: Meta = None
    is_backward: bool = False
    names: tuple[str, ...] = ()
    source: str = ""
    function: str = ""
    state: Ref | None = None
    is_redraw: bool = False
    stream: str = ""
    in_place: bool = False
    rank: int = -1

    @property
    def is_repeat(self) -> bool:
        """Whether a backward's step computes what the forward has computed before."""
        return self.is_backward and self.rank >= 0

    @property
    def uses(self) -> tuple[int, ...]:
        """The indices of the values that this one reads."""
        found = list(refs((self.args, self.kwargs)))
        if self.state is not None:
            found.append(self.state.index)
        return tuple(found)


def refs(tree: Any) -> Iterator[int]:
    """The indices of every `Ref` in nested tuples, lists and slices."""
    if isinstance(tree, Ref):
        yield tree.index
    elif isinstance(tree, (tuple, list)):
        for item in tree:  # pyright: ignore[reportUnknownVariableType]
            yield from refs(item)


def replace_refs(tree: Any, rename: Callable[[int], Any]) -> Any:
    """The same nested tuples and lists with every `Ref` replaced."""
    if isinstance(tree, Ref):
        return rename(tree.index)
    if isinstance(tree, tuple):
        return tuple(replace_refs(item, rename) for item in tree)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(tree, list):
        return [replace_refs(item, rename) for item in tree]  # pyright: ignore[reportUnknownVariableType]
    return tree


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """Values in an order in which they can be computed, the inputs first.

    Attributes:
        values: the steps; the first `num_inputs` are inputs.
        num_inputs: how many values are given from outside.
        outputs: what is returned; None stands for no value.
    """

    values: tuple[Value, ...]
    num_inputs: int
    outputs: tuple[Ref | None, ...]

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    @property
    def operators(self) -> tuple[str, ...]:
        """The names of the operators that a run executes, views included, in order."""
        return tuple(
            operators.short_name(value.op)
            for value in self.values
            if value.op is not None and value.op is not operator.getitem
        )


def _lines(graph: Graph) -> Iterator[str]:
    inputs = ", ".join(f"%{i}: {graph.values[i].meta}" for i in range(graph.num_inputs))
    yield f"program({inputs}):"
    for index, value in enumerate(graph.values[graph.num_inputs :], graph.num_inputs):
        arguments = [repr(argument) for argument in value.args]
        arguments += [f"{key}={argument!r}" for key, argument in value.kwargs]
        notes = [str(value.meta) if isinstance(value.meta, TensorMeta) else ""]
        notes += [f'"{name}"' for name in value.names] + [value.source]
        note = "  # " + " ".join(filter(None, notes)) if any(notes) else ""
        name = operators.short_name(value.op)
        yield f"  %{index} = {name}({', '.join(arguments)}){note}"
    yield f"  return {', '.join(map(repr, graph.outputs))}"


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


def has_effect(value: Value) -> bool:
    """Whether a step matters even if nothing reads it: it draws, or may raise."""
    is_draw = operators.draws(value) and not value.is_redraw
    return is_draw or operators.is_check(value.op)


class Numbering:
    """Gives values their numbers, one after the other, in the order of a graph."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self.numbers: list[int] = []

    def add(self, value: Value, like: int | None = None) -> None:
        """Numbers the next value; `like` is an earlier value that is known to be equal."""
        key = _key(len(self.numbers), value, self.numbers)
        if like is not None:
            self._known[key] = self.numbers[like]
        self.numbers.append(self._known.setdefault(key, len(self._known)))

    def knows(self, value: Value) -> bool:
        """Whether this value would equal an earlier one if it came next."""
        return _key(len(self.numbers), value, self.numbers) in self._known


def value_numbers(graph: Graph) -> tuple[int, ...]:
    """One number a value; equal numbers mean equal values, to the last bit."""
    numbering = Numbering()
    for value in graph.values:
        numbering.add(value)
    return tuple(numbering.numbers)


def _key(index: int, value: Value, numbers: list[int]) -> tuple[Any, ...]:
    if value.op is None or operators.is_rng_state(value.op):
        return ("input", index)
    if value.op is operators.constant:
        return ("constant", id(value.args[0]))
    numbered = _literal(
        replace_refs((value.args, value.kwargs), lambda use: Ref(numbers[use]))
    )
    if not operators.draws(value):
        return ("op", value.op, numbered)
    # A draw equals another one only if both read one recorded state.
    state = index if value.state is None else numbers[value.state.index]
    return ("draw", value.op, value.in_place, numbered, value.state is None, state)


def _literal(tree: Any) -> Any:
    """A hashable stand-in in which 1, 1.0 and True, or 0.0 and -0.0, differ."""
    if isinstance(tree, (tuple, list)):
        return tuple(_literal(item) for item in tree)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(tree, Ref):
        return tree
    return (type(tree), repr(tree))


def roots(graph: Graph) -> tuple[int, ...]:
    """For each value the value that owns its storage: itself unless it is a view."""
    found: list[int] = []
    for index, value in enumerate(graph.values):
        viewer = value
        if value.op is operator.getitem:
            # split, unbind and chunk return several views of one tensor.
            maker: int = value.args[0].index
            viewer = graph.values[maker]
        base = operators.viewed(viewer)
        found.append(index if base is None else found[base])
    return tuple(found)


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


def is_tensor(value: Value) -> bool:
    """Whether a value is one tensor, not an operator's tuple of outputs."""
    return isinstance(value.meta, TensorMeta)


def label(graph: Graph, index: int) -> str:
    """A value in a message: its names, dtype[shape], operator and line."""
    value = graph.values[index]
    if value.op is operator.getitem:
        made_at: int = value.args[0].index
        maker = graph.values[made_at].op
    else:
        maker = value.op
    names = ", ".join(f'"{name}"' for name in value.names)
    made = f"made by {operators.short_name(maker)}"
    metas = value.meta if isinstance(value.meta, tuple) else (value.meta,)
    first = next((str(meta) for meta in metas if meta is not None), "")
    return " ".join(filter(None, [names, first, made, _at(value.source)]))


def _at(source: str) -> str:
    return f"at {source}" if source else ""
