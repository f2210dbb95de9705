"""Every named value of the forward and, beside it, of the recomputation."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import NamedValue, RematError, checkpoint_name, named_values, policies, remat
from tests.random.trackers import generator_state
from tests.reporting.models import Normed, batch, block, loss_of, parameters
from tests.support import assert_bitwise, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:.*:remat.RematWarning"),
]


def chain(x: Tensor) -> Tensor:
    """Four sines, the values between them all called "s"."""
    for _ in range(4):
        x = checkpoint_name(torch.sin(x), "s")
    return x


def test_each_occurrence_has_its_own_pair() -> None:
    """The last value is read by no derivative; the others are recomputed, bit by bit."""
    x = seeded(5)

    found = named_values(remat(chain), x)

    expected = list(itertools.accumulate([x] * 5, lambda y, _: torch.sin(y)))[1:]
    assert [value.occurrence for value in found] == [0, 1, 2, 3]
    for value, want in zip(found, expected, strict=True):
        assert_bitwise(value.forward, want)
    assert [value.is_same for value in found] == [True, True, True, None]


def test_saved_values_are_not_recomputed() -> None:
    """A policy that saves one name leaves the others to be recomputed."""
    region = remat(block, policy=policies.save_only_these_names("attn"))

    found = named_values(loss_of(region), parameters(3), batch())

    assert [(v.name, v.call, v.is_same) for v in found] == [
        (name, call, same)
        for call in range(3)
        for name, same in (("attn", None), ("mlp_up", True))
    ]
    assert {v.region for v in found} == {"block"}
    assert all(v.source.startswith("models.py:") for v in found)


def test_values_are_those_of_the_plain_function() -> None:
    """Bit by bit, and so are names outside of regions, of which nothing is recomputed."""
    regions = named_values(loss_of(remat(block)), parameters(3), batch())
    plain = named_values(loss_of(block), parameters(3), batch())

    assert [v.name for v in regions] == [v.name for v in plain]
    for one, other in zip(regions, plain, strict=True):
        assert_bitwise(one.forward, other.forward)
        assert (other.recomputed, other.region, other.call) == (None, "", None)


def test_a_value_in_the_middle_that_is_saved() -> None:
    """Ranks, not the order alone, tell which of several like values was recomputed."""

    def fun(x: Tensor) -> Tensor:
        for name in ("a", "kept", "a", "a"):
            x = checkpoint_name(checkpoint_name(torch.sin(x), name), "all")
        return x

    region = remat(fun, policy=policies.save_only_these_names("kept"))

    found = [v for v in named_values(region, seeded(3)) if v.name == "all"]

    assert [v.is_same for v in found] == [True, None, True, None]


def test_names_of_inner_regions() -> None:
    """The outer region's recomputation runs the inner one's values again."""
    inner = remat(lambda x: checkpoint_name(torch.sin(x), "inner").exp())

    found = named_values(remat(lambda x: torch.sin(inner(torch.sin(x)))), seeded(3))

    assert [(v.name, v.is_same) for v in found] == [("inner", True)]


def test_a_recomputation_that_differs_is_seen() -> None:
    """With engine="rerun" a function may compute other numbers; both are there."""
    counter = itertools.count(1)

    def impure(x: Tensor) -> Tensor:
        return checkpoint_name(x * float(next(counter)), "h").sin()

    region: Any = remat(impure, engine="rerun")

    first, second = named_values(lambda x: region(x) + region(x), torch.ones(2))

    assert first.forward.tolist() == [1.0, 1.0]
    assert second.forward.tolist() == [2.0, 2.0]
    assert {first.is_same, second.is_same} == {False}
    assert first.recomputed is not None
    assert first.recomputed.tolist() in ([3.0, 3.0], [4.0, 4.0])
    assert "recomputed DIFFERENTLY" in str(first)
    assert (first.call, second.call) == (0, 1)


def test_a_named_argument() -> None:
    """It is listed, and never recomputed."""
    region = remat(lambda x: checkpoint_name(x, "x").sin().sin())

    (value,) = named_values(region, torch.ones(2))

    assert_bitwise(value.forward, torch.ones(2))
    assert value.recomputed is None


def test_nothing_of_the_callers_is_changed() -> None:
    """Buffers, gradients and generators stay."""
    module = Normed()
    before = {name: each.clone() for name, each in module.state_dict().items()}
    x = torch.randn(4, 8)
    state = generator_state()

    named_values(remat(module), x)

    for name, each in module.state_dict().items():
        assert torch.equal(each, before[name])
    assert all(each.grad is None for each in module.parameters())
    assert torch.equal(generator_state(), state)


def test_no_step_is_an_error() -> None:
    """What returns nothing that requires grad has no recomputation."""
    with pytest.raises(RematError, match="returned no tensor that requires grad"):
        named_values(lambda x: checkpoint_name(x.detach(), "x"), torch.ones(2))


def test_a_value_prints_in_one_line() -> None:
    """Name, occurrence, shape, where, and what became of it."""
    value = NamedValue("h", 2, "f", 1, "a.py:3", torch.ones(2), None)

    assert str(value) == '"h" #2: float32[2] in f, call 1 at a.py:3, not recomputed'


def test_meta_tensors_have_no_values() -> None:
    """The error says what to pass instead."""
    x = torch.ones(2, device="meta")

    with pytest.raises(RematError, match=r"on the meta device.*`report` takes meta"):
        named_values(remat(lambda x: checkpoint_name(x.sin(), "a").cos()), x)
