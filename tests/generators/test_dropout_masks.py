"""A derivative has the dropout mask of the forward, whichever transform it is computed under.

torch.func draws the mask of a tensor that is not contiguous in another order than plain
autograd does. A region draws some values below all transforms, and some under them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap

from remat import remat
from tests.support import seeded, swept

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")

Region = Callable[[Tensor], Tensor]
ROWS = seeded(5, 4, 3).mT
ROW = ROWS[0]


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5)


def dropped_in_place(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5, inplace=True)


def dropped_by_an_operator(x: Tensor) -> Tensor:
    return torch.dropout(x.sin(), p=0.5, train=True)


def alpha_dropped(x: Tensor) -> Tensor:
    """Less what it makes of a dropped number, which is the least here."""
    y = F.alpha_dropout(x.sin(), 0.5, training=True)
    return y - y.detach().amin()


def _gradient(f: Region) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """(gradient, value) of the sum of the squares."""

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        y = f(x)
        return (y**2).sum(), y

    return grad(loss, has_aux=True)


def _pushed(gradient: Callable[[Tensor], Any], x: Tensor) -> tuple[Tensor, ...]:
    found: Any = jvp(gradient, (x,), (torch.ones_like(x),))
    primals, tangents = found
    return *primals, *tangents


def _gradient_of_pushed(f: Region) -> tuple[Tensor, ...]:
    def loss(x: Tensor) -> Any:
        found: Any = jvp(f, (x,), (torch.ones_like(x),))
        y, tangent = found
        return (y * tangent).sum() + (tangent**2).sum(), (y, tangent)

    gradient, found = grad(loss, has_aux=True)(ROW)
    return gradient, *found


#: What each gives is zero where the value is dropped, and only there.
NESTS: dict[str, Callable[[Region], tuple[Tensor, ...]]] = {
    "jvp(grad)": lambda f: _pushed(_gradient(f), ROW),
    "grad(jvp)": _gradient_of_pushed,
    "vmap(jvp(grad))": lambda f: vmap(
        lambda x: _pushed(_gradient(f), x), randomness="different"
    )(ROWS),
    "jvp(vmap(grad))": lambda f: _pushed(
        vmap(_gradient(f), randomness="different"), ROWS
    ),
}
FUNCTIONS: dict[str, Region] = {
    "dropout": dropped,
    "in place": dropped_in_place,
    "operator": dropped_by_an_operator,
    "alpha": alpha_dropped,
}
CASES = [(function, nest) for function in FUNCTIONS for nest in NESTS]
DAILY = [case for case in CASES if case[0] == "dropout" or case[1] == "jvp(grad)"]


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize(
    "case", [*DAILY, *swept(each for each in CASES if each not in DAILY)], ids=" ".join
)
def test_derivatives_have_the_mask_of_the_forward(
    case: tuple[str, str], engine: Any
) -> None:
    """Its zeros are theirs."""
    function, nest = case
    torch.manual_seed(0)

    found = NESTS[nest](remat(FUNCTIONS[function], rng="preserve", engine=engine))

    masks = [each != 0 for each in found]
    assert 0 < masks[0].sum() < masks[0].numel()
    assert all(torch.equal(each, masks[0]) for each in masks)
