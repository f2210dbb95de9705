"""A training step and derivatives, which tests of several laws take of a function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def step(module: nn.Module, fun: Callable[..., Any], x: Tensor) -> list[Any]:
    """Output, gradients and buffers of one training step from a fixed seed."""
    torch.manual_seed(0)
    out = fun(x)
    out = out[0] if isinstance(out, tuple) else out
    out.sum().backward()
    return [out.detach(), *(p.grad for p in module.parameters()), *module.buffers()]


def second(fun: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """The derivative of the sine of the first derivative."""
    first = torch.func.grad(lambda x: fun(x).sin().sum())
    return torch.func.grad(lambda x: first(x).sin().sum())


def slope(fun: Callable[..., Any]) -> Callable[[Tensor], Any]:
    """The first derivative and its tangent."""
    first = torch.func.grad(lambda x: fun(x).sin().sum())
    return lambda x: torch.func.jvp(first, (x,), (x.cos(),))
