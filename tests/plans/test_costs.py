"""`costs="measured"`: what is recomputed is what takes least time, wherever a budget is given."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import PolicyError, fit, modules, plan, policies, remat, storage
from remat._graph.meta import TensorMeta
from remat._graph.values import Ref, Value
from remat._partition import costs
from remat._plans.plan import Planner
from remat._plans.shares import Shares
from tests.support import seeded

ONE = 8 * 8 * 8  # bytes of each value


@pytest.fixture
def _slow_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose tanh takes longer than its products."""

    def times(value: Value, _: Sequence[Value]) -> int:
        return 10**6 if value.op is torch.ops.aten.tanh.default else 10

    monkeypatch.setattr(costs, "_time_ns", times)
    monkeypatch.setattr(costs, "_times_ns", {})


def block(x: Tensor, w: Tensor) -> Tensor:
    """Its backward reads a product and a tanh, of which one fits."""
    return torch.cos(x @ w) + torch.cos(torch.tanh(w))


def saved(region: Any, *args: Any) -> list[str]:
    rows = region.saved_residuals(*args)
    return [each.op for each in rows if "argument" not in each.reason]


def leaves() -> tuple[Tensor, Tensor]:
    return seeded(8, 8), seeded(8, 8, seed=1).requires_grad_()


@pytest.mark.usefixtures("_slow_tanh")
@pytest.mark.parametrize("by", ["flops", "measured"])
def test_a_region_decides_as_its_plan_does(by: str) -> None:
    policy = policies.budget(ONE, costs=by)
    found = plan(block, budget=policy)(*leaves())

    kept = [row.op for row in found.rows if row.storage is not None]
    assert kept == (["aten.tanh"] if by == "measured" else ["aten.mm"])
    assert saved(remat(block, policy=policy), *leaves()) == kept
    assert saved(remat(block, policy=found.policy), *leaves()) == kept
    assert found.costs == by
    assert plan(block, budget=ONE, costs=by)(*leaves()) == found


@pytest.mark.usefixtures("_slow_tanh")
@pytest.mark.parametrize("by", ["flops", "measured"])
def test_fit_chooses_by_costs(by: str) -> None:
    regions = [remat(block) for _ in range(4)]

    def step(w: Tensor, x: Tensor) -> Tensor:
        for region in regions:
            x = region(x, w)
        return x.sum()

    x, w = leaves()
    most = fit(step, peak=2**30)(w, x).predicted_peak_bytes
    found = fit(step, peak=most - ONE, costs=by)(w, x)
    found.apply()

    plans = [each for row in found.rows for each in row.plans]
    kept = [[r.op for r in each.rows if r.storage is not None] for each in plans]
    assert [saved(region, x, w) for region in regions] == kept
    assert {each.costs for each in plans} == {by}
    first = "aten.tanh" if by == "measured" else "aten.mm"
    assert [first] in kept


@pytest.mark.usefixtures("_slow_tanh")
def test_modules_are_planned_by_times() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(seeded(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return block(x, self.w)

    model = nn.Sequential(Block(), Block())
    for by in ("flops", "measured"):
        found = modules.plan(model, budget=2 * ONE, costs=by)(seeded(8, 8))
        kept = {r.op for row in found.rows for r in row.plan.rows if r.storage}
        assert kept == ({"aten.tanh"} if by == "measured" else {"aten.mm"})


def test_equal_operators_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process: so a region repeats what its plan chose."""
    timed: list[object] = []

    def times(value: Value, _: Sequence[Value]) -> int:
        timed.append(value.op)
        return 10

    monkeypatch.setattr(costs, "_time_ns", times)
    monkeypatch.setattr(costs, "_times_ns", {})
    for _ in range(2):
        plan(block, budget=ONE, costs="measured")(*leaves())
    remat(block, policy=policies.budget(ONE, costs="measured"))(*leaves())

    assert len(timed) == len({*timed}) > 0


@pytest.mark.parametrize(
    ("name", "made"),
    {
        "budget": lambda: policies.budget(1, costs="guessed"),
        "fit": lambda: fit(block, peak=1, costs="guessed"),
        "modules.plan": lambda: modules.plan(nn.Linear(1, 1), peak=1, costs="guessed"),
    }.items(),
)
def test_other_costs_are_refused(name: str, made: Callable[[], object]) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name}\(costs='guessed'\): is not a value"
    ):
        made()


def test_a_region_without_numbers_is_not_timed() -> None:
    region = remat(block, policy=policies.budget(ONE, costs="measured"))

    with pytest.raises(PolicyError, match="without data, on the meta device"):
        region(*(each.to("meta") for each in leaves()))


def test_a_dtensor_is_measured_as_the_part_of_this_rank() -> None:
    """Without a word to the others, who may not plan."""
    part = TensorMeta.of(seeded(4))
    spread = Value(None, meta=dataclasses.replace(part, placement=object()))
    step = Value(torch.ops.aten.neg.default, (Ref(0),), meta=part)

    assert costs._time_ns(step, [spread]) > 0
    assert costs._workspace_bytes(step, [spread]) == 0


def test_it_prints_what_makes_it() -> None:
    policy = policies.budget(512, costs="measured")

    assert repr(policy) == "budget(512, costs='measured')"
    assert policy != policies.budget(512)


def test_equal_programs_on_other_devices_are_planned_apart() -> None:
    """What waits on the CPU already is kept there; elsewhere it is moved, which costs."""
    allow = policies.everything_saveable.stored(storage.Offload(pin=False))
    policy: Any = policies.budget(2**20, allow)
    planners = [
        Planner(
            remat(block),
            tuple(each.detach().to(home).requires_grad_() for each in leaves()),
            {},
            policy,
        )
        for home in ("cpu", "meta")
    ]

    apart = [Shares([each]).whole[0].recompute_cost for each in planners]
    together = [each.recompute_cost for each in Shares(planners).whole]

    assert together == apart
    assert apart[0] != apart[1]
