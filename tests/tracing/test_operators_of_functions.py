"""Operators that take functions: refused by name and line, and as usable afterwards as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from remat import TraceError, remat
from tests.support import assert_bitwise, seeded

pytestmark = [
    pytest.mark.contract,
    # Dynamo's own, of a scan.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]
rows: Any = map_rows
YES, KEPT = torch.tensor(True), seeded(3, seed=5)


def loop(x: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y.sin()), (zero, x))[1]


def scanned(x: Tensor) -> Tensor:
    return scan(lambda carry, row: (carry + row, (carry * row).clone()), x[0] * 1, x)[1]


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "cond": lambda x: torch.cond(YES, torch.sin, torch.cos, (x,)),
    "cond with a closure": lambda x: torch.cond(
        YES, lambda x: x * KEPT, lambda x: x.cos(), (x,)
    ),
    "map": lambda x: rows(lambda row: row.sin(), x),
    "scan": scanned,
    "while_loop": loop,
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_by_name_and_line(name: str) -> None:
    """In words of the user's: torch's error names a mode of the engine."""
    x, named = seeded(2, 3).requires_grad_(), name.partition(" ")[0]
    reason = f"`{named}\\w*`, an operator that takes functions|an operator that takes"

    with pytest.raises(
        TraceError, match=rf"test_operators_of_functions\.py:\d+: ({reason}).*rerun"
    ):
        remat(CASES[name])(x)


@pytest.mark.parametrize("name", CASES)
def test_it_works_after_the_refusal(name: str) -> None:
    """Dynamo compiled it under the modes of the trace, and is made to forget that."""
    fun, x = CASES[name], seeded(2, 3)
    expected = fun(x)
    with pytest.raises(TraceError):
        remat(fun)(x.clone().requires_grad_())

    assert_bitwise(fun(x), expected)
    for other in CASES.values():
        assert other(x).shape == x.shape


def test_a_function_that_catches_the_refusal_is_refused() -> None:
    """On numbers it would have gone the other way."""

    def fun(x: Tensor) -> Tensor:
        try:
            return torch.cond(YES, torch.sin, torch.cos, (x,))
        except NotImplementedError:
            return x * 2

    with pytest.raises(TraceError, match="`cond`, an operator that takes functions"):
        remat(fun)(seeded(3).requires_grad_())


def associated(x: Tensor) -> Tensor:
    return associative_scan(torch.mul, x, 0, combine_mode="generic")


@pytest.mark.parametrize(
    ("engine", "fun"),
    [("trace", associated), ("rerun", associated), ("rerun", scanned), ("rerun", loop)],
)
def test_where_it_works(engine: Any, fun: Callable[[Tensor], Tensor]) -> None:
    """A scan that torch takes apart is traced; a function that runs again may loop."""
    x = seeded(2, 3).requires_grad_()

    found, expected = remat(fun, engine=engine)(x), fun(x)

    assert_bitwise(found, expected)
    assert_bitwise(
        torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x)
    )
