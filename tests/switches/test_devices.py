"""What is read and put back of CUDA devices is so of any other accelerator."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import remat
from remat._generators import device_states
from remat._partition.free_memory import free_bytes
from remat.reporting._measure.live_bytes import allocator_peak
from tests.support import assert_bitwise

pytestmark = [pytest.mark.standin, pytest.mark.contract]

HERE = torch.device("privateuseone", 0)


def test_autocast_of_the_device_belongs_to_the_signature():
    """A region is traced under it, and its backward runs under the forward's."""
    region = remat(lambda x: (x @ x).sin())
    x = torch.rand(3, 3, device=HERE, requires_grad=True)
    region(x).sum().backward()
    found: list[Tensor] = []
    for function in (lambda x: (x @ x).sin(), region):
        with torch.autocast("standin", dtype=torch.bfloat16):
            y = function(x)
        found += [y.detach(), *torch.autograd.grad(y.sum(), x)]

    assert found[0].dtype is torch.bfloat16
    assert_bitwise(found[2:], found[:2])


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_recomputation_draws_from_the_devices_generator(engine: Any):
    """The forward's numbers; the generator ends where it would without remat."""

    def fun(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5).exp() * F.dropout(x, 0.5)

    region = remat(fun, rng="preserve", engine=engine)
    found: list[Tensor] = []
    for function in (fun, region):
        torch.manual_seed(0)
        x = torch.linspace(0, 1, 64, device=HERE).requires_grad_()
        y = function(x)
        torch.rand(3, device=HERE)
        found += [*torch.autograd.grad(y.sum(), x), device_states.get(HERE)]

    assert_bitwise(found[2:], found[:2])


def test_bytes_are_the_devices():
    """What is free, and what a step adds."""
    before, peak = free_bytes(HERE), allocator_peak([HERE, torch.device("cpu")])
    x = torch.ones(2**18, device=HERE)
    assert before - free_bytes(HERE) == x.nbytes
    del x
    assert peak() == 2**20
