"""What the tests of numerics switches run: a function and its leaves, and autocast around them."""

import torch
from torch import Tensor

from remat import checkpoint_name
from tests.support import seeded

HERE = torch.get_default_device().type
bfloat16 = torch.autocast(HERE, dtype=torch.bfloat16)


def mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Matmuls and pointwise operators."""
    h = checkpoint_name(torch.sin(torch.tanh(x @ w1)), "h")
    return torch.sin(torch.cos(h @ w2)) * 2


def arguments() -> list[Tensor]:
    """Three float32 leaves."""
    shapes = [(3, 4), (4, 4), (4, 4)]
    return [
        seeded(*shape, seed=i, dtype=torch.float32).requires_grad_()
        for i, shape in enumerate(shapes)
    ]
