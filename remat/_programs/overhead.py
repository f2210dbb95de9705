"""Whether the calls around a program's kernels take longer than the kernels.

They do if tensors are small and steps are many. Then it pays to replace Python, by torch's
interpreter (`_programs.interpreted`) or by a wrapper that a compiler writes in C++ (`_programs.compiled`).
"""

from __future__ import annotations

import operator

from remat._graph.values import Graph, TensorMeta

# The most bytes of inputs: up to here, kernels take microseconds.
_MOST_BYTES = 2**20


def dominates(graph: Graph, *, fewest_steps: int) -> bool:
    """Whether a program has at least `fewest_steps` steps on small tensors of a CPU."""
    return _num_steps(graph) >= fewest_steps and _has_small_inputs(graph)


def _num_steps(graph: Graph) -> int:
    steps = graph.values[graph.num_inputs :]
    return sum(step.op is not operator.getitem for step in steps)


def _has_small_inputs(graph: Graph) -> bool:
    metas = [value.meta for value in graph.values[: graph.num_inputs]]
    held = [meta for meta in metas if isinstance(meta, TensorMeta)]
    is_near = all(meta.device.type == "cpu" for meta in held)
    return is_near and sum(meta.size_bytes for meta in held) <= _MOST_BYTES
