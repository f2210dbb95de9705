"""A view, the product of it with a matrix, and a view of that -> one call in C.

`x @ w` on a stack of matrices is traced as view, mm, view. Below autograd, where no dispatch
mode listens for single operators, `aten.matmul` runs the same three from C. Each call is
rehearsed with tensors without data: it is used where it multiplies matrices of the same
layouts and makes nothing else but views.
"""

import dataclasses
from collections import Counter
from typing import Any, final

import torch
from torch import Tensor

from remat._graph.building import prune
from remat._graph.meta import TensorMeta, layout_of
from remat._graph.values import Graph, Ref, Value, has_effect
from remat._programs.bindings import stand_in
from remat._torch import isolation, modes, schemas

_aten: Any = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


def fold(graph: Graph) -> Graph:
    """The graph with products of views as one call each; not to be traced or differentiated."""
    num_uses = Counter(use for value in graph.values for use in value.uses)
    num_uses.update(ref.index for ref in graph.outputs if ref is not None)
    values = list(graph.values)
    with isolation.isolated(), modes.without_torch_function():
        for index, value in enumerate(graph.values):
            steps = _steps_before(graph, value)
            # Another reader would need them all the same.
            if steps and all(num_uses[step] == 1 for step in steps):
                view, product = (graph.values[step] for step in steps)
                args = (view.args[0], product.args[1])
                if _is_same(graph, args, product, value):
                    values[index] = dataclasses.replace(
                        value, op=_aten.matmul.default, args=args
                    )
    effects = [index for index, value in enumerate(values) if has_effect(value)]
    return prune(dataclasses.replace(graph, values=tuple(values)), effects)


def _steps_before(graph: Graph, value: Value) -> tuple[int, ...]:
    """If this is a view of the product of a view, where the other view and the product are."""
    if value.op in _VIEWS:
        product: int = value.args[0].index
        if graph.values[product].op is _aten.mm.default:
            left: int = graph.values[product].args[0].index
            if graph.values[left].op in _VIEWS:
                return left, product
    return ()


def _is_same(graph: Graph, args: tuple[Ref, Ref], product: Value, value: Value) -> bool:
    """Whether `matmul` of these multiplies what the product does, for what the value is."""
    given = [stand_in(graph.values[arg.index].meta) for arg in args]
    listener = _Listener()
    try:
        with listener, modes.below_autograd():
            made = torch.matmul(*given)
    except RuntimeError:
        # Without the first view, the shapes do not fit.
        return False
    metas = [graph.values[use].meta for use in product.uses]
    heard = [_aten.mm.default, *map(_layout, metas)]
    return listener.heard == heard and _layout(made) == _layout(value.meta)


def _layout(tensor: Any) -> tuple[Any, ...]:
    """Shape, strides, dtype of a product or of its metadata; stand-ins share no device."""
    whole = tensor.layout if isinstance(tensor, TensorMeta) else layout_of(tensor)
    return whole[:3]


@final
class _Listener(modes.DispatchMode):
    """Notes each operator that a call is made of, views aside, and what that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def _hear(self, op: Any, args: Any, kwargs: Any) -> Any:
        if schemas.is_composite(op):
            with self:
                return op.decompose(*args, **kwargs)
        if op not in _VIEWS:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            self.heard += [op, *map(_layout, tensors)]
        return op(*args, **kwargs)
