"""What `torch.compile` makes of a function, and the gradients that come of it."""

from typing import Any

import torch
from torch import Tensor

from remat import checkpoint_name, policies, remat
from tests.support import seeded

weight = seeded(4, 4).requires_grad_()
settings = {"scale": 2.0}


@remat(policy=policies.save_matmul_outputs)
def layer(x: Tensor) -> Tensor:
    """A region that reaches a parameter and a number beyond its arguments."""
    return torch.sin(x @ weight).cos() * settings["scale"]


def loss(x: Tensor) -> Tensor:
    """Regions between operators."""
    return (layer(layer(x.exp())) + 1).sum()


def compiled(fun: Any, *, fullgraph: bool = True) -> Any:
    torch._dynamo.reset()
    return torch.compile(fun, backend="aot_eager", fullgraph=fullgraph)


def gradients(fun: Any, x: Tensor) -> Any:
    return torch.autograd.grad(fun(x), [x, weight], allow_unused=True)


def named(x: Tensor) -> Tensor:
    """A function, of which each recomputation has one product of matrices."""
    return checkpoint_name(x @ weight, "hidden").sin().exp().sin()


OUTSIDE = policies.save_only_these_names("hidden")
