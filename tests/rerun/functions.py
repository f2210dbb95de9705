"""Functions that cannot be traced, and what tests of them share."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def branches(x: Tensor) -> Tensor:
    """Branches on a value, and loops as often as a value says."""
    y = torch.sin(x)
    if y.detach().sum() > 0:
        y = torch.cos(y) * 2
    while y.detach().abs().max() > 0.5:
        y = torch.sin(y) * 0.5
    return torch.sin(y)


class Opaque(torch.autograd.Function):
    """A kernel in numpy, with a numpy backward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return cotangents[0] * torch.from_numpy(np.cos(x.detach().numpy()))


def opaque(x: Tensor) -> Tensor:
    return torch.sin(Opaque.apply(torch.sin(x)))


def data_dependent(x: Tensor) -> Tensor:
    """Shapes that depend on values."""
    return (
        torch.sin(torch.sin(x)[x > 0]).sum() + torch.unique(x.detach().round()).numel()
    )


def item(x: Tensor) -> Tensor:
    return torch.sin(x * float(x.detach().max()))


def traceable(x: Tensor) -> Tensor:
    """What the trace engine could do as well."""
    return torch.sin(torch.sin(torch.sin(x)))


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "grad_grad": lambda f, x: torch.func.grad(
        lambda x: torch.func.grad(lambda x: f(x).sum())(x).square().sum()
    )(x),
    "vjp": lambda f, x: torch.func.vjp(lambda x: f(x).sum(), x)[1](x.new_ones(())),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jvp_grad": lambda f, x: torch.func.jvp(
        torch.func.grad(lambda x: f(x).sum()), (x,), (x,)
    ),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x.expand(3, *x.shape)),
    "vmap_grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(
        x.expand(3, *x.shape)
    ),
    "grad_vmap": lambda f, x: torch.func.grad(
        lambda x: torch.func.vmap(f)(x.expand(3, *x.shape)).sum()
    )(x),
}
