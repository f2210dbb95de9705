"""While one thread traces, its backwards stay on it: others may wait to trace."""

import pytest
import torch
from torch import Tensor

from remat import remat
from tests.support import assert_close, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]


class Alone(torch.autograd.Function):
    """Fails in a backward that autograd may run on threads of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output) -> None: ...

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> Tensor:
        assert not torch.autograd.is_multithreading_enabled()
        return grad_outputs[0] * 2


def test_the_backward_of_a_trace_runs_on_its_thread():
    """Autograd has a thread for each accelerator, and would use it."""
    x = seeded(3).requires_grad_()

    y = remat(lambda x: Alone.apply(x).sin())(x)

    assert torch.autograd.is_multithreading_enabled()
    assert_close(torch.autograd.grad(y.sum(), x)[0], 2 * (2 * x.detach()).cos())


def test_a_region_inside_may_be_traced_in_the_backward_of_the_trace():
    """Forward mode over the gradient of nested regions; on a thread of its own it would wait."""
    inner = remat(lambda x: x.sin().exp())
    outer = remat(lambda x: inner(inner(x)))
    x = seeded(3)

    def grad(function):
        return torch.func.grad(lambda x: function(x).sum())

    found = torch.func.jvp(grad(outer), (x,), (torch.ones_like(x),))
    plain = torch.func.jvp(
        grad(lambda x: x.sin().exp().sin().exp()), (x,), (torch.ones_like(x),)
    )
    assert_close(found, plain)
