"""A transformer, and how the checks of torch's engines compare two runs of it."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WIDTH, HEADS, HIDDEN, LENGTH, BATCH = 8, 4, 16, 4, 2
ACTIVATION_BYTES = 4 * BATCH * LENGTH * WIDTH


class Attention(nn.Module):
    """Causal attention; a rank of tensor parallelism holds some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """(batch, length, width) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.head(x))  # fully_shard warns of views


def a_model(num_blocks: int = 3) -> Model:
    """A model with the same weights at every call and on every rank."""
    torch.manual_seed(0)
    return Model(num_blocks)


def batches(rank: int, count: int = 1) -> list[Tensor]:
    """The batches that a rank sees."""
    generator = torch.Generator().manual_seed(rank + 1)
    return [
        torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(count)
    ]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each gradient, by the parameter's name; all must be there."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        found[name] = (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
    return found


def assert_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Bitwise equality, name by name."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), (
            name,
            (ours[name] - theirs[name]).abs().max(),
        )


def held_bytes(output: Tensor, model: nn.Module) -> int:
    """The memory of what regions hold for the backward of an output, parameters apart."""
    own = {each._cdata for each in map(storage, model.parameters())}
    found: dict[int, int] = {}
    pending: list[Any] = [output.grad_fn]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        pending += [edge for edge, _ in node.next_functions if edge is not None]
        for each in map(storage, getattr(node, "saved_tensors", ())):
            found[each._cdata] = each.nbytes()
    return sum(nbytes for key, nbytes in found.items() if key not in own)


def storage(tensor: Tensor) -> torch.UntypedStorage:
    """The memory of a tensor, or of this rank's part of it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
