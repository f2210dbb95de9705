"""`engine="rerun"`: a leaf that the function makes for itself and returns is no captured tensor."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import CapturedTensorError, modules, remat
from tests.support import assert_bitwise, seeded

pytestmark = pytest.mark.contract


def beside(x: Tensor) -> tuple[Tensor, Tensor]:
    """As VectorQuantize returns its loss while it does not train."""
    return x.sin(), torch.zeros((), dtype=x.dtype, requires_grad=True)


def used(x: Tensor) -> tuple[Tensor, Tensor]:
    bias = torch.ones(4, dtype=x.dtype).requires_grad_()
    return (x + bias).sin(), bias


def as_parameter(x: Tensor) -> tuple[Tensor, Tensor]:
    weight = nn.Parameter(torch.full((4,), 2.0, dtype=x.dtype))
    return (x * weight).sin(), weight * 2


def from_argument(x: Tensor) -> tuple[Tensor, Tensor]:
    anchor = x.detach().requires_grad_()
    return (x * anchor).sin(), anchor


@pytest.mark.parametrize("fun", [beside, used, as_parameter, from_argument])
def test_it_is_returned_and_the_argument_gets_its_gradient(fun: Any) -> None:
    """Outputs and gradients are plain's."""
    x = seeded(4).requires_grad_()
    y = seeded(4).requires_grad_()
    expected, own = fun(x)
    region: Any = remat(fun, engine="rerun")
    found, returned = region(y)

    assert_bitwise([found, returned], [expected, own])
    assert returned.requires_grad
    (expected.sum() + own.sum()).backward()
    (found.sum() + returned.sum()).backward()
    assert_bitwise(y.grad, x.grad)


@pytest.mark.parametrize("fun", [beside, as_parameter])
def test_alone_it_gives_the_argument_none(fun: Any) -> None:
    """It is unused, as in plain autograd."""
    x = seeded(4).requires_grad_()
    region: Any = remat(fun, engine="rerun")

    (found,) = torch.autograd.grad(region(x)[1].sum(), x, allow_unused=True)
    assert found is None
    assert not torch.func.grad(lambda x: region(x)[1].sum())(x).any()


HELD = seeded(4).requires_grad_()
HIDDEN = itertools.repeat(HELD)


def test_a_tensor_that_comes_from_outside_is_none_of_its_own() -> None:
    """Nor is one that it only makes a leaf of: its gradient would be lost."""
    late = itertools.repeat(seeded(4))

    for fun in (
        lambda x: (x.sin(), next(HIDDEN)),
        lambda x: (x.sin() * next(late).requires_grad_(), next(late)),
    ):
        with pytest.raises(CapturedTensorError):
            remat(fun, engine="rerun")(seeded(4).requires_grad_())


class Begun(nn.Module):
    """Has autograd follow a buffer, as VectorQuantize does, after it has changed what it has."""

    zero: Tensor
    count: Tensor

    def __init__(self, *, ends: bool = False) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros((), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.weight = nn.Parameter(seeded(4))
        self.ends = ends

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        noisy = nn.functional.dropout(x * self.weight) + self.count
        self.zero.requires_grad_()
        loss = self.zero + noisy.sum()
        if self.ends:
            self.zero.requires_grad = False
        return loss


@pytest.mark.parametrize("ends", [False, True], ids=["stays", "ends as it began"])
@pytest.mark.parametrize("engine", ["trace", "rerun", "auto"])
@pytest.mark.parametrize("form", ["alone", "inside", "around"])
def test_a_buffer_that_starts_to_require_grad(
    form: str, engine: Any, ends: bool
) -> None:
    """It is followed from the first call on: its gradient, draws and buffers are plain's."""

    def run(is_region: bool) -> Any:
        model = nn.Sequential(nn.Tanh(), Begun(ends=ends))
        if is_region and form != "alone":
            modules.apply(model, Begun, engine=engine)
        is_around = is_region and form != "inside"
        region: Any = remat(model, engine=engine) if is_around else model
        torch.manual_seed(3)
        x = seeded(4).requires_grad_()
        losses = [region(x) for _ in range(2)]
        (losses[0] + losses[1]).backward()
        held = dict(model.named_parameters()) | dict(model.named_buffers())
        asked = [each.requires_grad for each in held.values()]
        found = [each.grad for each in held.values()]
        return losses, x.grad, held, asked, found, torch.get_rng_state()

    assert_bitwise(run(is_region=True), run(is_region=False))


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_captured_tensor_that_starts_to_require_grad(engine: Any) -> None:
    """Wherever the function has it from."""
    held = {"scale": seeded(4)}

    @remat(engine=engine)
    def fun(x: Tensor) -> Tensor:
        held["scale"].requires_grad = True
        return (x * held["scale"]).sin()

    x = seeded(4).requires_grad_()
    fun(x).sum().backward()
    assert_bitwise(held["scale"].grad, x.detach() * (x * seeded(4)).cos().detach())


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_it_does_not_if_the_function_raises(engine: Any) -> None:
    """In a trace, which leaves the caller's tensors as they were; a run goes as far as plain."""
    scale = seeded(4)

    @remat(engine=engine)
    def fun(x: Tensor) -> Tensor:
        is_known = scale.requires_grad
        y = x * scale.requires_grad_()
        if is_known:
            raise ValueError("twice")
        return y

    with pytest.raises(ValueError, match="twice"):
        fun(seeded(4).requires_grad_())
    assert scale.requires_grad == (engine == "rerun")
