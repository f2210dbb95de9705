"""A backward like one before is recognized; any other is looked up, and gives its own bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import remat
from remat._regions import rules
from remat._torch import tensors
from tests.support import Heard, seeded

pytestmark = pytest.mark.contract


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """Of (3, 4) and (4, 5)."""
    return F.gelu(x @ weight)


def operands() -> tuple[Tensor, Tensor]:
    """An input and a weight, both differentiated."""
    return seeded(3, 4).requires_grad_(), seeded(4, 5, seed=1).requires_grad_()


def whole(fun: Callable[..., Tensor], cotangent: Tensor) -> tuple[Tensor, ...]:
    """The gradients of both operands."""
    x, weight = operands()
    return torch.autograd.grad(fun(x, weight), (x, weight), cotangent)


def second(fun: Callable[..., Tensor], cotangent: Tensor) -> tuple[Tensor, ...]:
    """A gradient of a gradient."""
    x, weight = operands()
    (first,) = torch.autograd.grad(fun(x, weight), x, cotangent, create_graph=True)
    return torch.autograd.grad(first.sum(), (x, weight))


def of_frozen(fun: Callable[..., Tensor], cotangent: Tensor) -> tuple[Tensor, ...]:
    """The gradient of one where the other is frozen, which is another forward."""
    x, weight = operands()
    return torch.autograd.grad(fun(x.detach(), weight), weight, cotangent)


def under_bf16(fun: Callable[..., Tensor], cotangent: Tensor) -> tuple[Tensor, ...]:
    """The backward under autocast, the forward without."""
    x, weight = operands()
    out = fun(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        return torch.autograd.grad(out, (x, weight), cotangent)


def heard(fun: Callable[..., Tensor], cotangent: Tensor) -> tuple[Tensor, ...]:
    """Under a dispatch mode."""
    with Heard():
        return whole(fun, cotangent)


def fresh() -> Any:
    """A region that has met no call yet."""
    region = remat(layer)
    region.cache_clear()
    return region


SPREAD = seeded().expand(3, 5)
TURNED = seeded(5, 3, seed=2).T
STEADY = seeded(3, 5, seed=3)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at each backward that is looked up."""
    seen: list[int] = []
    pulled_back = rules.pulled_back

    def counted(ctx: Any, cotangents: Any) -> Any:
        seen.append(1)
        return pulled_back(ctx, cotangents)

    monkeypatch.setattr(rules, "pulled_back", counted)
    return seen


@pytest.mark.parametrize(
    ("gradients", "cotangent"),
    [
        (whole, SPREAD),
        (whole, TURNED),
        (whole, STEADY.clone().requires_grad_()),
        (of_frozen, STEADY),
        (under_bf16, STEADY),
        (second, STEADY),
        (heard, STEADY),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_another_backward_is_looked_up(
    gradients: Callable[..., Any], cotangent: Tensor, lookups: list[int]
) -> None:
    """Other strides, another forward, other switches, a record, or a listener."""
    region = fresh()
    whole(region, STEADY)
    whole(region, STEADY)
    assert len(lookups) == 1

    found = gradients(region, cotangent)

    assert len(lookups) > 1
    for ours, theirs in zip(found, gradients(layer, cotangent), strict=True):
        assert tensors.same_bits(ours, theirs)


def test_backwards_in_turn_are_all_recognized(lookups: list[int]) -> None:
    """As those of a stack are: of its first block, of its last, and of the others."""
    region = fresh()

    for _ in range(5):
        whole(region, STEADY)
        whole(region, SPREAD)
        of_frozen(region, TURNED)

    assert len(lookups) == 3


def test_a_backward_under_a_transform_is_not_one_without() -> None:
    """Of a plain cotangent both look alike: with `create_graph` the gradient is recorded."""
    x, region = seeded(3), remat(lambda x: x.sin().sin())
    for _ in range(2):
        torch.func.vjp(region, x)[1](torch.ones(3))
        torch.func.grad(lambda x: region(x).sum())(x)
    x.requires_grad_()

    (slope,) = torch.autograd.grad(region(x), x, torch.ones(3), create_graph=True)

    assert slope.requires_grad
