"""`modules.plan` of blocks that one call of the model calls several times: cells, tied layers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import modules, saved_residuals
from tests.support import LiveBytes, assert_bitwise, seeded

pytestmark = pytest.mark.contract


class Cell(nn.Module):
    """A step of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16).double()
        self.out = nn.Linear(16, 16).double()

    def forward(self, state: Tensor, x: Tensor) -> Tensor:
        return state + torch.tanh(self.out(torch.tanh(self.mix(state + x))))


class Recurrent(nn.Module):
    """Two cells in turn over the rows of its input; the first sees another width at the end."""

    def __init__(self, *, is_uneven: bool = False) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell() for _ in range(2))
        self.is_uneven = is_uneven

    def forward(self, xs: Tensor) -> Tensor:
        state = xs[0] * 0
        for x in xs:
            for cell in self.cells:
                state = cell(state, x)
        if self.is_uneven:
            state = self.cells[0](state[:3], xs[0, :3])
        return state


def made(*, is_uneven: bool = False) -> tuple[Recurrent, Tensor]:
    torch.manual_seed(0)
    return Recurrent(is_uneven=is_uneven), seeded(3, 8, 16)


def step(model: nn.Module, xs: Tensor) -> list[Tensor]:
    for each in model.parameters():
        each.grad = None
    model(xs).square().sum().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("is_uneven", [False, True])
@pytest.mark.parametrize("budget", [0.3, 0.7])
def test_the_budget_is_for_all_calls(budget: float, is_uneven: bool) -> None:
    """What calls hold is planned and measured; the numbers stay."""
    model, xs = made(is_uneven=is_uneven)
    plain = step(copy.deepcopy(model), xs)

    found = modules.plan(model, budget=budget)(xs)

    names = ["cells.0", "cells.1"] * 3 + ["cells.0"] * is_uneven
    assert [row.name for row in found.rows] == names
    assert 0 < found.saved_bytes <= found.budget_bytes
    assert_bitwise(step(model, xs), plain)
    for k, row in enumerate(found.rows):
        rows = 3 if k == 6 else 8
        state = seeded(rows, 16).requires_grad_(k > 0)
        held = saved_residuals(model.cells[k % 2].forward, state, seeded(rows, 16))
        own = [each.size_bytes for each in held if each.op != "input"]
        assert sum(own) == row.plan.saved_bytes


def test_a_step_keeps_to_its_limit() -> None:
    model, xs = made()
    rest: dict[str, Any] = {"step": modules.Step(lambda y: y.square().sum(), 0)}
    high, low = (
        modules.plan(model, budget=size, **rest)(xs).predicted_peak_bytes
        for size in (1.0, 0.01)
    )
    limit = (low + high) // 2

    found = modules.plan(model, peak=limit, **rest)(xs)
    step(model, xs)
    for each in model.parameters():
        each.grad = None
    with LiveBytes() as memory:
        model(xs).square().sum().backward()

    own = sum(each.nbytes for each in (*model.parameters(), xs))
    assert memory.peak + own <= found.predicted_peak_bytes <= limit < high
    assert found.predicted_peak_bytes <= 1.05 * (memory.peak + own)


def test_gradients_of_shared_weights_are_counted_once() -> None:
    """In the row of the last call, which makes them first."""
    model, xs = made()

    found = modules.plan(model, budget=0.5)(xs)

    size = sum(each.nbytes for each in model.cells[0].parameters())
    assert [row.gradient_bytes for row in found.rows] == [0, 0, 0, 0, size, size]
