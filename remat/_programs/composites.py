"""Views and the product between them -> one call in C.

`x @ w` on a stack of matrices is traced as view, mm, view; `x @ w.t()` has a transposition
more. Below autograd, where no dispatch mode listens for single operators, `torch.matmul`
and `F.linear` do the same from C. Each call is rehearsed with tensors without data: it is
used where it multiplies matrices of the same layout and makes nothing else but views.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from remat._graph.values import (
    Graph,
    Ref,
    TensorMeta,
    Value,
    has_effect,
    layout_of,
    prune,
)
from remat._programs.bindings import stand_in
from remat._torch import isolation, modes, schemas

_aten: Any = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_AROUND = (*_VIEWS, _aten.t.default, _aten.transpose.int)


@final
@dataclasses.dataclass(frozen=True)
class _Composite:
    """One call for the last of some steps of a graph and those before it, `inner`."""

    call: Callable[..., Tensor]
    args: tuple[Any, ...]
    inner: tuple[int, ...]


def fold(graph: Graph) -> Graph:
    """The graph with composites in it; not to be traced or differentiated."""
    num_uses = Counter(use for value in graph.values for use in value.uses)
    num_uses.update(ref.index for ref in graph.outputs if ref is not None)
    values = list(graph.values)
    with isolation.isolated(), modes.without_torch_function():
        for index in range(graph.num_inputs, len(values)):
            for found in _candidates(graph, index):
                # Another reader would need the first or the last of the inner steps all
                # the same: the view that is multiplied, or the product.
                is_alone = num_uses[found.inner[0]] == num_uses[found.inner[-1]] == 1
                if is_alone and _is_same(graph, index, found):
                    values[index] = dataclasses.replace(
                        values[index], op=found.call, args=found.args
                    )
                    break
    effects = [index for index, value in enumerate(values) if has_effect(value)]
    return prune(dataclasses.replace(graph, values=tuple(values)), effects)


def _candidates(graph: Graph, index: int) -> Iterator[_Composite]:
    """What may stand for the steps that end with this one, the widest first."""
    value = graph.values[index]
    if value.op is _aten.mm.default:
        left, right = value.args
        second = _at(graph, right)
        if second.op is _aten.t.default:
            yield _Composite(F.linear, (left, second.args[0]), (right.index,))
    if value.op in _VIEWS:
        inner: Ref = value.args[0]
        middle = _at(graph, inner)
        if middle.op is _aten.mm.default:
            yield from _products(graph, inner.index)
        if middle.op in _VIEWS:
            yield _Composite(
                _aten.view.default, (middle.args[0], value.args[1]), (inner.index,)
            )


def _products(graph: Graph, product: int) -> Iterator[_Composite]:
    left, right = graph.values[product].args
    first, second = _at(graph, left), _at(graph, right)
    if first.op not in _VIEWS:
        return
    source = first.args[0]
    if second.op is _aten.t.default:
        inner = (left.index, right.index, product)
        yield _Composite(F.linear, (source, second.args[0]), inner)
    yield _Composite(torch.matmul, (source, right), (left.index, product))


def _at(graph: Graph, ref: Ref) -> Value:
    return graph.values[ref.index]


def _is_same(graph: Graph, index: int, candidate: _Composite) -> bool:
    """Whether a rehearsal multiplies the same matrices and ends with the same layout."""
    args: list[Any] = []
    for arg in candidate.args:
        meta = graph.values[arg.index].meta if isinstance(arg, Ref) else None
        args.append(stand_in(meta) if isinstance(meta, TensorMeta) else arg)
    listener = _Listener()
    try:
        with listener, modes.below_autograd():
            made = candidate.call(*args)
    except RuntimeError:
        # A view that this layout does not have.
        return False
    steps = [graph.values[step] for step in (*candidate.inner, index)]
    wanted = [_call_of(graph, step) for step in steps if step.op not in _AROUND]
    meta = graph.values[index].meta
    assert isinstance(meta, TensorMeta)
    return listener.heard == wanted and layout_of(made)[:3] == meta.layout[:3]


def _call_of(graph: Graph, value: Value) -> tuple[Any, ...]:
    metas = [graph.values[use].meta for use in value.uses]
    return (value.op, *(m.layout[:3] for m in metas if isinstance(m, TensorMeta)))


@final
class _Listener(modes.DispatchMode):
    """Notes each operator that a call is made of, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if schemas.is_composite(func):
            with self:
                return func.decompose(*args, **kwargs or {})
        if func not in _AROUND:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            self.heard.append((func, *(layout_of(tensor)[:3] for tensor in tensors)))
        return func(*args, **kwargs or {})
