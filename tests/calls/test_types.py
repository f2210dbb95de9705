# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What type checkers see of regions: pyright, which CI runs, is the test of this file."""

from typing import assert_type

import pytest
import torch
from torch import Tensor, nn

from remat import modules, policies, remat


@remat
def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


class Scaling:
    """A class with decorated methods."""

    @remat
    def step(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    @remat(policy=policies.dots_saveable)
    def pair(self, x: Tensor) -> tuple[Tensor, float]:
        return x * 2, 2.0


def test_a_function_keeps_its_parameters_and_its_result() -> None:
    """And what regions answer about a call is known."""
    assert_type(scaled(torch.ones(2), factor=3.0), Tensor)
    assert scaled.saved_residuals(torch.ones(2), 3.0)[0].name == "x"
    with pytest.raises(TypeError):
        scaled(torch.ones(2), 3.0, 4.0)  # pyright: ignore[reportCallIssue]


def test_a_method_keeps_its_parameters_and_its_result() -> None:
    """Bound to an object, and on the class; what regions answer is accepted."""
    bound = Scaling()

    assert_type(bound.step(torch.ones(2), factor=3.0), Tensor)
    assert_type(bound.pair(torch.ones(2)), tuple[Tensor, float])
    assert_type(Scaling.step(bound, torch.ones(2)), Tensor)
    assert bound.step.saved_residuals(torch.ones(2))[0].name == "x"
    with pytest.raises(TypeError):
        bound.step(torch.ones(2), 3, 4)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        bound.step("wrong", 3.5)  # pyright: ignore[reportArgumentType]


def test_a_module_keeps_its_class() -> None:
    """So whatever takes a module takes it, and its own attributes have their types."""
    linear = remat(nn.Linear(3, 3))
    with_options = remat(policy=policies.dots_saveable)(nn.Linear(3, 3))

    assert_type(linear, nn.Linear)
    assert_type(with_options, nn.Linear)
    assert_type(modules.apply(nn.Linear(3, 3), ""), nn.Linear)
    assert len(list(nn.Sequential(linear, with_options).train().parameters())) == 4
    assert_type(linear.in_features, int)


def test_a_misspelled_option_is_flagged() -> None:
    """Of the options that take one of a few words."""
    with pytest.raises(ValueError, match="engine"):
        remat(engine="trase")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="rng"):
        remat(scaled, rng="key")  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(ValueError, match="backend"):
        remat(nn.Linear(3, 3), backend="inducter")  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(ValueError, match="engine"):
        modules.apply(nn.Linear(3, 3), "", engine="trase")  # pyright: ignore[reportArgumentType]
