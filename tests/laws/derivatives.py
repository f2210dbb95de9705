"""A training step and derivatives, which tests of several laws take of a function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tests.laws.nests import SHAPES, Library
from tests.support import seeded

#: What the nests of `tests/laws/nests.py` need.
TORCH = Library(torch.func, torch, tree_leaves, tree_map)


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


def weights(name: str) -> Any:
    """Those of a function of the nests, in float64."""
    if name == "stack":
        first, second = (
            [seeded(*shape, seed=10 * k + each) for each, shape in enumerate(shapes)]
            for k, shapes in enumerate(SHAPES[name])
        )
        return first, second
    return tuple(seeded(*shape, seed=k) for k, shape in enumerate(SHAPES[name]))
