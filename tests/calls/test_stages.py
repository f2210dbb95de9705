"""The pipeline of a cache miss: values in a row, each of which prints."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import checkpoint_name, policies, remat
from remat._calls import traced_call
from remat._calls.signature import Statics, call_site


@remat(policy=policies.save_only_these_names("hidden"))
def layer(x: Tensor, w: Tensor) -> Tensor:
    hidden = checkpoint_name(x @ w, "hidden")
    return torch.tanh(hidden).sin().exp()


ARGUMENTS = (torch.ones(2, 3), torch.ones(3, 4))


def test_each_stage_prints() -> None:
    """The joint graph, what may be saved, what is, and what runs again, in this order."""
    printed = str(layer.stages(*ARGUMENTS))

    parts = ("joint graph:", "decisions: may be saved", "cut: is saved", "recomputed")
    places = [printed.index(part) for part in parts]
    assert places == sorted(places)
    assert printed.count('"hidden"') == 3
    assert "aten.tanh" in printed[places[-1] :]


def test_stages_follow_from_one_another() -> None:
    """Each is a value made of those before it."""
    stages = layer.stages(*ARGUMENTS)

    again = type(stages).of(stages.joints, layer.settings.policy)

    assert again == stages
    assert stages.analysis.joint is stages.joint
    assert {stages.analysis.numbers[index] for index in stages.cut.saved} == set(
        stages.decisions
    )


def test_no_stage_is_changed_afterwards() -> None:
    """They are frozen, and a run leaves them as they are."""
    stages = layer.stages(*ARGUMENTS)
    before = str(stages)

    layer(torch.ones(2, 3, requires_grad=True), ARGUMENTS[1]).sum().backward()

    assert str(stages) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        stages.cut = stages.cut  # pyright: ignore[reportAttributeAccessIssue]


def test_an_entry_shows_its_stages() -> None:
    """`repr` names the stages in the order of the pipeline."""
    entry, *_ = layer.entry_of(ARGUMENTS, {})
    shown = repr(entry)

    place = 0
    for name in ("covered=", "stages=", "analysis=", "decisions=", "cut=", "region="):
        place = shown.index(name, place)


def test_a_traced_call_prints() -> None:
    """The first stage shows the joint graph and what the function captures."""
    scale = torch.ones(3)
    argument = torch.ones(3, requires_grad=True)
    site = call_site(lambda x: x * scale, (argument,), {}, Statics())

    traced = traced_call.trace_call(site, None, "the region f")

    assert "aten.mul" in str(traced.joints[0].graph)
    assert "captured=(tensor" in repr(traced)


@pytest.mark.parametrize("is_module", [False, True])
def test_methods_and_modules_have_stages(is_module: bool) -> None:
    """They answer like decorated functions."""

    class Layer(nn.Module):
        @remat
        def call(self, x: Tensor) -> Tensor:
            return x.sin().cos()

        def forward(self, x: Tensor) -> Tensor:
            return x.sin().cos()

    region: Any = remat(Layer()) if is_module else Layer().call

    assert "aten.sin" in str(region.stages(torch.ones(3)))
