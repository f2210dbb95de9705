"""A backward asks an operator for those of its gradients that are read, as autograd does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad
from torch.utils._python_dispatch import TorchDispatchMode

from remat import policies, remat
from tests.support import seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:.*saves no memory:remat.RematWarning"),
]

X, KERNEL, SCALE = seeded(2, 4, 6), seeded(4, 4, 3, seed=1), seeded(6, seed=2)


class Masks(TorchDispatchMode):
    """What the backwards of convolutions and norms are asked for, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        names = [each.name for each in func._schema.arguments]
        if "output_mask" in names:
            self.found.append(list(args[names.index("output_mask")]))
        return func(*args, **(kwargs or {}))


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    return torch.tanh(F.conv1d(x, kernel, padding=1))


def normed(x: Tensor, scale: Tensor) -> Tensor:
    return torch.tanh(F.layer_norm(x, (6,), scale))


def of_penalty(f: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """The gradient by the weight of the size of a gradient by the input."""
    slope = grad(lambda x, weight: f(x, weight).square().sum())
    return grad(lambda weight: slope(x, weight).square().sum())(weight)


@pytest.mark.parametrize(("f", "weight"), [(convolved, KERNEL), (normed, SCALE)])
def test_what_nobody_reads_is_not_asked_for(
    f: Callable[..., Tensor], weight: Tensor
) -> None:
    """Although an outer level differentiates the region by the weight, too."""
    asked: list[list[list[bool]]] = []
    for unit in (f, remat(f, policy=policies.everything_saveable)):
        of_penalty(unit, X, weight)
        with Masks() as masks:
            of_penalty(unit, X, weight)
        asked.append(masks.found)

    assert asked[0][0][:2] == [True, False]
    assert asked[0] == asked[1]


@pytest.mark.parametrize(("f", "weight"), [(convolved, KERNEL), (normed, SCALE)])
def test_what_is_read_is_plains(f: Callable[..., Tensor], weight: Tensor) -> None:
    """The numbers of those that are asked for."""
    found = of_penalty(remat(f), X, weight)

    torch.testing.assert_close(found, of_penalty(f, X, weight), rtol=1e-12, atol=1e-12)
