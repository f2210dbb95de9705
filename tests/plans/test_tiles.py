"""Plans for a step: functions that run tile by tile get more tiles where its limit wants them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import BudgetError, Fit, fit, modules, remat
from remat.layers import Tiled, tiled
from tests.support import LiveBytes, assert_close, seeded

pytestmark = pytest.mark.filterwarnings("ignore:(?s).*traced for a tenth time")

PATTERN = "(tile n) d, ... -> (tile n) d"
ARGS = seeded(16, 64), seeded(64) / 8, seeded(4, 16)
LOW, MIDDLE, HIGH = 100_000, 135_000, 300_000
"""Below the peaks of the step in one tile, and of some of its plans, and above all."""


def plain_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.tanh(x.unsqueeze(-1) * up) @ down


def plain_narrow(x: Tensor, up: Tensor) -> Tensor:
    return x * up[0, 0]


def made(mlp: Any, narrow: Any = plain_narrow) -> Callable[..., Tensor]:
    """A step whose region calls both."""
    block = remat(lambda x, up, down: x + mlp(x, up, down) + narrow(x, up))

    def step(up: Tensor, down: Tensor, x: Tensor) -> Tensor:
        for _ in range(2):
            x = block(x, up, down)
        return x.square().sum()

    return step


def planned(step: Any, peak: float | str) -> Fit:
    return fit(lambda params, x: step(*params, x), peak=peak)(ARGS[:2], ARGS[2])


def peak_of(step: Any) -> int:
    """The most that lives in a step, its arguments included."""
    leaves = [each.clone().requires_grad_() for each in ARGS[:2]]

    def run() -> None:
        step(*leaves, ARGS[2]).backward()
        for each in leaves:
            each.grad = None

    run()
    with LiveBytes() as memory:
        run()
    return memory.peak + sum(each.nbytes for each in ARGS)


def gradients(step: Any) -> Any:
    return torch.func.grad(step, (0, 1))(*ARGS)


def test_a_step_that_fits_in_no_other_way_takes_more_tiles() -> None:
    """Applied, it takes what was predicted, and nothing changes before."""
    mlp = tiled(plain_mlp, PATTERN, tiles=1)
    step = made(mlp)
    found = planned(step, LOW)

    assert mlp.tiles == 1
    (row,) = found.tiles
    assert (row.name, row.before) == ("plain_mlp", 1)
    assert f"plain_mlp: {row.tiles} tiles instead of 1" in str(found).splitlines()

    found.apply()
    assert mlp.tiles == row.tiles > 1
    assert peak_of(step) <= found.predicted_peak_bytes <= LOW
    for each, expected in zip(gradients(step), gradients(made(plain_mlp)), strict=True):
        assert_close(each, expected)


def test_a_part_is_of_the_peak_in_the_tiles_that_there_are() -> None:
    """More of them lower the peak without remat, but not the limit."""
    step = made(tiled(plain_mlp, PATTERN, tiles=1))
    whole = planned(step, "1GiB").predicted_peak_bytes

    part = LOW / whole

    found = planned(step, part)

    assert found.tiles
    assert str(found) == str(planned(step, int(part * whole)))


def test_they_also_let_less_be_recomputed() -> None:
    whole = planned(made(tiled(plain_mlp, PATTERN, tiles="1GiB")), MIDDLE)
    cut = planned(made(tiled(plain_mlp, PATTERN, tiles=1)), MIDDLE)

    def recomputed(found: Fit) -> int:
        return sum(each.recompute_cost for each in found.rows[0].plans)

    assert whole.tiles == ()
    assert cut.tiles
    assert recomputed(cut) < recomputed(whole)


def test_where_all_is_saved_the_number_stays() -> None:
    assert planned(made(tiled(plain_mlp, PATTERN, tiles=3)), HIGH).tiles == ()


def test_only_what_helps_takes_more() -> None:
    mlp = tiled(plain_mlp, PATTERN, tiles=1)
    narrow = tiled(plain_narrow, PATTERN, tiles=1)
    found = planned(made(mlp, narrow), LOW)
    assert [each.name for each in found.tiles] == ["plain_mlp"]


@pytest.mark.parametrize("is_inside", [True, False], ids=["made in the step", "a size"])
def test_what_stays_as_it_was_given(is_inside: bool) -> None:
    def mlp(*args: Tensor) -> Tensor:
        return tiled(plain_mlp, PATTERN, tiles=1)(*args)

    sized = tiled(plain_mlp, PATTERN, tiles="1GiB")
    with pytest.raises(BudgetError, match="no plan that was tried"):
        planned(made(mlp if is_inside else sized), LOW)


def test_what_cannot_be_cut_stays_whole() -> None:
    """In one tile, nothing of it is wrong."""

    def mixing(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return plain_mlp(x, up, down).cumsum(0)

    mlp = tiled(mixing, PATTERN, tiles=1)
    found = planned(made(mlp), MIDDLE)
    assert found.tiles == ()
    assert found.predicted_peak_bytes <= MIDDLE


def test_where_nothing_fits_nothing_changes() -> None:
    """The peak that would fit is that of more tiles."""
    mlp = tiled(plain_mlp, PATTERN, tiles=1)
    with pytest.raises(BudgetError, match="Pass peak=") as refused:
        planned(made(mlp), 1)
    assert mlp.tiles == 1

    least = int(str(refused.value).partition("Pass peak=")[2].partition(".")[0])
    assert planned(made(mlp), least).predicted_peak_bytes == least


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = map(nn.Parameter, ARGS[:2])

    def residual(self, x: Tensor) -> Tensor:
        return x + plain_mlp(x, self.up, self.down)


class OfMethods(Layer):
    """Layers whose method is tiled in the class."""

    @tiled(PATTERN, tiles=1)
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.residual(x)


class Holding(Layer):
    """Layers that hold a tiled function each."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = tiled(self.residual, PATTERN, tiles=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x)


@pytest.mark.parametrize(
    ("kind", "step", "name"),
    [
        (OfMethods, modules.Step(lambda y: y.square().sum()), "OfMethods.forward"),
        pytest.param(Holding, None, "Layer.residual", marks=pytest.mark.sweep),
    ],
    ids=["methods, of a step", "attributes, of blocks"],
)
def test_a_plan_of_a_model_gives_them_to_its_functions(
    kind: type[nn.Module], step: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, as it gives policies; those of equal blocks are one row."""
    monkeypatch.setattr(OfMethods.forward, "tiles", 1)
    model = nn.Sequential(kind(), kind())
    found = modules.plan(model, peak=LOW, step=step)(ARGS[2])

    (row,) = found.tiles
    functions = [
        getattr(kind, "forward", None),
        *(vars(each).get("cut") for each in model),
    ]
    assert (row.name, row.before) == (name, 1)
    assert {each.tiles for each in functions if isinstance(each, Tiled)} == {row.tiles}
    assert str(row) in str(found).splitlines()
    assert found.predicted_peak_bytes <= LOW


def test_a_budget_of_bytes_alone_changes_no_tiles() -> None:
    chosen = modules.plan(nn.Sequential(Holding()), budget=0.2, where="0")(ARGS[2])
    assert chosen.tiles == ()
