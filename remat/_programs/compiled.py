"""A graph -> a compiled function: `backend="inductor"`.

Inductor gets the graph as it stands, without Dynamo: what the graph rests on is checked at
each call already. It fuses and reorders, so that numbers agree to rounding and not to the bit.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from remat._graph import operators
from remat._graph.meta import TensorMeta, copied_as_it_lies
from remat._graph.values import Graph, replace_refs
from remat._programs.interpreted import overhead_dominates
from remat._torch import levels, runners, schemas, tracer
from remat._torch.taking_functions import Applied
from remat._torch.tensors import is_without_memory

# What fewer steps save is not worth the seconds that a wrapper in C++ takes to compile.
_FOR_CPP = 16


def can_compile(graph: Graph) -> bool:
    """Whether a compiler may run a graph: it has data, and no effect but its outputs."""
    return not any(
        (isinstance(value.meta, TensorMeta) and value.meta.device.type == "meta")
        or isinstance(value.op, Applied)
        or operators.draws(value)
        or operators.is_check(value.op)
        or operators.is_rng_state(value.op)
        or schemas.needs_grad_mode(value.op)
        for value in graph.values
    )


def compiled_function(graph: Graph) -> Callable[[list[Tensor]], list[Any]]:
    """The graph as a function that empties its list, compiled when it is first run."""
    compiled: list[Callable[..., list[Any]]] = []

    def run(inputs: list[Tensor]) -> list[Any]:
        inputs[:] = map(_as_they_lie, inputs)
        if not compiled:
            is_small = overhead_dominates(graph, fewest_steps=_FOR_CPP)
            # Inductor's own state is shared by all threads.
            with (
                tracer.one_trace_at_a_time(),
                levels.leave_functorch(),
                torch.no_grad(),
            ):
                like = [tensor.detach() for tensor in inputs]
                made = runners.inductor(fx_module(graph), like, wrapper_in_cpp=is_small)
            compiled.append(made)
        return list(compiled[0](inputs))

    return run


def _as_they_lie(tensor: Tensor) -> Tensor:
    """A tensor whose numbers are those in memory, as compiled kernels take them to be.

    Itself but for a lazy conjugate or negative and for zeros without memory, which are copied.
    """
    is_other = tensor.is_conj() or tensor.is_neg() or is_without_memory(tensor)
    return copied_as_it_lies(tensor) if is_other else tensor


def fx_module(graph: Graph) -> fx.GraphModule:
    """The steps of a graph in torch.fx, for the compiler."""
    made, constants = fx.Graph(), torch.nn.Module()
    env: dict[int, fx.Node] = {}
    for index, value in enumerate(graph.values):
        if value.op is None:
            env[index] = made.placeholder(f"v{index}")
        elif value.op is operators.constant:
            constants.register_buffer(f"c{index}", value.args[0])
            env[index] = made.get_attr(f"c{index}")
        elif value.op is operator.getitem:
            maker, place = value.args
            env[index] = made.call_function(value.op, (env[maker.index], place))
        else:
            args, kwargs = replace_refs((value.args, value.kwargs), env.__getitem__)
            op = value.op
            if operators.short_name(op) == "aten._efficientzerotensor":
                # Zeros without memory get some, which a compiled kernel would read.
                op = torch.ops.aten.zeros.default
            env[index] = made.call_function(op, tuple(args), dict(kwargs))
    made.output([None if ref is None else env[ref.index] for ref in graph.outputs])
    return fx.GraphModule(constants, made)
