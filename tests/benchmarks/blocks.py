"""The work: a stack of pre-norm transformer blocks, and its contenders.

Shapes: b batch, s sequence, d width, h heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_remat
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from remat import policies, remat

Params = dict[str, Tensor]
Block = Callable[[Params, Tensor], Tensor]

HEADS = 2


def block(p: Params, x: Tensor) -> Tensor:
    """Attention and a GELU MLP, each after a layer norm; x and the result are (b, s, d)."""
    b, s, d = x.shape
    h = F.layer_norm(x, (d,), p["norm1"], p["bias1"])
    q, k, v = (h @ p["qkv"]).view(b, s, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + a.transpose(1, 2).reshape(b, s, d) @ p["out"]
    h = F.layer_norm(x, (d,), p["norm2"], p["bias2"])
    return x + F.gelu(h @ p["up"]) @ p["down"]


def parameters(d: int) -> Params:
    """The parameters of one block."""
    shapes = {
        "qkv": (d, 3 * d),
        "out": (d, d),
        "up": (d, 4 * d),
        "down": (4 * d, d),
        **dict.fromkeys(("norm1", "bias1", "norm2", "bias2"), (d,)),
    }
    return {
        name: (torch.randn(shape) / d**0.5).requires_grad_()
        for name, shape in shapes.items()
    }


@dataclass(frozen=True)
class Stack:
    """Equal blocks with parameters of their own, and their input of shape (b, s, d)."""

    params: list[Params]
    x: Tensor

    @classmethod
    def make(cls, blocks: int, batch: int, sequence: int, width: int) -> "Stack":
        """A stack with fixed numbers."""
        torch.manual_seed(0)
        params = [parameters(width) for _ in range(blocks)]
        return cls(params, torch.randn(batch, sequence, width))

    def loss(self, each: Block, params: list[Params]) -> Tensor:
        """The sum of what the last block gives."""
        x = self.x
        for own in params:
            x = each(own, x)
        return x.sum()

    def backward(self, each: Block) -> None:
        """One step of plain autograd."""
        self.loss(each, self.params).backward()
        for own in self.params:
            for tensor in own.values():
                tensor.grad = None

    def grad(self, each: Block) -> None:
        """One step of torch.func."""
        bare = [{name: t.detach() for name, t in own.items()} for own in self.params]
        torch.func.grad(lambda params: self.loss(each, params))(bare)


def _matmuls_saved(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return (
        CheckpointPolicy.MUST_SAVE
        if op in matmuls
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_matmuls_saved)


def regions() -> dict[str, Any]:
    """The block under each of this package's policies."""
    return {
        "remat, nothing": remat(block),
        "remat, matmuls": remat(block, policy=policies.save_matmul_outputs),
        "remat, everything": remat(block, policy=policies.everything_saveable),
    }


def peers() -> Mapping[str, Block]:
    """The block under the checkpointing of others; none of it runs under torch.func."""
    return {
        "torch.utils.checkpoint": lambda p, x: checkpoint(
            block, p, x, use_reentrant=False
        ),
        # Reentrant mode differentiates only what hangs on its tensor arguments.
        "torch.utils.checkpoint, reentrant": lambda p, x: checkpoint(
            lambda *a: block(dict(zip(p, a[1:], strict=True)), a[0]),
            x,
            *p.values(),
            use_reentrant=True,
        ),
        "selective, matmuls": lambda p, x: checkpoint(
            block, p, x, use_reentrant=False, context_fn=_selective
        ),
        "torch_remat": torch_remat.checkpoint()(block),
    }
