"""What the tests of reports look at: a small stack of attention blocks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remat import checkpoint_name

WIDTH = 32
Parameters = list[dict[str, Tensor]]


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Attention and a perceptron; two values have names."""
    q, k, v = (x @ p["qkv"]).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
    a = checkpoint_name(F.scaled_dot_product_attention(q, k, v), "attn")
    x = x + a.transpose(1, 2).flatten(2) @ p["out"]
    h = checkpoint_name(x @ p["up"], "mlp_up")
    return x + F.gelu(h) @ p["down"]


def loss_of(layer: Callable[..., Tensor]) -> Callable[[Parameters, Tensor], Tensor]:
    """The mean square behind a stack of layers."""

    def loss(parameters: Parameters, x: Tensor) -> Tensor:
        for p in parameters:
            x = layer(p, x)
        return (x**2).mean()

    return loss


def parameters(layers: int = 4, *, requires_grad: bool = False) -> Parameters:
    """Small random weights, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}

    def weight(a: int, b: int) -> Tensor:
        size = a * WIDTH, b * WIDTH
        drawn = torch.randn(size, generator=generator, device="cpu") * 0.05
        return drawn.to(torch.get_default_device()).requires_grad_(requires_grad)

    return [
        {name: weight(*size) for name, size in sizes.items()} for _ in range(layers)
    ]


def batch(size: int = 2, *, device: str | None = None) -> Tensor:
    """An input of shape (size, 16, 32)."""
    return torch.linspace(-1, 1, size * 16 * WIDTH, device=device).view(size, 16, WIDTH)


class Normed(nn.Module):
    """A module with a buffer that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Any:
        """A line, normalized."""
        return torch.tanh(self.norm(self.linear(x)))
