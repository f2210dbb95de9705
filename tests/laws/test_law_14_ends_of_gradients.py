"""Law 14 where a gradient ends in the function: by `detach`, or under `no_grad`.

An opened program ends it there too, so that such functions recompute no more than others.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp

from remat import policies, remat
from tests.laws.derivatives import TORCH
from tests.laws.nests import NESTS
from tests.support import (
    ALIASING,
    assert_close,
    count_operators,
    daily,
    seeded,
    swept,
)

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:.*saves no memory:remat.RematWarning"),
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

P = (seeded(4, 4), seeded(4, 4, seed=1))
X = seeded(3, 4, seed=2)

Weights = tuple[Tensor, Tensor]


def detached(p: Weights, x: Tensor) -> Tensor:
    """As the weight of a loss, the target of another one, or a running scale."""
    y = (x @ p[0]).tanh()
    return y * (y @ p[1]).detach()


def unrecorded(p: Weights, x: Tensor) -> Tensor:
    """A part that is computed under `no_grad`, in several steps."""
    y = (x @ p[0]).tanh()
    with torch.no_grad():
        scale = (y @ p[1]).sigmoid()
        scale = scale * y
    return y * scale


def straight_through(p: Weights, x: Tensor) -> Tensor:
    """As whoever quantizes does: rounded values with the gradient of the others."""
    h = x @ p[0]
    return ((h + (h.round() - h).detach()) @ p[1]).tanh()


def part_of_it(p: Weights, x: Tensor) -> Tensor:
    """A view of what is detached, and of that a view."""
    y = x @ p[0]
    return y.sin() * y.mT.detach()[1:2].mT


def returned(p: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Beside the result what is logged of it."""
    y = (x @ p[0]).tanh()
    return (y @ p[1]).sin(), y.detach()


