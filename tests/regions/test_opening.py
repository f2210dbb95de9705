"""Regions are opened to higher derivatives: what that takes to find out, and that it is right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

from remat import remat
from remat._regions import functions, opening
from tests.support import assert_close, seeded

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
