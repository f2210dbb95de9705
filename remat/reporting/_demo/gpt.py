"""A small byte-level GPT in functional style: a dict of parameters and pure functions.

Axes in the comments: b = batch, t = time, c = width, h = heads, v = vocabulary (bytes).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from remat import random
from remat._tracing.naming import checkpoint_name

VOCABULARY = 256
"""One symbol for each value of a byte."""

DROPOUT = 0.1
"""The rate at which each branch of a block is dropped, element by element."""

Group = dict[str, Tensor]
Parameters = dict[str, Group]
Block = Callable[[Mapping[str, Tensor], Tensor, Tensor, int], Tensor]
Loss = Callable[[Parameters, Tensor, Tensor], Tensor]


@final
@dataclass(frozen=True, slots=True)
class GPTShape:
    """The sizes of the model and of one batch."""

    layers: int = 5
    width: int = 128  # of a token's vector, a multiple of `heads`
    heads: int = 4
    time: int = 128  # how many bytes one sequence predicts
    batch: int = 8


def initial_parameters(shape: GPTShape, generator: torch.Generator) -> Parameters:
    """Draws the parameters: normal weights, residual branches scaled down by depth."""

    def normal(*size: int, scale: float = 0.02) -> Tensor:
        drawn = torch.randn(*size, generator=generator, device=generator.device)
        return drawn.to(torch.get_default_device()) * scale

    c = shape.width
    branch = 0.02 / (2 * shape.layers) ** 0.5
    parameters: Parameters = {
        "embedding": {"token": normal(VOCABULARY, c), "time": normal(shape.time, c)},
        "head": {"norm": torch.ones(c), "unembed": normal(c, VOCABULARY)},
    }
    for layer in range(shape.layers):
        parameters[f"block{layer}"] = {
            "norm1": torch.ones(c),
            "qkv": normal(c, 3 * c),
            "out": normal(c, c, scale=branch),
            "norm2": torch.ones(c),
            "up": normal(c, 4 * c),
            "down": normal(4 * c, c, scale=branch),
        }
    return parameters


def block(
    parameters: Mapping[str, Tensor], x: Tensor, key: Tensor | None, heads: int
) -> Tensor:
    """One layer: attention, then a perceptron, each dropped out and added to its input.

    It takes and gives (b, t, c). The weights are norm1 (c,), qkv (c, 3c), out (c, c),
    norm2 (c,), up (c, 4c), down (4c, c); the key decides what is dropped, None nothing.
    """
    x = x + _dropped(_attention(parameters, x, heads), key, 0)
    hidden = _layer_norm(x, parameters["norm2"]) @ parameters["up"]  # (b, t, 4c)
    return x + _dropped(F.gelu(hidden) @ parameters["down"], key, 1)


def _dropped(x: Tensor, key: Tensor | None, place: int) -> Tensor:
    return x if key is None else random.dropout(random.fold_in(key, place), x, DROPOUT)


def _attention(parameters: Mapping[str, Tensor], x: Tensor, heads: int) -> Tensor:
    qkv = _layer_norm(x, parameters["norm1"]) @ parameters["qkv"]  # (b, t, 3c)
    q, k, v = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, h=heads)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    attended = checkpoint_name(attended, "attn")  # (b, h, t, d)
    return rearrange(attended, "b h t d -> b t (h d)") @ parameters["out"]


def one_layer(device: str) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """`block` and arguments by keyword, without dropout: every library computes the same."""
    shape = GPTShape()
    generator = torch.Generator().manual_seed(0)
    own = initial_parameters(shape, generator)["block0"]
    size = shape.batch, shape.time, shape.width
    x = torch.randn(size, generator=generator, device="cpu")
    tensors = {name: each.to(device) for name, each in own.items()}
    given = {"parameters": tensors, "x": x.to(device)}
    return block, given | {"key": None, "heads": shape.heads}


def make_loss(shape: GPTShape, block: Block) -> Loss:
    """The loss of a batch, by `block`, plain or decorated, for each layer.

    It is a pure function of the parameters, of a batch of int64 bytes, shape (b, t + 1),
    and of the step's key: the mean cross-entropy of the next byte, in nats, shape ().
    """

    def loss(parameters: Parameters, batch: Tensor, key: Tensor) -> Tensor:
        tables = parameters["embedding"]
        x = F.embedding(batch[:, :-1], tables["token"]) + tables["time"]  # (b, t, c)
        for layer in range(shape.layers):
            own = random.fold_in(key, layer)
            x = block(parameters[f"block{layer}"], x, own, shape.heads)
        head = parameters["head"]
        logits = _layer_norm(x, head["norm"]) @ head["unembed"]  # (b, t, v)
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return loss


def _layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight)
