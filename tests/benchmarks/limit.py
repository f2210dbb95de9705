"""The limit of a row: the step without remat, and once more what must be recomputed.

What must be recomputed is one straight-line program without gradients for each unit. What
must be held are the values at which the walk back from the gradients stops.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from remat import Residual, remat
from remat._graph.meta import TensorMeta
from remat._graph.values import Ref, prune
from remat._programs.program import Program
from tests.benchmarks.contenders import POLICIES
from tests.benchmarks.memory import allocated
from tests.benchmarks.work import Params, Work


def recomputation(work: Work, keeps: str) -> Callable[[], None]:
    """The operators that the backward of a policy runs again, for all units, and no more."""
    alone = recomputed(_program(work, keeps))
    inputs = _inputs(alone)
    if work.transform == "hvp":
        run: Callable[[], object] = lambda: torch.func.jvp(  # noqa: E731
            lambda *args: tuple(alone.consume_with_gradient([*args])),
            tuple(inputs),
            tuple(inputs),
        )
    else:
        run = lambda: alone(inputs)  # noqa: E731

    def again() -> None:
        for _ in range(work.num_units):
            run()

    return again


def forward_alone(work: Work) -> Callable[[], object]:
    """A unit's forward as one straight-line program without gradients."""
    x = work.unit_input.detach().clone().requires_grad_()
    program = remat(work.unit).programs(work.params[0], x)[0]
    inputs = _inputs(program)
    return lambda: program(inputs)


def _program(work: Work, keeps: str) -> Program:
    """The backward program of a unit, on the batch where the step maps over examples."""
    unit = work.unit
    if work.transform == "per example":
        unit = torch.func.vmap(unit, in_dims=(None, 0))
    x = work.unit_input.detach().clone().requires_grad_()
    params = {
        name: tensor.detach().requires_grad_()
        for name, tensor in work.params[0].items()
    }
    return remat(unit, policy=POLICIES[keeps]).programs(params, x)[1]


def recomputed(backward: Program) -> Program:
    """What a backward program computes once more, for the steps of its own to read."""
    graph = backward.graph
    own = [value for value in graph.values if value.op and not value.is_repeat]
    read = {use for value in own for use in value.uses}
    again = sorted(index for index in read if graph.values[index].is_repeat)
    outputs = tuple(Ref(index) for index in again)
    return Program(prune(replace(graph, outputs=outputs)), "recomputation")


def _inputs(program: Program) -> list[Tensor]:
    graph = program.graph
    metas = [value.meta for value in graph.values[: graph.num_inputs]]
    return [_drawn(meta) for meta in metas if isinstance(meta, TensorMeta)]


def _drawn(meta: TensorMeta) -> Tensor:
    empty = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
    return empty.normal_() if meta.dtype.is_floating_point else empty.zero_()


def held_bytes(work: Work, keeps: str) -> int:
    """What must be held between a forward and its backward, parameters and batch aside."""
    residuals = read(work, keeps)
    of_unit = sum(each.size_bytes for each in residuals)
    around = allocated(lambda: work.forward(_nothing_done)).left
    is_batch = work.unit_input is work.x and any(r.path == "x" for r in residuals)
    outside = work.x.nbytes if is_batch else 0
    return work.num_units * of_unit - outside + around


def read(work: Work, keeps: str) -> list[Residual]:
    """What the backward of a unit reads, its parameters aside."""
    region: Any = remat(work.unit, policy=POLICIES[keeps])
    x = work.unit_input.detach().clone().requires_grad_()
    found = region.saved_residuals(work.params[0], x)
    return [each for each in found if not each.path.startswith("p.")]


def _nothing_done(_: Params, x: Tensor) -> Tensor:
    return x
