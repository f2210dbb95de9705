"""Regions are opened to higher derivatives: what that takes to find out, and that it is right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

from remat import checkpoint_name, policies, remat
from remat._regions import functions, opening
from tests.support import assert_close, count_operators, seeded

pytestmark = pytest.mark.contract


def normed(num_norms: int) -> Callable[[Tensor], Tensor]:
    """Of (3, 4): a gradient of each norm reads its mean and its deviation."""

    def stack(x: Tensor) -> Tensor:
        for _ in range(num_norms):
            x = F.layer_norm(x.sin(), (4,))
        return x

    return stack


def twice(f: Callable[[Tensor], Tensor]) -> Tensor:
    inner = grad(lambda x: f(x).cos().sum())
    return grad(lambda x: inner(x).square().sum())(seeded(3, 4))


def test_autograd_is_asked_once_for_norms_of_one_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each question traces a derivative of the whole region: a stack would ask for all of it."""
    traced: list[Any] = []
    trace = functions.trace
    monkeypatch.setattr(
        functions, "trace", lambda each: traced.append(each) or trace(each)
    )
    counts: list[int] = []
    for num_norms in (1, 4):
        monkeypatch.setattr(opening, "_constants", set())
        traced.clear()
        region = remat(normed(num_norms))
        assert_close(twice(region), twice(normed(num_norms)))
        counts.append(len(traced))

    assert counts[0] == counts[1]


def test_what_is_known_of_an_operator_is_known_of_that_argument_alone() -> None:
    """Its other operands have derivatives, in a region that is traced later, too."""

    def weighted(x: Tensor) -> Tensor:
        return F.layer_norm(x.sin(), (4,), x[0].exp(), x[1]).sin()

    for f in (normed(2), weighted):
        assert_close(twice(remat(f)), twice(f))


def test_an_error_that_names_no_argument_teaches_nothing() -> None:
    """As of an operator without any derivative of that order, further on."""
    known = set(opening._constants)
    f = remat(lambda x: F.layer_norm(torch.linalg.eigh(x.T @ x)[1].abs(), (4,)))
    plain = f.__wrapped__

    assert_close(twice(f), twice(plain))
    assert all(
        op._schema.arguments[place].name in {"mean", "rstd"}
        for op, place in opening._constants - known
    )


@pytest.mark.parametrize(
    "inner",
    [None, policies.save_matmul_outputs, policies.save_only_these_names("h")],
    ids=["nothing", "matmuls", "names"],
)
@pytest.mark.filterwarnings("ignore:.*saves no memory:remat.RematWarning")
def test_regions_inside_bound_nothing_where_all_is_saved(inner: Any) -> None:
    """Whatever their policy: no operator runs again for a second derivative, either."""
    w = seeded(4, 4)

    def layer(x: Tensor) -> Tensor:
        return torch.tanh(checkpoint_name(x @ w, "h"))

    def stack(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: x + f(f(x)).sin()

    plain, outer = stack(layer), stack(remat(layer, policy=inner))
    region = remat(outer, policy=policies.everything_saveable)
    assert_close(twice(region), twice(plain))

    found, expected = (count_operators(lambda f=f: twice(f)) for f in (region, plain))
    for op in ("aten.mm", "aten.tanh", "aten.sin", "aten.cos"):
        assert found[op] <= expected[op]
