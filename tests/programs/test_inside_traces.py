"""Programs step by step in a trace, mapped by vmap: what torch cannot map is replaced."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from remat import policies, remat
from tests.support import seeded

pytestmark = pytest.mark.contract

W, X = seeded(3, 3), seeded(2, 3, seed=1)


def rotated(w: Tensor, x: Tensor) -> Tensor:
    """Complex products, of whose conjugates a second derivative takes imaginary parts."""
    turned = (torch.complex(x, x) @ torch.complex(w, w)).exp()
    return (turned @ torch.complex(w, w)).abs()


def test_a_lazy_negation_is_mapped() -> None:
    """The imaginary part of a conjugate is one in a program, and torch cannot map it."""

    def sizes(f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        def size(w: Tensor, scale: Tensor) -> Tensor:
            each = grad(lambda w, x: f(w, x[None]).square().sum())
            return vmap(lambda x: each(w, x * scale))(X).square().sum()

        return vmap(lambda scale: grad(size)(W, scale))(torch.tensor([0.5, 1.0]))

    region = remat(rotated, policy=policies.save_matmul_outputs)

    torch.testing.assert_close(sizes(region), sizes(rotated))
