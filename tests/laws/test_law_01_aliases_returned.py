"""Law 1, same numbers: what is returned beside another tensor in whose memory it lies."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import remat
from tests.support import assert_bitwise, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]


class Reversed(torch.autograd.Function):
    """The gradient with another sign, as for an adversary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -cotangent


def written_when_detached(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The alias gets a gradient of its own by what is written to it."""
    base = x * 2
    alias = base.detach()
    alias.mul_(w)
    return base, alias


def part_written_when_detached(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    base = x * 2
    alias = base.detach()
    alias[:1].copy_(w[:1])
    return alias, base


def reversed_alias(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    base = x.sin() * w
    return base, Reversed.apply(base), Reversed.apply(base[0])


def reversed_first(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    base = x.sin() * w
    return Reversed.apply(base), base


def reversed_argument(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x, Reversed.apply(x), w * 1


def hooked(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    base = x.sin() * w
    alias = base.view(-1)
    alias.register_hook(lambda cotangent: cotangent * 5)
    return base, alias


def views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    base = x.sin() * w
    return base, base[:1], base.view(-1)


def views_before_a_write(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    base = x * w
    view = base[:1]
    base.mul_(w)
    return base, view


def conjugated(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    value = torch.complex(x, w)
    return value, value.conj(), value.imag


def conjugated_before(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Its cotangent is conjugated lazily."""
    value = torch.complex(x, w)
    return value.mH, value


FUNCTIONS = [
    written_when_detached,
    part_written_when_detached,
    reversed_alias,
    reversed_first,
    reversed_argument,
    hooked,
    views,
    views_before_a_write,
    conjugated,
    conjugated_before,
]


@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("fun", FUNCTIONS)
def test_each_has_its_numbers_and_its_gradients(
    fun: Callable[[Tensor, Tensor], tuple[Tensor, ...]], engine: Any
) -> None:
    """Each output alone, and those that depend on an argument no less."""
    given = [seeded(2, 3, seed=seed).requires_grad_() for seed in range(2)]
    found, expected = remat(fun, engine=engine)(*given), fun(*given)

    assert_bitwise(list(found), list(expected))
    for one, other in zip(found, expected, strict=True):
        gradients = [
            torch.autograd.grad(
                each.abs().sum(), given, allow_unused=True, retain_graph=True
            )
            for each in (one, other)
        ]
        assert_bitwise(*map(list, gradients))
