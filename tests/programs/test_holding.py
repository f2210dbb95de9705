"""Backward programs as a compiler takes them: what is recomputed waits for a cotangent."""

from typing import Any

import pytest
import torch
from torch import Tensor

from remat import policies, remat
from remat._programs.barriers import HOLD, with_barriers
from remat._programs.program import Program
from tests.support import assert_bitwise, seeded

pytestmark = pytest.mark.contract


def programs(region: Any, *args: Tensor) -> tuple[Program, Program, Program]:
    """Forward, backward, and the backward for a compiler."""
    forward, backward = region.programs(*args)
    held = with_barriers(backward.graph, backward.num_saved, backward.num_cotangents)
    return forward, backward, Program(held, "held")


def mlp(w: Tensor, x: Tensor) -> Tensor:
    """Two layers, of which the first reads nothing but inputs."""
    return torch.sin(torch.tanh(x @ w).exp() @ w.t())


def block(x: Tensor) -> Tensor:
    """What a region calls twice."""
    return x.sin().exp().sin()


@pytest.mark.parametrize(
    "policy", [policies.nothing_saveable, policies.save_matmul_outputs]
)
def test_numbers_stay(policy: Any) -> None:
    """To the last bit: a copy is a copy."""
    w, x = (seeded(4, 4, seed=k).requires_grad_() for k in range(2))
    forward, backward, held = programs(remat(mlp, policy=policy), w, x)
    _, *saved = forward([w, x])
    inputs = [*saved, w, x, seeded(4, 4, seed=3)]

    assert_bitwise(held(inputs), backward(inputs))


def test_one_copy_of_the_smallest_input() -> None:
    """The step that reads only what was left is the one that must wait."""
    w, x = seeded(4, 4).requires_grad_(), seeded(9, 4).requires_grad_()
    _, backward, held = programs(remat(mlp), w, x)

    copies = [value for value in held.graph.values if value.op is HOLD]

    assert [value.meta.shape for value in copies] == [(4, 4)]  # type: ignore[union-attr]
    assert len(held.operators) == len(backward.operators) + 1


def test_no_step_can_be_merged_with_the_forward() -> None:
    """Each step that makes memory depends on a cotangent."""
    region = remat(lambda x: remat(block)(remat(block)(x)))
    _, backward, held = programs(region, seeded(3).requires_grad_())
    graph = held.graph
    late = set(range(graph.num_inputs - backward.num_cotangents, graph.num_inputs))

    for index in range(graph.num_inputs, len(graph.values)):
        assert not late.isdisjoint(graph.values[index].uses), graph
        late.add(index)


def test_what_is_recomputed_twice_is_never_merged() -> None:
    """A region inside recomputes anew in the recomputation of the one around it."""
    region = remat(lambda x: remat(block)(remat(block)(x)))
    _, _, held = programs(region, seeded(3).requires_grad_())
    steps = [(v.op, v.args, v.kwargs) for v in held.graph.values if v.is_repeat]

    assert len({repr(step) for step in steps}) == len(steps)


LAYOUTS = {
    "dense": seeded(3, 4),
    "transposed": seeded(3, 4).t(),
    "expanded": seeded(3, 1).expand(3, 4),
    "with gaps": seeded(3, 8)[:, ::2],
    "empty": seeded(0, 4),
    "empty and expanded": seeded(1, 4).expand(0, 4),
    "a number": seeded(),
}


@pytest.mark.parametrize("value", LAYOUTS.values(), ids=LAYOUTS)
def test_a_copy_has_the_strides_of_what_it_copies(value: Tensor) -> None:
    """Kernels and views go by them."""
    copy = HOLD(value, seeded(2))

    assert copy.stride() == value.stride()
    assert copy.untyped_storage().data_ptr() != value.untyped_storage().data_ptr() or (
        value.numel() == 0
    )
    assert_bitwise(copy.clone(), value.clone())
