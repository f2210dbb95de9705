"""Law 12, autocast, where norms meet halves by parameters of single precision.

"Autocast and other numerics switches are part of the signature, and recomputation runs
under the forward's."
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

from remat import policies, remat
from tests.laws.switches import bfloat16
from tests.support import seeded, swept

Function = Callable[..., Tensor]

NORMS: dict[str, Function] = {
    "layer": lambda x, w, b: F.layer_norm(x, (8,), w, b),
    "group": lambda x, w, b: F.group_norm(x, 2, w[:4], b[:4]),
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w[:4], b[:4], training=True),
}


def pushed(fun: Function) -> Function:
    """A Hessian-vector product, forward over reverse."""

    def product(weight: Tensor, x: Tensor, direction: Tensor) -> Tensor:
        return jvp(lambda each: grad(fun)(each, x), (weight,), (direction,))[1]

    return product


def plain(fun: Function) -> Function:
    """A gradient, with an argument that it does not need."""
    return lambda weight, x, direction: grad(fun)(weight, x)


def of_one(fun: Function) -> Function:
    """A derivative of the first example."""
    return lambda weight, x, direction: fun(weight, x[0], direction)


def of_each(fun: Function) -> Function:
    """A derivative of each example."""
    return vmap(fun, in_dims=(None, 0, None))


#: What is asked of a region, one after the other: what is found for one derivative serves the next.
ASKED: dict[str, list[Callable[[Function], Function]]] = {
    "jvp(grad)": [lambda fun: of_one(pushed(fun))],
    "vmap(jvp(grad))": [lambda fun: of_each(pushed(fun))],
    "vmap(grad), vmap(jvp(grad))": [
        lambda fun: of_each(plain(fun)),
        lambda fun: of_each(pushed(fun)),
    ],
}


@pytest.mark.contract
@pytest.mark.parametrize(
    "policy", [policies.nothing_saveable, *swept([policies.everything_saveable])]
)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("asked", ASKED)
def test_norms_between_products_in_half_precision(
    norm: str, policy: Any, asked: str
) -> None:
    """A tangent that torch widens is cast where plain code casts it.

    Gradients of each example are right as well where plain torch's own rules fail.
    """
    shapes = [(8, 8), (8, 8), (3, 2, 4, 8), (8,), (8,)]
    weight, direction, x, scale, bias = (
        seeded(*shape, seed=seed, dtype=torch.float32)
        for seed, shape in enumerate(shapes)
    )

    def loss(weight: Tensor, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        mixed = torch.sin(NORMS[norm](x @ weight, scale, bias) @ weight)
        return mixed.to(torch.promote_types(mixed.dtype, torch.float32)).square().mean()

    region = remat(
        lambda weight, x: loss(weight, x, scale, bias), policy=policy, engine="trace"
    )
    for derivative in ASKED[asked]:
        with bfloat16:
            found = derivative(region)(weight, x, direction)
        exact = derivative(
            lambda weight, x: loss(weight, x, scale.double(), bias.double())
        )(weight.double(), x.double(), direction.double())

        error = torch.linalg.vector_norm(found - exact)
        assert error < 0.1 * torch.linalg.vector_norm(exact)
