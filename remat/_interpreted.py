"""A graph of small tensors -> one call of torch's own interpreter.

Where tensors are small, the Python between operators takes as long as the operators do.
torch has an interpreter in C++, TorchScript's, that calls the same operators in the same
order. It holds its arguments until it returns, and it renames errors: so it runs only what
takes small arguments, and what fails there runs again in Python, which says what failed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remat import _compat, _operators as operators
from remat._graph import Graph, TensorMeta, Value, replace_refs

# What a program may hold longer than it needs. Its kernels take microseconds up to here.
_MOST_BYTES = 2**20

# The functions that `_composites` puts into a graph.
_OVERLOADS: dict[Any, Any] = {
    torch.matmul: torch.ops.aten.matmul.default,
    F.linear: torch.ops.aten.linear.default,
    Tensor.view: torch.ops.aten.view.default,
}

_Function = Callable[[list[Tensor]], list[Any]]


def function_of(graph: Graph, in_python: _Function) -> _Function | None:
    """The graph as a function that empties its list, or None if it is not for here.

    Args:
        graph: what to run.
        in_python: the same in Python, for when an operator fails.
    """
    steps = graph.values[graph.num_inputs :]
    if not _has_small_inputs(graph) or not all(map(_is_plain, steps)):
        return None
    try:
        run, constants = _written(graph)
    except LookupError:
        return None
    holes = tuple(place for place, ref in enumerate(graph.outputs) if ref is None)

    def interpreted(given: list[Tensor]) -> list[Any]:
        try:
            outputs = run(*given, *constants)
        except RuntimeError:
            return in_python(given)
        given.clear()
        for place in holes:
            outputs.insert(place, None)  # pyright: ignore[reportArgumentType]
        return outputs

    return interpreted


def _has_small_inputs(graph: Graph) -> bool:
    metas = [value.meta for value in graph.values[: graph.num_inputs]]
    held = [meta for meta in metas if isinstance(meta, TensorMeta)]
    is_near = all(meta.device.type == "cpu" for meta in held)
    return is_near and sum(meta.size_bytes for meta in held) <= _MOST_BYTES


def _is_plain(value: Value) -> bool:
    """Whether a step is an operator that neither draws, nor matters for its error alone."""
    if value.op in (operator.getitem, operators.constant):
        return True
    op: Any = _OVERLOADS.get(value.op, value.op)
    return (
        isinstance(op, _compat.OpOverload)
        and op.namespace == "aten"
        and not operators.draws(value)
        and not operators.is_check(op)
        and not _compat.needs_grad_mode(op)
    )


def _written(graph: Graph) -> tuple[Callable[..., list[Any]], list[Tensor]]:
    """The interpreter's function, and the constants that it takes after the inputs."""
    steps = _compat.Interpreted()
    made = {index: [steps.input()] for index in range(graph.num_inputs)}
    constants: list[Tensor] = []
    for index, value in enumerate(graph.values[graph.num_inputs :], graph.num_inputs):
        if value.op is operators.constant:
            made[index] = [steps.input()]
            constants.append(value.args[0])
        elif value.op is operator.getitem:
            maker, place = value.args
            made[index] = [made[maker.index][place]]
        else:
            made[index] = _call(steps, value, made)
    return steps.function(
        [made[ref.index][0] for ref in graph.outputs if ref]
    ), constants


def _call(
    steps: _compat.Interpreted, value: Value, made: dict[int, list[Any]]
) -> list[Any]:
    op: Any = _OVERLOADS.get(value.op, value.op)
    args, kwargs = replace_refs(
        (value.args, value.kwargs), lambda index: made[index][0]
    )
    outputs = steps.call(op, operators.arguments(op, tuple(args), dict(kwargs)))
    if isinstance(value.meta, tuple) and len(outputs) == 1:
        return steps.unpack(outputs[0], len(value.meta))
    return outputs
