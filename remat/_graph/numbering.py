"""Value numbers: which values of a graph are equal to the last bit.

Two values with one *value number* are equal at run time to the last bit: the same operator on
equal values and equal literals. Names are gone before a graph is built; an operator that draws
random numbers shares its number only with the redraws that read its own recorded generator
state. This is the value numbering of compilers (Cocke and Schwartz, 1970), and what replaces
tags on operators for nested regions.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._graph.values import Building, Graph, Ref, Value, replace_refs
from remat._torch import modes

_aten: Any = torch.ops.aten

# Views that only autograd, which a graph has behind it, tells apart.
_PLAIN_VIEWS: dict[Any, Any] = {_aten._unsafe_view.default: _aten.view.default}

_ZEROS = frozenset(
    {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
)

# What numbers of Python become; torch cannot read the elements of some other dtypes.
_OF_LITERALS = frozenset({torch.bool, torch.int64, torch.float32, torch.float64})
_FEW_ELEMENTS = 256  # of constants that are compared by these, a heuristic


class Numbering:
    """Gives values their numbers, one after the other, in the order of a graph."""

    def __init__(self, values: Iterable[Value] = ()) -> None:
        self._known: dict[Any, int] = {}
        self.numbers: list[int] = []
        for value in values:
            self.add(value)

    def add(self, value: Value, like: int | None = None) -> None:
        """Numbers the next value; `like` is an earlier value that is known to be equal."""
        key = _numbering_key(len(self.numbers), value, self.numbers)
        if like is not None:
            self._known[key] = self.numbers[like]
        self.numbers.append(self._known.setdefault(key, len(self._known)))

    def knows(self, value: Value) -> bool:
        """Whether this value would equal an earlier one if it came next."""
        return _numbering_key(len(self.numbers), value, self.numbers) in self._known


def value_numbers(graph: Graph) -> tuple[int, ...]:
    """One number a value; equal numbers mean equal values, to the last bit."""
    return tuple(Numbering(graph.values).numbers)


def same_outputs(first: Graph, second: Graph) -> bool:
    """Whether two graphs over the same inputs, some of which one may lack, return equal elements.

    A copy is equal to what it copies, wherever nothing reads memory as it lies: autograd copies
    the gradient of a tensor that was written in place, and fills a part of it with zeros. Sums of
    the same terms are equal but for rounding: a region inside of another one sums its own
    gradients of an operand before those of others are added.
    """
    most = max(first, second, key=lambda graph: graph.num_inputs)
    line = Building(most.values[: most.num_inputs], {})
    numbering = Numbering(line.values)
    steps = (*first.values, *second.values)
    is_by_layout = any("as_strided" in operators.short_name(each.op) for each in steps)
    terms: dict[int, list[int]] = {}  # of each sum, by their numbers

    def numbers_of(graph: Graph) -> list[int | None]:
        line.places = {index: index for index in range(graph.num_inputs)}
        for index in range(graph.num_inputs, len(graph.values)):
            line.copy(index, graph.values[index])
            value = line.values[-1]
            is_copy = value.op is _aten.clone.default and not is_by_layout
            like = value.args[0].index if is_copy else None
            if _is_sum(value, line.values):
                parts = [part for use in value.uses for part in terms.get(use, (use,))]
                parts.sort(key=numbering.numbers.__getitem__)
                terms[len(line.values) - 1] = parts
                value = dataclasses.replace(value, args=tuple(map(Ref, parts)))
            numbering.add(_with_plain_zeros(value), like)
        refs = line.refs(graph.outputs)
        return [None if ref is None else numbering.numbers[ref.index] for ref in refs]

    return numbers_of(first) == numbers_of(second)


def _is_sum(value: Value, values: Sequence[Value]) -> bool:
    """Whether a step adds two tensors of its own shape and dtype."""
    if value.op is not _aten.add.Tensor or value.kwargs:
        return False
    metas = [value.meta, *(values[use].meta for use in value.uses)]
    kinds = {(m.shape, m.dtype) for m in metas if isinstance(m, TensorMeta)}
    return len(metas) == 3 and len(kinds) == 1


def _with_plain_zeros(value: Value) -> Value:
    """The step, in one form of those that make zeros."""
    meta = value.meta
    if value.op not in _ZEROS or not isinstance(meta, TensorMeta):
        return value
    made = (meta.shape, meta.dtype, meta.device)
    return dataclasses.replace(value, op=_aten.zeros.default, args=made, kwargs=())


def _numbering_key(index: int, value: Value, numbers: list[int]) -> tuple[Any, ...]:
    if value.op is None or operators.is_rng_state(value.op):
        return ("input", index)
    if value.op is operators.constant:
        with modes.unseen_by_traces():  # around the one that made it
            return ("constant", *_constant_key(value.args[0]))
    numbered = _literal_key(
        replace_refs((value.args, value.kwargs), lambda use: Ref(numbers[use]))
    )
    if not operators.draws(value):
        return ("op", _PLAIN_VIEWS.get(value.op, value.op), numbered)
    # A draw equals another one only if both read one recorded state.
    state = index if value.state is None else numbers[value.state.index]
    return ("draw", value.op, value.in_place, numbered, value.state is None, state)


def _constant_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What equal constants have in common: a function makes them anew in each of its traces."""
    is_read = type(tensor) is torch.Tensor and tensor.dtype in _OF_LITERALS
    is_here = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not (is_read and is_here) or tensor.numel() > _FEW_ELEMENTS:
        return (id(tensor),)
    layout = tensor.dtype, tensor.shape, tensor.stride()
    numbers = cast("list[Any]", tensor.tolist())  # pyright: ignore[reportUnknownMemberType]
    return (*layout, _literal_key(numbers))


def _literal_key(tree: Any) -> Any:
    """A hashable stand-in in which 1, 1.0 and True, or 0.0 and -0.0, differ."""
    if isinstance(tree, (tuple, list)):
        return tuple(_literal_key(item) for item in tree)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(tree, Ref):
        return tree
    return (type(tree), repr(tree))
