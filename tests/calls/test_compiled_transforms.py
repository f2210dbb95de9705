"""Transforms of torch.func over regions, inside of a graph of `torch.compile`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import policies, remat
from tests.calls.graphs import compiled
from tests.support import assert_close, daily, seeded

pytestmark = [
    pytest.mark.apart,
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:.*saves no memory:remat.RematWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@remat(policy=policies.save_matmul_outputs)
def block(w: Tensor, x: Tensor) -> Tensor:
    """A region of an example or of several, without anything captured."""
    return (x @ w).sin()


def loss(w: Tensor, x: Tensor) -> Tensor:
    """A number of it."""
    return block(w, block(w, x)).square().sum()


FORWARD_OVER_REVERSE: dict[str, Callable[..., Any]] = {
    "hessian": hessian(loss),
    "jvp(jacrev)": lambda w, x: jvp(lambda w: jacrev(loss)(w, x), (w,), (w.cos(),)),
    "jacfwd(grad)": jacfwd(grad(loss)),
}


@pytest.mark.parametrize("fun", daily(FORWARD_OVER_REVERSE, ["hessian"]))
def test_forward_mode_over_a_mapped_gradient(fun: Any) -> None:
    """The node of a region notices the level of forward mode that Dynamo's graph has opened."""
    w, x = seeded(2, 2), seeded(3, 2, seed=1)

    assert_close(compiled(fun)(w, x), fun(w, x))


MAPPED: dict[str, Callable[..., Any]] = {
    "vmap(grad)": vmap(grad(loss), (None, 0)),
    "grad(vmap)": grad(lambda w, x: vmap(loss, (None, 0))(w, x).sum()),
    "jacrev": lambda w, x: jacrev(block)(w, x.sum(0)),
    "vjp": lambda w, x: vjp(block, w, x)[1](x.cos()),
}


@pytest.mark.parametrize("fun", daily(MAPPED, ["vmap(grad)", "vjp"]))
@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_a_further_number_of_examples(fun: Any, dynamic: bool | None) -> None:
    """A mapped size that Dynamo keeps open is a number in the graph of a region."""
    torch._dynamo.reset()
    graph = torch.compile(fun, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    w = seeded(2, 2)

    for examples in (2, 3, 4):
        x = seeded(examples, 3, 2, seed=examples)
        assert_close(graph(w, x), fun(w, x))


def test_a_number_of_examples_that_must_stay_open() -> None:
    """Breaks the graph, as any other size that the user has marked."""
    torch._dynamo.reset()
    fun = vmap(grad(loss), (None, 0))
    graph = torch.compile(fun, backend="aot_eager")
    w, x = seeded(2, 2), seeded(3, 3, 2, seed=1)
    torch._dynamo.mark_dynamic(x, 0)

    assert_close(graph(w, x), fun(w, x))
