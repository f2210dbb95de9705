"""What must hold of collectives inside a region; `test_shard.py` runs it on each rank."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from remat import MutationError, TraceError, policies, remat
from tests.storage.parallel import assert_same


class Overwriting(torch.autograd.Function):
    """Megatron-LM's g as Megatron-LM writes it: the sum overwrites its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def run(function: Callable[..., Tensor], mesh: Any, size: int = 4) -> list[Tensor]:
    """The output and the gradients, from numbers that differ by rank."""
    torch.manual_seed(mesh.get_local_rank())
    x, w = (torch.randn(size, size, requires_grad=True) for _ in range(2))
    y = function(x, w)
    return [y.detach(), *torch.autograd.grad(y.sum(), (x, w))]


def check_a_saved_value_may_be_overwritten(mesh: Any) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return Overwriting.apply(x @ w).sin().cos()  # type: ignore[no-any-return]

    for policy in (
        policies.nothing_saveable,
        policies.save_matmul_outputs,
        policies.everything_saveable,
    ):
        assert_same(run(remat(function, policy=policy), mesh), run(function, mesh))


def check_a_sum_is_there_when_it_is_read(mesh: Any) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return Overwriting.apply(x * w).sin().cos()  # type: ignore[no-any-return]

    assert_same(run(remat(function), mesh, 400), run(function, mesh, 400))


def check_every_collective_that_is_taken(mesh: Any) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        own = x.detach().sin()
        rows = own.new_empty(mesh.size() * 4, 4)
        dist.all_gather_single(rows, own)
        one = own.new_empty(4, 4)
        dist.reduce_scatter_single(one, rows)
        each = [torch.empty(4, 4) for _ in range(mesh.size())]
        dist.all_gather(each, one)
        first = each[0] * 2
        dist.broadcast(first, 1)
        dist.all_reduce(first[:2], op=dist.ReduceOp.MAX)
        work = dist.all_reduce(one, async_op=True)
        assert work is not None
        work.wait()
        return (x * first * one * each[1]).sin() * w

    assert_same(run(remat(function), mesh), run(function, mesh))


def check_a_buffer_is_reduced_once(mesh: Any) -> None:
    def function(x: Tensor, total: Tensor) -> Tensor:
        dist.all_reduce(total)
        return (x * total).sin().sin()

    total, x = torch.ones(3), torch.ones(3, requires_grad=True)
    remat(function)(x, total).sum().backward()

    assert total.tolist() == [mesh.size()] * 3


def check_an_argument_is_not_overwritten(mesh: Any) -> None:
    def function(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x.sin().sin()

    warnings.filterwarnings("ignore", ".*an autograd kernel was not registered")
    with pytest.raises(MutationError, match="is changed in place"):
        remat(function)(torch.ones(3, requires_grad=True))


def check_what_no_graph_shows_is_refused(mesh: Any) -> None:
    def function(x: Tensor) -> Tensor:
        dist.reduce(x * 1, 0)
        return x.sin().sin()

    with pytest.raises(
        TraceError, match=r"runs c10d\.reduce_.*Use all_reduce, broadcast"
    ):
        remat(function)(torch.ones(3, requires_grad=True))


def check_parts_of_unlike_shapes_are_refused_on_every_rank(mesh: Any) -> None:
    """The shape of one rank's part broadcasts to all: it went on, and met nobody."""
    lengths = range(1, mesh.size() + 1)

    def function(x: Tensor) -> Tensor:
        found = [x.new_empty(length, 3) for length in lengths]
        dist.all_gather(found, x.detach().sin())
        return (x * torch.cat(found).sum(0)).sin()

    x = torch.ones(lengths[mesh.get_local_rank()], 3, requires_grad=True)
    with pytest.raises(
        TraceError, match=r"parts of unlike shapes, \[1, 3\], \[2, 3\].*Pad the parts"
    ):
        remat(function)(x)
