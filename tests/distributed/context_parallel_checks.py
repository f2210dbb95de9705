"""Attention over a sequence that is split across ranks, inside of a region."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from remat import checkpoint_name, policies, remat
from tests.storage.parallel import assert_same

BATCH, LENGTH, WIDTH = 2, 3, 4
NOTHING, KEYS = policies.nothing_saveable, policies.save_only_these_names("keys")
ATTENTION = policies.save_attention_outputs


class Collectives(TorchDispatchMode):
    """The collectives that ran, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.attentions = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert isinstance(func, OpOverload)
        name = func._schema.name.partition("::")[2]
        if name.startswith(("all_gather", "reduce_scatter", "all_to_all", "alltoall")):
            self.ran.append(name)
        self.attentions += name == "_scaled_dot_product_flash_attention_for_cpu"
        return func(*args, **(kwargs or {}))


_functional: Any = torch.ops._c10d_functional


class Gather(torch.autograd.Function):
    """The parts of all ranks, one after the other along dimension 1."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, ctx.size, ctx.name = args
        rows = x.movedim(1, 0).contiguous()
        found = _functional.all_gather_into_tensor(rows, ctx.size, ctx.name)
        return _functional.wait_tensor(found).movedim(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows = grads[0].movedim(1, 0).contiguous()
        own = _functional.reduce_scatter_tensor(rows, "sum", ctx.size, ctx.name)
        return _functional.wait_tensor(own).movedim(0, 1), None, None


class Shift(torch.autograd.Function):
    """What the rank before holds; gradients go the other way round."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, ctx.step, ctx.size, ctx.rank = args
        sizes = [[0] * ctx.size for _ in range(2)]
        sizes[0][(ctx.rank + ctx.step) % ctx.size] = len(x)
        sizes[1][(ctx.rank - ctx.step) % ctx.size] = len(x)
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), sizes[1], sizes[0])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back: Any = Shift.apply(grads[0], -ctx.step, ctx.size, ctx.rank)
        return back, None, None, None


def gathering(mesh: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Keys and values of the whole sequence, gathered, for the queries of this rank."""
    rank, size = mesh.get_local_rank(), mesh.size()
    name = mesh.get_group().group_name

    def attend(x: Tensor, weight: Tensor) -> Tensor:
        query, own = (x @ weight).tensor_split([WIDTH], -1)
        whole: Any = Gather.apply(own, size, name)
        key, value = checkpoint_name(whole, "keys").chunk(2, -1)
        places = torch.arange(size * LENGTH)
        mask = places <= places[rank * LENGTH :][:LENGTH, None]
        q, k, v = (each.unsqueeze(1) for each in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)

    return attend


def ring(mesh: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Keys and values go round; the parts of the softmax are added up meanwhile."""
    rank, size = mesh.get_local_rank(), mesh.size()

    def attend(x: Tensor, weight: Tensor) -> Tensor:
        query, own = (x @ weight).tensor_split([WIDTH], -1)
        total, scale = torch.zeros_like(query), torch.zeros_like(query[..., :1])
        places = torch.arange(LENGTH)
        for step in range(size):
            if step:
                own = checkpoint_name(Shift.apply(own, 1, size, rank), "keys")
            assert isinstance(own, Tensor)
            key, value = own.chunk(2, -1)
            behind = places + (rank - step) % size * LENGTH
            seen = behind <= (places + rank * LENGTH)[:, None]
            scores = (query @ key.transpose(-1, -2) / WIDTH**0.5).exp() * seen
            total, scale = total + scores @ value, scale + scores.sum(-1, keepdim=True)
        return total / scale

    return attend


def leaves_of(mesh: Any) -> tuple[list[Tensor], Tensor]:
    """This rank's part of a sequence and a weight; and the whole sequence."""
    torch.manual_seed(0)
    whole = torch.randn(BATCH, mesh.size() * LENGTH, WIDTH)
    part = whole[:, mesh.get_local_rank() * LENGTH :][:, :LENGTH].contiguous()
    weight = torch.randn(WIDTH, 3 * WIDTH)
    return [part.requires_grad_(), weight.requires_grad_()], whole


def run(function: Any, leaves: list[Tensor]) -> tuple[list[Tensor], Collectives]:
    with Collectives() as seen:
        y = function(*leaves)
        found = torch.autograd.grad(y.square().sum(), leaves)
    return [y.detach(), *found], seen


def check_attention_over_gathered_keys(mesh: Any) -> None:
    function, (leaves, whole) = gathering(mesh), leaves_of(mesh)
    plain, seen = run(function, leaves)
    assert_close_to_whole(mesh, plain[0], whole, leaves[1])
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    assert seen.ran == [gather, scatter]
    assert seen.attentions == 1
    for policy, ran, attentions in (
        (NOTHING, [gather, gather, scatter], 2),
        (ATTENTION, [gather, gather, scatter], 1),
        (KEYS, [gather, scatter], 2),
        (ATTENTION | KEYS, [gather, scatter], 1),
    ):
        region = remat(function, policy=policy)
        ours, seen = run(region, leaves)
        assert_same(ours, plain)
        ours, seen = run(region, leaves)
        assert_same(ours, plain)
        assert (seen.ran, seen.attentions) == (ran, attentions)
    assert_same(run(remat(function, engine="rerun"), leaves)[0], plain)


def check_attention_in_a_ring(mesh: Any) -> None:
    function, (leaves, whole) = ring(mesh), leaves_of(mesh)
    plain, seen = run(function, leaves)
    assert_close_to_whole(mesh, plain[0], whole, leaves[1])
    steps = mesh.size() - 1
    assert len(seen.ran) == 2 * steps
    for policy, count in ((NOTHING, 3 * steps), (KEYS, 2 * steps)):
        region = remat(function, policy=policy)
        for _ in range(2):
            ours, seen = run(region, leaves)
            assert_same(ours, plain)
        assert len(seen.ran) == count
    assert_same(run(remat(function, engine="rerun"), leaves)[0], plain)


def assert_close_to_whole(mesh: Any, part: Tensor, x: Tensor, weight: Tensor) -> None:
    """Causal attention over the whole sequence, on one rank, has this part."""
    q, k, v = (each.unsqueeze(1) for each in (x @ weight.detach()).chunk(3, -1))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
    own = whole[:, mesh.get_local_rank() * LENGTH :][:, :LENGTH]
    torch.testing.assert_close(part, own)
