"""A tensor-parallel transformer block, and what the checks of sharding look at."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from remat import checkpoint_name
from remat._regions.waiting import Waiting

HEADS, WIDTH, HIDDEN = 4, 8, 16


class Copy(torch.autograd.Function):
    """The identity; its backward sums over the ranks (Megatron-LM's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """Sums over the ranks; its backward is the identity (Megatron-LM's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def parameters(mesh: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """This rank's slices of one set of weights: columns of the first, rows of the second."""
    rank, size = mesh.get_local_rank(), mesh.size()
    whole = {
        "qkv": torch.randn(3, WIDTH, WIDTH, dtype=dtype).chunk(size, 2)[rank],
        "out": torch.randn(WIDTH, WIDTH, dtype=dtype).chunk(size, 0)[rank],
        "up": torch.randn(WIDTH, HIDDEN, dtype=dtype).chunk(size, 1)[rank],
        "down": torch.randn(HIDDEN, WIDTH, dtype=dtype).chunk(size, 0)[rank],
    }
    return {name: each.clone() * 0.3 for name, each in whole.items()}


def block(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """(batch, seq, d) -> (batch, seq, d); heads and hidden units are split over ranks."""
    h = Copy.apply(F.layer_norm(x, x.shape[-1:]))
    q, k, v = (
        (h @ each).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        for each in params["qkv"]
    )
    scores = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
    merged = (scores @ v).transpose(1, 2).flatten(2)
    x = checkpoint_name(x + Reduce.apply(merged @ params["out"]), "mid")
    h = Copy.apply(F.layer_norm(x, x.shape[-1:]))
    return x + Reduce.apply(torch.tanh(h @ params["up"]) @ params["down"])


def leaves(params: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Fresh leaves to differentiate."""
    fresh = {name: each.clone().requires_grad_() for name, each in params.items()}
    return fresh, x.clone().requires_grad_()


def step(
    layer: Callable[[dict[str, Tensor], Tensor], Tensor],
    params: dict[str, Tensor],
    x: Tensor,
    depth: int = 3,
) -> list[Tensor]:
    """The output of a stack with `x + layer(x)`, and all gradients."""
    params, x = leaves(params, x)
    y = x
    for _ in range(depth):
        y = y + layer(params, y)
    y.square().sum().backward()
    return [y.detach(), *map(gradient, (x, *params.values()))]


def gradient(leaf: Tensor) -> Tensor:
    """Its gradient, which must be there."""
    assert leaf.grad is not None
    return leaf.grad


def assert_same(ours: Any, theirs: Any) -> None:
    """Bitwise equality of lists of tensors."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.shape == other.shape, index
        assert one.dtype == other.dtype, index
        assert torch.equal(one, other), (index, (one - other).abs().max())


def waiting_in(output: Tensor) -> list[Waiting]:
    """What the region that made a tensor holds in storages."""
    node: Any = output.grad_fn
    return [each for each in node.saved_tensors if type(each) is Waiting]


def parts_in(output: Tensor) -> list[Tensor]:
    """The tensors that wait there."""
    return [part for each in waiting_in(output) for part in each.stored.tensors]


class Late:
    """Work that ends some time after it began."""

    def __init__(self, work: Any, log: "Gathers", delay_s: float) -> None:
        self.work, self.log = work, log
        self.end = time.monotonic() + delay_s

    def wait(self) -> None:
        time.sleep(max(self.end - time.monotonic(), 0.0))
        self.work.wait()
        self.log.pending -= 1


class Gathers:
    """Counts the gathers of values, and those under way at a time."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.pending = 0
        self.most_pending = 0
        self.num_checks = 0


@contextmanager
def gathers(delay_s: float = 0.0) -> Iterator[Gathers]:
    """Listens to the collectives that `Shard` runs, and delays each."""
    log = Gathers()
    gather, check = dist.all_gather_into_tensor, dist.all_gather

    def listen(out: Tensor, part: Tensor, **options: Any) -> Any:
        log.sizes.append(part.numel())
        log.pending += 1
        log.most_pending = max(log.most_pending, log.pending)
        return Late(gather(out, part, **options), log, delay_s)

    def listen_to_checks(*args: Any, **options: Any) -> Any:
        log.num_checks += 1
        return check(*args, **options)

    dist.all_gather_into_tensor, dist.all_gather = listen, listen_to_checks
    try:
        yield log
    finally:
        dist.all_gather_into_tensor, dist.all_gather = gather, check
