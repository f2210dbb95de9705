"""After a trace, refused or not, torch's own features are as before."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._higher_order_ops import map as map_
from torch._higher_order_ops.scan import scan

from remat import TraceError, remat
from tests.support import assert_bitwise, seeded


def branch(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, torch.sin, lambda x: x.cos(), (x,))


def loop(x: Tensor) -> Any:
    return torch.while_loop(lambda x: x.sum() < 9, lambda x: (x + 1,), (x.detach(),))[0]


def steps(x: Tensor) -> Any:
    return scan(
        lambda carry, x: (carry + x, carry * x), x[0].detach().clone(), x.detach()
    )[1]


def each_row(x: Tensor) -> Any:
    over: Any = map_
    return over(lambda row: row.sin(), x)


TAKE_FUNCTIONS = [branch, loop, steps, each_row]


@pytest.fixture(autouse=True)
def _without_graphs() -> None:
    torch._dynamo.reset()


@pytest.mark.contract
@pytest.mark.parametrize("fun", TAKE_FUNCTIONS)
def test_an_operator_that_takes_functions_works_after_a_trace(
    fun: Callable[[Tensor], Any],
) -> None:
    """Dynamo has met the trace's modes in it, and does not leave its code alone for that."""
    x = seeded(3, 2).requires_grad_()
    expected = fun(x)
    torch._dynamo.reset()

    with contextlib.suppress(TraceError):
        remat(fun)(x)

    assert_bitwise(fun(x), expected)
    assert_bitwise(remat(fun, engine="rerun")(x), expected)


@pytest.mark.contract
def test_the_functions_that_it_takes_are_compiled_after_a_trace() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def double(x: Tensor) -> Tensor:
        return x * 2.0

    x = seeded(3)
    with contextlib.suppress(TraceError):
        remat(lambda x: torch.cond(x.sum() > 0, double, torch.cos, (x,)))(x)
    torch.compile(double, backend=backend)(x)

    assert len(graphs) == 1
