"""What kernels hold inside is part of a predicted peak where costs are measured."""

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile

from remat import PolicyError, fit, modules, plan, policies, remat
from remat._partition import costs
from tests.benchmarks.memory import allocated
from tests.support import seeded

IMAGES = seeded(2, 16, 24, 24).float()


def convolved(kind: str) -> tuple[Callable[..., Tensor], Tensor]:
    """A convolution that oneDNN lays out anew inside, and its weight."""
    options: dict[str, Any] = {
        "plain": {"padding": 1},
        "strided": {"stride": 2},
        "dilated": {"dilation": 2},
        "grouped": {"groups": 4},
    }[kind]
    weight = seeded(32, 16 // options.get("groups", 1), 3, 3).float()
    return lambda w, x: F.conv2d(x, w, **options).relu(), weight.requires_grad_()


@pytest.mark.parametrize("kind", ["plain", "strided", "dilated", "grouped"])
def test_the_peak_is_what_the_allocator_gives(kind: str) -> None:
    function, weight = convolved(kind)
    found = plan(function, budget=2**30, costs="measured")(weight, IMAGES)
    region = remat(function, policy=found.policy)

    def step() -> object:
        # The region's output lives as long as the step, as it is predicted to.
        output = region(weight, IMAGES)
        return output, torch.autograd.grad(output, weight, output.detach())

    step()
    assert found.predicted_peak_bytes == allocated(step).peak


@pytest.mark.parametrize("by", ["flops", "measured"])
def test_kernels_run_where_costs_are_measured(
    monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    function, weight = convolved("plain")
    most_allocated = Mock(return_value=0)
    monkeypatch.setattr(costs, "_workspaces", {})
    monkeypatch.setattr("remat._torch.allocator.most_allocated", most_allocated)

    plan(function, budget=2**30, costs=by)(weight, IMAGES)

    assert most_allocated.called == (by == "measured")


def test_what_does_not_run_on_zeros_is_refused() -> None:
    """By its name and line, in a region and around it."""

    def drawn(w: Tensor) -> Tensor:
        return (w * torch.multinomial(w.detach().exp(), 4, replacement=True)).sum()

    region = remat(lambda w: w.tanh().sum())
    told = r'.*cannot be run on zeros.*Pass costs="flops"\.'
    line = r" at test_workspaces.py:\d+"
    with pytest.raises(PolicyError, match=f"^aten.multinomial{line}:? {told}"):
        plan(remat(drawn, rng="preserve"), budget=1.0, costs="measured")(seeded(4))
    with pytest.raises(PolicyError, match=f"^aten.multinomial:? {told}"):
        fit(lambda w: drawn(w) + region(w), peak=2**30, costs="measured")(seeded(4))


def test_a_fitted_step_is_what_the_allocator_gives() -> None:
    """A convolution around its region has the peak, and is counted, too."""
    region = remat(lambda x: x.tanh().mean())
    weight = seeded(64, 16, 3, 3).float().requires_grad_()

    def step(w: Tensor, x: Tensor) -> Tensor:
        return region(F.avg_pool2d(F.conv2d(x, w, padding=1), 8))

    def run() -> object:
        return torch.autograd.grad(step(weight, IMAGES), weight)

    run()
    peak = weight.nbytes + IMAGES.nbytes + allocated(run).peak
    fitted = fit(step, peak=2**30, costs="measured")(weight, IMAGES)
    assert peak <= fitted.predicted_peak_bytes <= 1.01 * peak
    assert fit(step, peak=2**30)(weight, IMAGES).predicted_peak_bytes < 0.9 * peak


def test_modules_count_it_too() -> None:
    widths = itertools.pairwise((16, 64, 16))
    model = nn.Sequential(*(nn.Conv2d(*each, 3, padding=1) for each in widths))
    step = modules.Step(lambda x: x.square().mean(), 0)
    peaks = [
        modules.plan(model, budget=2**30, step=step, costs=each)(IMAGES)
        for each in ("flops", "measured")
    ]

    assert peaks[0].predicted_peak_bytes < peaks[1].predicted_peak_bytes


def test_nothing_is_measured_beside_another_profiler() -> None:
    function, weight = convolved("plain")
    policy = policies.budget(2**30, peak=2**30, costs="measured")

    with profile(profile_memory=True) as profiler:
        with pytest.raises(
            PolicyError, match=r"a profiler runs.*Plan before it starts"
        ):
            plan(function, budget=policy)(weight, seeded(2, 16, 20, 20).float())
        weight.sum()
    assert any(each.key == "aten::sum" for each in profiler.key_averages())
