"""For each step of a graph the cheapest function in C that runs just this operator.

A call of an overload (`torch.ops.aten.mm.default`) parses its arguments by the schema; a
binding (`torch.mm`) is compiled for them. Which overload a binding reaches depends on the
arguments, so each is *rehearsed*: called once with tensors without data, under a mode that
hears which operator arrives, with which arguments, and ends the call there. Only a binding
that comes to the very same call is taken.
"""

import contextlib
from collections.abc import Callable
from typing import Any, final

import torch

from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph, Value, refs, replace_refs
from remat._torch import isolation, modes, schemas

_aten: Any = torch.ops.aten
# The two differ only in what autograd makes of their results.
_SAME_BELOW_AUTOGRAD: dict[Any, Any] = {_aten._unsafe_view.default: _aten.view.default}


def bindings_of(graph: Graph) -> dict[int, Callable[..., Any]]:
    """The steps of a graph that have a binding, and which."""
    found: dict[int, Callable[..., Any]] = {}
    with isolation.isolated(), modes.without_torch_function():
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
