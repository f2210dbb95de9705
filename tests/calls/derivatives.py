"""Functions of three numbers, their derivatives, and what calls of a region have cost."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from tests.support import seeded


def counts(region: Any) -> tuple[int, int, int]:
    """Hits, misses and traces kept."""
    info = region.cache_info()
    return info.hits, info.misses, info.currsize


def leaf() -> Tensor:
    """Three numbers that want a gradient."""
    return seeded(3).requires_grad_()


def gradient(fun: Callable[..., Tensor], *args: Any) -> Tensor:
    """The gradient by the first argument of the sum of a result."""
    x, *rest = args
    (found,) = torch.autograd.grad(fun(x, *rest).sum(), x)
    return found


def slope(fun: Callable[..., Tensor], *args: Any) -> Tensor:
    """The same by torch.func."""
    x, *rest = args
    return grad(lambda x: fun(x, *rest).sum())(x.detach())


def cosine(by: float) -> Tensor:
    """The gradient of the sum of `scaled`, in closed form."""
    return by * (by * seeded(3)).cos()
