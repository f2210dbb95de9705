"""Policies to report on, and totals of what a report says."""

from typing import Any

import torch
from torch import Tensor


def penalty(region: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """The norm of a gradient that torch.func.grad takes inside."""
    layer = region(lambda w, x: torch.tanh(torch.tanh(x @ w) @ w))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        inner = torch.func.grad(lambda v: layer(v, x).square().sum())
        return inner(w).square().sum()

    return loss, (torch.randn(16, 16) / 4, torch.randn(64, 16))
