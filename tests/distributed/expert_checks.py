"""An all-to-all inside a region, as experts on many ranks need it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from remat import checkpoint_name, policies, remat
from tests.storage.parallel import assert_same


class Exchange(torch.autograd.Function):
    """Sends rows to their experts; the backward sends cotangents home."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], got: list[int]) -> Tensor:
        ctx.sizes = sent, got
        out = x.new_empty(sum(got), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), got, sent)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sent, got = ctx.sizes
        home = grads[0].new_empty(sum(sent), grads[0].shape[1])
        dist.all_to_all_single(home, grads[0].contiguous(), sent, got)
        return home, None, None


def sizes(mesh: Any) -> tuple[list[int], list[int]]:
    """Rows that this rank sends to each, and gets from each: rank i sends i + j + 1 to j."""
    rank = mesh.get_local_rank()
    sent = [rank + other + 1 for other in range(mesh.size())]
    return sent, sent


def experts(kind: str, mesh: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows go to a rank, are transformed by its weights, and come back."""
    sent, got = sizes(mesh)

    def exchange(x: Tensor, sent: list[int], got: list[int]) -> Tensor:
        if kind == "in place":
            return Exchange.apply(x, sent, got)  # type: ignore[no-any-return]
        return functional.all_to_all_single_autograd(x, got, sent, mesh.get_group())

    def function(x: Tensor, w: Tensor) -> Tensor:
        there = checkpoint_name(exchange(x.sin(), sent, got), "there")
        return exchange(torch.tanh(there @ w).sin(), got, sent).sin()

    return function


def run(function: Callable[..., Tensor], mesh: Any) -> list[Tensor]:
    """The output and the gradients, from numbers that differ by rank."""
    torch.manual_seed(mesh.get_local_rank())
    x = torch.randn(sum(sizes(mesh)[0]), 4, requires_grad=True)
    w = torch.randn(4, 4, requires_grad=True)
    y = function(x, w)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, w))]


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"policy": policies.save_only_these_names("there")},
    {"engine": "rerun"},
)


def check_an_all_to_all(mesh: Any) -> None:
    for kind in ("in place", "functional"):
        function = experts(kind, mesh)
        for options in OPTIONS:
            assert_same(run(remat(function, **options), mesh), run(function, mesh))


def check_an_all_to_all_in_equal_parts(mesh: Any) -> None:
    def function(x: Tensor) -> Tensor:
        own = x.detach().t()
        out = torch.empty(4, 4)
        dist.all_to_all_single(out, own.contiguous())
        return (x * out).sin().sin()

    torch.manual_seed(mesh.get_local_rank())
    x = torch.randn(4, 4, requires_grad=True)
    (ours,) = torch.autograd.grad(remat(function)(x).sum(), x)
    (plain,) = torch.autograd.grad(function(x).sum(), x)
    assert_same([ours], [plain])
