"""A switch, one of several functions by a number: one value, as a condition is."""

from typing import Any

import pytest
import torch
from torch import Tensor

from remat import policies, remat
from tests.support import assert_bitwise, assert_close, seeded, swept

module: Any = pytest.importorskip(
    "torch._higher_order_ops.switch", reason="torch 2.14 is the first with it"
)
W = seeded(3, seed=5).requires_grad_()

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


@pytest.fixture(autouse=True)
def _without_graphs() -> None:
    torch._dynamo.reset()


def one_of_three(x: Tensor) -> Tensor:
    """Two reach other tensors, what the function has made and one from outside."""
    place, y = (x.sum() > 0) + (x.sum() > 9).long(), x * 2
    branches = (torch.cos, lambda x: x.sin() * W, lambda x: x.exp() + y)
    return module.switch(place, branches, (x,))


def in_python(x: Tensor) -> Tensor:
    """The same, by branches of Python."""
    total = float(x.detach().sum())
    return (
        x.cos() if total <= 0 else x.sin() * W if total <= 9 else x.exp() + x * 2
    ).clone()


@pytest.mark.parametrize("scale", [-1.0, 1.0, 9.0])
def test_values_and_gradients_are_those_of_plain_torch(scale: float) -> None:
    x = (seeded(2, 3).abs() * scale).requires_grad_()
    region = remat(one_of_three)
    for _ in range(2):
        found, expected = region(x), one_of_three(x)
        assert_bitwise(found, expected)
        assert_bitwise(
            torch.autograd.grad(found.square().sum(), (x, W), materialize_grads=True),
            torch.autograd.grad(
                expected.square().sum(), (x, W), materialize_grads=True
            ),
        )
    assert region.programs(x)[0].operators.count("switch") == 1


@pytest.mark.parametrize("scale", [1.0, 9.0, *swept([-1.0])])
def test_a_second_derivative_is_right(scale: float) -> None:
    """Of torch's own it is zero, without a word."""
    x = seeded(2, 3).abs() * scale

    def second(fun: Any) -> Tensor:
        def first(x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: fun(x).sin().sum())(x).sin().sum()

        return torch.func.grad(first)(x)

    once = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(in_python(once).sin().sum(), once, create_graph=True)
    (expected,) = torch.autograd.grad(first.sin().sum(), once)
    assert_close(second(remat(one_of_three)), expected)


@pytest.mark.parametrize(
    ("policy", "count"),
    [(policies.nothing_saveable, 2), (policies.by_op("switch"), 1)],
    ids=["nothing", "switch"],
)
def test_a_policy_saves_it_by_its_name(
    policy: policies.AbstractPolicy, count: int
) -> None:
    """Its derivative is another one."""
    x = seeded(2, 3).requires_grad_()
    region = remat(lambda x: one_of_three(x).sin(), policy=policy)

    assert region.programs(x)[1].operators.count("switch") == count
