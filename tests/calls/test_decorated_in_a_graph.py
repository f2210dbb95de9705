"""Regions that are made inside of what `torch.compile` compiles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

from remat import PolicyError, policies, remat, storage
from tests.calls.graphs import OUTSIDE, compiled, gradients, named
from tests.support import assert_close, graphs_of_torch_compile, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Dynamo's own, of what is between two graphs.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


class Named:
    """A policy of the user's own, with what it was made with."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, value: policies.Value) -> bool:
        return value.names == (self.name,)


class Plain(nn.Module):
    """The same as a module, which draws."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(named(x), 0.5)


plain = Plain()
OF_THE_USER = Named("hidden")


def decorated_inside(x: Tensor) -> Tensor:
    """The decorator with an option."""

    @remat(policy=policies.save_matmul_outputs)
    def scaled(x: Tensor, scale: float) -> Tensor:
        return named(x) * scale

    return scaled(x, 2.0)


def loop_inside(x: Tensor) -> Tensor:
    """A region for each step."""
    for _ in range(2):
        x = remat(named)(x)
    return x


# What is called, and how many of the forward's products the backward has again.
MADE_INSIDE: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "a function": (lambda x: remat(named)(x), 1),
    "a policy": (lambda x: remat(named, policy=OUTSIDE)(x), 0),
    "a policy of the user's": (lambda x: remat(named, policy=OF_THE_USER)(x), 0),
    "a rule": (lambda x: remat(named, policy=lambda v: bool(v.names))(x), 0),
    "a decorator": (decorated_inside, 0),
    "a module": (lambda x: remat(plain)(x), 1),
    "a method": (lambda x: remat(plain.forward)(x), 1),
    "a static argument": (
        lambda x: remat(lambda n, x: named(x) * n, static_argnums=0)(2, x),
        1,
    ),
    "a loop": (loop_inside, 2),
    "in a region": (lambda x: remat(lambda x: remat(named)(x))(x), 1),
}


@pytest.mark.parametrize(("fun", "count"), MADE_INSIDE.values(), ids=MADE_INSIDE)
def test_regions_that_are_made_in_a_graph(fun: Any, count: int) -> None:
    """They recompute as those that are made outside, under their own policies."""
    x, found = seeded(4, 4).requires_grad_(), list[Any]()

    def loss(x: Tensor) -> Tensor:
        return fun(x.exp()).sum()

    torch._dynamo.reset()
    backend, graphs = graphs_of_torch_compile()
    for run in (loss, torch.compile(loss, backend=backend, fullgraph=True)):
        torch.manual_seed(3)
        found.append((*gradients(run, x), torch.get_rng_state()))

    assert_close(*found)
    forward, backward = [each["aten.mm.default"] for each in graphs]
    # Two of each product's in the backward are the derivative's own.
    assert backward - 2 * forward == count


MADE_APART: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "an option that keeps it apart": (
        lambda x: remat(named, engine="rerun")(x),
        "has engine=",
    ),
    "a storage": (
        lambda x: remat(named, saved_inputs=storage.Cast(torch.float32))(x),
        "an option that is made there",
    ),
    "storages": (
        lambda x: remat(named, saved_inputs={"x": storage.Keep()})(x),
        "an option that is made there",
    ),
    "a policy that is made there": (
        lambda x: remat(named, policy=policies.save_only_these_names("hidden"))(x),
        "Make policies and storages, or the region itself, outside",
    ),
    "a policy of the user's that is made there": (
        lambda x: remat(named, policy=Named("hidden"))(x),
        "an option that is made there",
    ),
}
each_made_apart = pytest.mark.parametrize(
    ("fun", "why"), MADE_APART.values(), ids=MADE_APART
)


@each_made_apart
def test_what_is_made_apart(fun: Any, why: str) -> None:
    """It runs between two graphs, and a single graph refuses it and says why."""
    x = seeded(3, 4).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return fun(x.exp()).sum()

    assert_close(gradients(compiled(loss, fullgraph=False), x), gradients(loss, x))
    with pytest.raises(Unsupported, match=why):
        compiled(loss)(x)


@pytest.mark.parametrize(
    ("fun", "error"),
    [
        (lambda x: remat(named, policy=3)(x), PolicyError),  # type: ignore[call-overload]
        (lambda x: remat(named, use_reentrant=True)(x), TypeError),  # type: ignore[call-overload]
        (lambda x: remat(nn.Linear)(4, 4)(x), TypeError),
    ],
    ids=["policy", "option", "class"],
)
def test_what_is_made_wrongly_in_a_graph_says_so(fun: Any, error: Any) -> None:
    """As it does outside."""
    with pytest.raises(error):
        compiled(fun, fullgraph=False)(seeded(3, 4).requires_grad_())
