"""What changes the shape of a tensor in place: `t_`, `squeeze_` and their kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import MutationError, TraceError, remat
from tests.support import assert_bitwise, grads, seeded

pytestmark = pytest.mark.contract


def transposed(x: Tensor) -> Tensor:
    """A view, transposed and written to."""
    y = x.sin()[:]
    y.t_()
    y.mul_(2)
    return y.cos()


def zeroed(x: Tensor) -> Tensor:
    """A part of such a view is written to."""
    y = x.sin()[None]
    y.transpose_(1, 2)
    y[0, 0] = 0
    return y.cos()


def base_returned(x: Tensor) -> Tensor:
    """What the view lies in is read."""
    y = x.sin()
    part = y[:]
    part.t_()
    part.mul_(x)
    return y.cos()


def squeezed(x: Tensor) -> Tensor:
    """torch fails in the trace of its backward."""
    y = x.sin()[None]
    y.squeeze_(0)
    y.add_(1)
    return y.cos()


@pytest.mark.parametrize("fun", [transposed, zeroed, base_returned, squeezed])
def test_a_write_after_it_is_refused_or_runs_again(
    fun: Callable[[Tensor], Tensor],
) -> None:
    """The error says where the view was reshaped; the gradient was another one."""
    x = seeded(2, 2)
    with pytest.raises(TraceError, match=r"test_reshaped.*: reshapes a view in place"):
        remat(fun)(x.clone().requires_grad_())
    assert_bitwise(grads(remat(fun, engine="rerun"), [x]), grads(fun, [x]))


def of_its_own(x: Tensor) -> Tensor:
    """What is no view, and written to."""
    y = x.sin()
    y.t_()
    return y.mul_(2).cos()


def unwritten(x: Tensor) -> Tensor:
    """A view that nothing writes to afterwards."""
    y = x.sin().mul_(2)
    return y[None].squeeze_(0).cos()


def without_a_gradient(x: Tensor) -> Tensor:
    """A mask."""
    mask = (x.detach() > 0)[None]
    mask.squeeze_(0).logical_not_()
    return x.sin() * mask


@pytest.mark.parametrize("fun", [of_its_own, unwritten, without_a_gradient])
def test_what_is_right_is_traced(fun: Callable[[Tensor], Tensor]) -> None:
    """To the bit."""
    x = seeded(2, 2)
    assert_bitwise(grads(remat(fun), [x]), grads(fun, [x]))


@pytest.mark.parametrize("engine", ["trace", "rerun", "auto"])
@pytest.mark.parametrize("is_argument", [True, False], ids=["argument", "captured"])
@pytest.mark.parametrize(
    "reshape", [lambda t: t.t_(), lambda t: t.unsqueeze_(0), lambda t: t.resize_(4)]
)
def test_a_tensor_from_outside_keeps_its_shape(
    reshape: Callable[[Tensor], Tensor], is_argument: bool, engine: Any
) -> None:
    """A trace wrote the numbers of the one shape into the memory of the other."""
    base = seeded(2, 2, seed=1)
    part, before, version = base[:], base.clone(), base._version

    def fun(w: Tensor, given: Tensor) -> Tensor:
        reshape(given if is_argument else part)
        return (w * w).sum()

    with pytest.raises(MutationError, match=r"`\.\w+_\(\)` of float64.*Write x = x\."):
        remat(fun, engine=engine)(seeded(2, 2).requires_grad_(), part)
    assert_bitwise(base, before)
    assert (part.shape, base._version) == (base.shape, version)


@pytest.mark.parametrize("engine", ["trace", "rerun", "auto"])
@pytest.mark.parametrize("shape", [(0,), (2, 4)])
@pytest.mark.parametrize("is_argument", [True, False], ids=["argument", "captured"])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_tensor_from_outside_is_not_resized_by_what_is_written_to_it(
    is_argument: bool, shape: tuple[int, ...], engine: Any
) -> None:
    """A region lost the new shape, or wrote to all rows of the old one."""
    out = torch.zeros(shape)

    def fun(w: Tensor, given: Tensor) -> Tensor:
        torch.mul(torch.ones(4), 2, out=given if is_argument else out)
        return (w * w).sum()

    with pytest.raises(
        MutationError, match=r"`out=` at test_reshaped.*resizes a tensor"
    ):
        remat(fun, engine=engine)(seeded(2, 2).requires_grad_(), out)
    assert out.shape == shape