def returned_unrecorded(p: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """The same under `no_grad`, whose tangents go on."""
    y = (x @ p[0]).tanh()
    with torch.no_grad():
        size = y.square()
    return (y @ p[1]).sin(), size


FUNCTIONS: dict[str, Callable[[Weights, Tensor], Any]] = {
    each.__name__: each
    for each in (
        *(detached, unrecorded, straight_through, part_of_it),
        *(returned, returned_unrecorded),
    )
}


def summed(out: Any) -> Tensor:
    """What is differentiated: all that is returned, so that what ends shows."""
    outputs = out if isinstance(out, tuple) else (out,)
    return sum(torch.sin(each) for each in outputs)  # pyright: ignore[reportReturnType]


def in_nest(nest: str, fun: Callable[..., Any]) -> Callable[[], Any]:
    """A nest of transforms of a function."""
    return lambda: NESTS[nest](TORCH, lambda p, x: summed(fun(p, x)), P, X)


NESTED = ("grad(grad)", "jvp(grad)", "grad(vmap(grad))", "grad(grad(grad))")
CASES = [(name, nest) for name in FUNCTIONS for nest in NESTED]
DAILY = [case for case in CASES if case[1] == "grad(grad)" or case[0] == "returned"]


@pytest.mark.parametrize(
    "case",
    [*DAILY, *swept(case for case in CASES if case not in DAILY)],
    ids=" ".join,
)
def test_no_more_of_a_kind_than_plain_torch(case: tuple[str, str]) -> None:
    """Where everything is saved; and the numbers are those of plain torch."""
    name, nest = case
    plain = in_nest(nest, FUNCTIONS[name])
    run = in_nest(nest, remat(FUNCTIONS[name], policy=policies.everything_saveable))

    assert_close(run(), plain())

    found, most = count_operators(run), count_operators(plain)
    more = {kind: (n, most[kind]) for kind, n in found.items() if n > most[kind]}
    assert more.keys() <= ALIASING | {"aten.clone", "aten.zeros_like"}, more


INSIDE = [policies.everything_saveable, policies.nothing_saveable]


def of_tangents(fun: Callable[..., Any]) -> Tensor:
    """The gradient of a tangent, which goes on by what `detach` and `no_grad` do to it."""

    def tangent(w: Tensor) -> Tensor:
        step = (w.cos(), X.sin())
        return jvp(lambda w, x: summed(fun((w, P[1]), x)).sum(), (w, X), step)[1]

    return grad(tangent)(P[0])


@pytest.mark.parametrize("fun", daily(FUNCTIONS, ["unrecorded", "returned"]))
@pytest.mark.parametrize("inside", INSIDE, ids=repr)
@pytest.mark.parametrize("around", [True, False], ids=["nested", "alone"])
def test_the_gradient_of_a_tangent(fun: Any, inside: Any, around: bool) -> None:
    """Also through a region inside of another one, whose program is run in that one's trace."""
    region: Any = remat(fun, policy=inside)
    if around:
        inner = region
        region = remat(lambda p, x: inner(p, x), policy=policies.everything_saveable)

    for _ in range(2):
        assert_close(of_tangents(region), of_tangents(fun))


def put(p: Weights, x: Tensor) -> Tensor:
    """Numbers without a tangent, in a part of a value that has one."""
    z = x * 1
    z.detach()[0] = 0.0
    return p[0] * z


def copied(p: Weights, x: Tensor) -> Tensor:
    """Numbers without a gradient, in a fresh tensor."""
    z = torch.zeros_like(x)
    z.detach().copy_(x)
    return p[0] * z


def written_since(p: Weights, x: Tensor) -> Tensor:
    """A detached view of what is written to afterwards."""
    z = x.clone()
    d = z.detach()
    z.mul_(x)
    return p[0] * d * z


@pytest.mark.parametrize("fun", [put, copied, written_since])
def test_a_tangent_along_what_has_no_gradient(fun: Any) -> None:
    """An operand that only has a tangent is compared too, before a region is opened."""
    x = seeded(4, 4, seed=2)

    def found(fun: Callable[..., Any]) -> tuple[Tensor, ...]:
        first = grad(lambda w, x: summed(fun((w, P[1]), x)).sum())
        return jvp(lambda x: first(P[0], x), (x,), (x.cos(),))

    region = remat(fun)
    for _ in range(2):
        assert_close(found(region), found(fun))


def test_a_function_that_wants_no_gradient_by_an_operand() -> None:
    """Where that is asked for, to compare, the region stays closed."""

    def fun(p: Weights, x: Tensor) -> Tensor:
        if x.requires_grad:
            raise ValueError("no gradient is taken by x")
        return (x @ p[0]).sin() * x

    def found(fun: Callable[..., Any]) -> tuple[Tensor, ...]:
        first = grad(lambda w: summed(fun((w, P[1]), X)).sum())
        return jvp(first, (P[0],), (P[0].cos(),))

    region = remat(fun)
    for _ in range(2):
        assert_close(found(region), found(fun))


SCALE = torch.nn.Parameter(seeded(4, seed=4))
BIAS = torch.nn.Parameter(seeded(4, seed=5))


def read_under_no_grad(w: Tensor, x: Tensor) -> Tensor:
    """As a running scale is: the caller's own parameter, which the function does not follow."""
    with torch.no_grad():
        scale = SCALE * 2
    return (x @ w * scale).tanh().sum()


def read_detached(w: Tensor, x: Tensor) -> Tensor:
    """The same by `detach`."""
    return (x @ w * SCALE.detach()).tanh().sum()


def read_by_two(w: Tensor, x: Tensor) -> Tensor:
    """One is followed, the other one is not."""
    return (x @ w * SCALE.detach() + BIAS).tanh().sum()


def gradient(f: Any) -> Tensor:
    return grad(f)(P[0], X)


def of_a_gradient(f: Any) -> Tensor:
    return grad(lambda w: grad(f)(w, X).sin().sum())(P[0])


def of_each_example(f: Any) -> Tensor:
    return torch.func.vmap(grad(f), (None, 0))(P[0], X[:, None])


def with_its_value(f: Any) -> Tensor:
    return torch.func.grad_and_value(f)(P[0], X)[1]


def along_a_tangent(f: Any) -> Tensor:
    return jvp(lambda w: f(w, X), (P[0],), (P[1],))[1]


@pytest.mark.parametrize(
    "options",
    [{}, {"policy": policies.everything_saveable}, {"engine": "rerun"}],
    ids=["nothing", "everything", "rerun"],
)
@pytest.mark.parametrize(
    "transform",
    [gradient, of_a_gradient, of_each_example, with_its_value, along_a_tangent],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize(
    "fun",
    [read_under_no_grad, read_detached, read_by_two],
    ids=lambda each: each.__name__,
)
def test_what_is_not_followed_has_nothing_recorded(
    fun: Any, transform: Any, options: dict[str, Any]
) -> None:
    """Results require grad as plain's do: a functional loop would hold each step's graph."""
    region = remat(fun, **options)
    expected = transform(fun)
    for _ in range(3):
        found = transform(region)
        assert found.requires_grad == expected.requires_grad
        assert_close(found, expected)
