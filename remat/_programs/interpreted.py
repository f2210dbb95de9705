"""A graph of small tensors -> one call of torch's own interpreter.

For small tensors the Python code between operators takes as long as the operators do. torch
has an interpreter in C++, TorchScript's, that calls the same operators in the same order and
frees each value after its last use. It turns every error into a RuntimeError. So it is used
only for operators that do not raise whatever the numbers are, and not for large tensors, for
which memory may run out.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph, Value, replace_refs
from remat._torch import runners, schemas

# Beside views, pointwise operators and reductions, which torch tags. Neither indices that may
# lie outside a tensor nor matrices that may be singular are among what these read.
_MORE = (
    "mm addmm bmm baddbmm matmul convolution convolution_backward "
    "native_layer_norm native_layer_norm_backward "
    "native_group_norm native_group_norm_backward "
    "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data "
    "_safe_softmax mse_loss mse_loss_backward cumsum "
    "cat stack constant_pad_nd slice_backward select_backward _unsafe_view _to_copy "
    "tril triu flip roll full zeros ones full_like zeros_like ones_like new_zeros arange "
    "scalar_tensor"
)
_SURE = frozenset(f"aten.{name}" for name in _MORE.split(" "))

# The most bytes of inputs of a small program: up to here, kernels take microseconds.
_MOST_BYTES = 2**20


def overhead_dominates(graph: Graph, *, fewest_steps: int) -> bool:
    """Whether the calls around a program's kernels take longer than the kernels.

    They do if tensors are small, on a CPU, and steps are many, `fewest_steps` at least.
    Then it pays to replace Python, by this interpreter or by a wrapper that a compiler writes
    in C++ (`_programs.compiled`).
    """
    steps = graph.values[graph.num_inputs :]
    if sum(step.op is not operator.getitem for step in steps) < fewest_steps:
        return False
    metas = [value.meta for value in graph.values[: graph.num_inputs]]
    held = [meta for meta in metas if isinstance(meta, TensorMeta)]
    is_near = all(meta.device.type == "cpu" for meta in held)
    return is_near and sum(meta.size_bytes for meta in held) <= _MOST_BYTES


def interpreted_function(graph: Graph) -> Callable[[list[Tensor]], list[Any]] | None:
    """The graph as a function that empties its list; None if the interpreter cannot run it."""
    steps = graph.values[graph.num_inputs :]
    if None in graph.outputs or not all(map(_never_raises, steps)):
        return None
    try:
        return _interpreter_of(graph)
    except LookupError:
        return None


def _never_raises(value: Value) -> bool:
    """Whether the interpreter may run a step: it draws nothing and fails for no numbers."""
    if value.op is operator.getitem:
        return True
    op: Any = value.op
    if not isinstance(op, schemas.OpOverload) or op.namespace != "aten":
        return False
    is_known = (
        operators.short_name(op) in _SURE
        or (operators.returns_view(op) and op is not operators.AS_REAL)
        or torch.Tag.pointwise in op.tags
        or torch.Tag.reduction in op.tags
    )
    return is_known and not operators.draws(value) and not schemas.needs_grad_mode(op)


def _interpreter_of(graph: Graph) -> Callable[[list[Tensor]], list[Any]]:
    steps = runners.Interpreted()
    made = {place: [each] for place, each in enumerate(steps.inputs(graph.num_inputs))}
    for index, value in enumerate(graph.values):
        op: Any = value.op
        if op is None:
            continue
        if op is operator.getitem:
            maker, place = value.args
            made[index] = [made[maker.index][place]]
            continue
        if operators.ends_gradient(value):
            made[index] = made[value.args[0].index]
            continue
        args, kwargs = replace_refs((value.args, value.kwargs), lambda k: made[k][0])
        outputs = steps.call(op, operators.arguments(op, tuple(args), dict(kwargs)))
        if isinstance(value.meta, tuple) and len(outputs) == 1:
            outputs = steps.unpack(outputs[0], len(value.meta))
        made[index] = outputs
    outputs = [made[ref.index][0] for ref in graph.outputs if ref is not None]
    return steps.function(outputs)
