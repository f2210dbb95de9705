"""For each step of a graph the cheapest function in C that runs just this operator.

A call of an overload (`torch.ops.aten.mm.default`) parses its arguments by the schema; a
binding (`torch.mm`) is compiled for them. Which overload a binding reaches depends on the
arguments, so each is *rehearsed*: called once with tensors without data, under a mode that
hears which operator arrives, with which arguments, and ends the call there. Only a binding
that comes to the very same call is taken.

`x @ w` on a stack of matrices is traced as view, mm, view. Below autograd, where no dispatch
mode listens for single operators, `aten.matmul` runs the same three from C. It is used where a
rehearsal multiplies matrices of the same layouts and makes nothing else but views.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from remat._graph import operators
from remat._graph.meta import TensorMeta, layout_of
from remat._graph.values import Graph, Ref, Value, prune, refs, replace_refs
from remat._torch import isolation, modes, schemas

_aten: Any = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
# The two differ only in what autograd makes of their results.
_SAME_BELOW_AUTOGRAD: dict[Any, Any] = {_VIEWS[1]: _VIEWS[0]}


def bindings_of(graph: Graph) -> dict[int, Callable[..., Any]]:
    """The steps of a graph that have a binding, and which."""
    found: dict[int, Callable[..., Any]] = {}
    with isolation.isolated(), modes.unseen_by_traces():
        for index, value in enumerate(graph.values):
            binding = _binding(graph, value)
            if binding is not None:
                found[index] = binding
    return found


def _binding(graph: Graph, value: Value) -> Callable[..., Any] | None:
    reads = list(refs((value.args, value.kwargs)))
    metas = [graph.values[index].meta for index in reads]
    own: Any = value.op
    if not isinstance(own, schemas.OpOverload) or own.namespace != "aten":
        return None
    if not metas or not all(isinstance(meta, TensorMeta) for meta in metas):
        return None
    stand_ins = dict(zip(reads, map(rehearsal_tensor, metas), strict=True))
    args, kwargs = replace_refs((value.args, value.kwargs), stand_ins.__getitem__)
    wanted = [*operators.arguments(own, tuple(args), dict(kwargs)).items()]
    op: Any = _SAME_BELOW_AUTOGRAD.get(own, own)
    for binding in schemas.bindings(op):
        heard = _rehearse(binding, tuple(args), dict(kwargs))
        if heard is None or heard[0] is not op:
            continue
        if _same_arguments(wanted, [*operators.arguments(*heard).items()]):
            return binding
    return None


def rehearsal_tensor(meta: Any) -> torch.Tensor:
    """A tensor of this metadata without data, with which a binding is rehearsed."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


class _EndOfRehearsalError(Exception):
    """Ends a call before anything is computed."""


_Heard = tuple[Any, tuple[Any, ...], dict[str, Any]]


@final
class _FirstOperator(modes.DispatchMode):
    """Hears the first operator that arrives below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: _Heard | None = None

    def _hear(self, op: Any, args: Any, kwargs: Any) -> Any:
        self.heard = (op, args, kwargs)
        raise _EndOfRehearsalError


# How a rehearsal ends; after the last four nothing is heard of what does not take the arguments.
_ENDS = (_EndOfRehearsalError, TypeError, ValueError, RuntimeError, IndexError)


def _rehearse(
    binding: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Heard | None:
    listener = _FirstOperator()
    with contextlib.suppress(*_ENDS), listener, modes.below_autograd():
        binding(*args, **kwargs)
    return listener.heard


def _same_arguments(first: Any, second: Any) -> bool:
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return len(first) == len(second) and all(map(_same_arguments, first, second))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return first is second
    return type(first) is type(second) and first == second  # pyright: ignore[reportUnknownArgumentType]


def fold_products(graph: Graph) -> Graph:
    """The graph with products of views as one call each; not to be traced or differentiated."""
    num_uses = Counter(use for value in graph.values for use in value.uses)
    num_uses.update(ref.index for ref in graph.outputs if ref is not None)
    values = list(graph.values)
    with isolation.isolated(), modes.unseen_by_traces():
        for index, value in enumerate(graph.values):
            steps = _view_and_product(graph, value)
            # Another reader would need them all the same.
            if steps and all(num_uses[step] == 1 for step in steps):
                view, product = (graph.values[step] for step in steps)
                args = (view.args[0], product.args[1])
                if _is_same(graph, args, product, value):
                    values[index] = dataclasses.replace(
                        value, op=_aten.matmul.default, args=args
                    )
    return prune(dataclasses.replace(graph, values=tuple(values)))


def _view_and_product(graph: Graph, value: Value) -> tuple[int, ...]:
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
    given = [rehearsal_tensor(graph.values[arg.index].meta) for arg in args]
    listener = _Multiplication()
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
class _Multiplication(modes.DispatchMode):
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
