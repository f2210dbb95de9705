"""Law 1, same numbers: one tensor as several arguments, which a function may ask about.

"Without lossy storage, the outputs of one call, and the contributions it makes to
gradients given its cotangents, are bitwise those of `fun` under `.backward()` on a CPU."
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import modules, remat
from tests.laws.derivatives import step
from tests.support import assert_bitwise, grads, seeded, swept

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


class _Projected(nn.Module):
    """Attention of a tensor with itself, as a module that a model calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, value=x, need_weights=False)[0]


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_tensor_that_is_given_twice_is_one_tensor(engine: Any) -> None:
    """Attention projects at once where `query is key`, and so does the region."""
    torch.manual_seed(1)
    plain = _Projected()
    other = modules.apply(copy.deepcopy(plain), "attention", engine=engine)
    x = torch.randn(2, 5, 8)

    for _ in range(2):
        assert_bitwise(step(other, other, x), step(plain, plain, x))


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_which_arguments_are_the_same_is_seen_at_each_call(engine: Any) -> None:
    """Another pattern is another signature, also where calls are recognized in C."""

    def fun(tree: dict[str, Tensor], y: Tensor, z: Tensor) -> Tensor:
        scale = 2.0 if z is y else 3.0 if tree["a"] is z else 5.0
        return tree["a"].sin() * y.cos() + scale * z.exp() * y

    region = remat(fun, engine=engine)
    a, b = (seeded(3, seed=k).requires_grad_() for k in (0, 1))
    calls = [({"a": a}, a, a), ({"a": a}, b, b), ({"a": a}, b, a), ({"a": b}, b, a)]

    for args in calls * 3:
        found, right = region(*args), fun(*args)
        assert_bitwise([found, *_pulled(found, a, b)], [right, *_pulled(right, a, b)])


def _pulled(out: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(out.sum(), inputs, allow_unused=True)


def attention(**options: Any) -> Callable[..., Tensor]:
    """Asks whether query, key and value are one tensor, and computes accordingly."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    return lambda q, k, v: module(q, k, v, **options)[0]


SHARED: dict[str, Callable[..., Tensor]] = {
    "attention": attention(),
    "attention_without_weights": attention(need_weights=False),
    "branch": lambda a, b, c: (a.sin() if a is b else a.cos()) * (c + (b is c)).sin(),
}


@pytest.mark.contract
@pytest.mark.parametrize(
    "name", ["attention", "branch", *swept(["attention_without_weights"])]
)
def test_a_tensor_that_is_given_twice_is_one(name: str) -> None:
    """In this call and in no other; recognized calls keep them apart too."""
    plain, region = SHARED[name], remat(SHARED[name])
    x, y = seeded(2, 3, 8), seeded(2, 3, 8, seed=1)

    def both(fun: Callable[..., Tensor]) -> list[Any]:
        calls: list[Callable[[Tensor, Tensor], Tensor]] = [
            lambda x, _: fun(x, x, x),
            lambda x, y: fun(x, y, y),
            lambda x, y: fun(x, y, x),
            lambda x, y: fun(x, y, y.clone()),
        ]
        return [grads(call, (x, y)) for call in calls * 2]

    assert_bitwise(both(region), both(plain))


@pytest.mark.contract
def test_a_tensor_that_is_given_twice_is_held_once() -> None:
    """Under the name that it has first."""
    x = seeded(3).requires_grad_()
    region: Any = remat(lambda a, b: (a * b).sin().sin())

    assert [row.path for row in region.saved_residuals(x, x)] == ["a"]
    assert [row.path for row in region.saved_residuals(x, x * 1)] == ["a", "b"]
