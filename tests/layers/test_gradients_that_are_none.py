"""Gradients that plain autograd does not make: None under every schedule, not zeros.

"No lost gradient" has a converse: an optimizer steps by zeros (weight decay, momentum), and
not by None.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import chain, scan, schedules
from tests.support import assert_close, seeded

pytestmark = pytest.mark.contract
LENGTH = 5
SCHEDULES = {
    "none": None,
    "every": schedules.Every(2),
    "sqrt": schedules.Sqrt(),
    "revolve": schedules.Revolve(2),
}
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def leaves(count: int, *shape: int) -> list[Tensor]:
    return [seeded(*shape, seed=k).requires_grad_() for k in range(count)]


def looped(step: Callable[..., Any], init: Any, xs: Tensor) -> Any:
    """What a scan computes."""
    carry, rows = init, []
    for x in xs:
        carry, row = step(carry, x)
        rows.append(row)
    return carry, torch.stack(rows)


def of_scan(run: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Three outputs, each of which rests on some of the inputs, and one of none of the last."""
    w, v, unused, first, second = leaves(5, 3)
    xs = seeded(LENGTH, 3, seed=9).requires_grad_()

    def step(carry: Any, x: Tensor) -> Any:
        a, b = carry
        return ((a * w).sin(), b + a.detach()), (b * x).sin() * v + 0 * unused.detach()

    (a, b), rows = run(step, (first, second), xs)
    return [a, b, rows], [w, v, unused, first, second, xs]


def stages(w: Tensor, v: Tensor, u: Tensor) -> list[Callable[..., Any]]:
    """The second cuts one path, the third swaps, the fourth sends one value to both."""
    return [
        lambda t: (t[0] * w, t[1] * v),
        lambda t: (t[0].sin(), t[1].detach() * 2 + t[0]),
        lambda t: (t[1] * u, t[0].cos()),
        lambda t: (t[0].cos(), t[1].round() * 1.5),
    ]


def of_chain(run: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
    inputs = leaves(5, 3)
    *weights, x, y = inputs
    return [*run(stages(*weights), (x, y))], inputs


def in_turn(fs: Any, x: Any) -> Any:
    """What a chain computes."""
    for f in fs:
        x = f(x)
    return x


@each_schedule
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)], ids=str)
def test_of_a_scan(used: tuple[int, ...], schedule: Any) -> None:
    """The same gradients are None as in a loop, and the others are equal."""

    def run(step: Any, init: Any, xs: Tensor) -> Any:
        return scan(step, init, xs, schedule=schedule)

    assert_close(gradients(of_scan(run), used), gradients(of_scan(looped), used))


@each_schedule
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_of_a_chain(used: tuple[int, ...], schedule: Any) -> None:
    """The same for stages that are unlike."""

    def run(fs: Any, x: Any) -> Any:
        return chain(fs, schedule=schedule)(x)

    assert_close(gradients(of_chain(run), used), gradients(of_chain(in_turn), used))


def gradients(
    traced: tuple[list[Tensor], list[Tensor]], used: tuple[int, ...]
) -> list[Tensor | None]:
    """By the outputs that are used alone."""
    outputs, inputs = traced
    loss = sum((outputs[place].square().sum() for place in used), torch.zeros(()))
    return [*torch.autograd.grad(loss, inputs, allow_unused=True)]
