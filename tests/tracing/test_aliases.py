"""Outputs that share memory with each other, with arguments, or with what is dropped."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from remat import MutationError, remat
from remat._torch import trees
from tests.support import assert_bitwise, grads, seeded

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


def test_a_last_view_may_be_changed_in_place() -> None:
    """An output that is a view of something dropped is the caller's own."""

    def last_view(x: Tensor) -> Tensor:
        return (x.sin() * 2).view(-1)

    def changed(fun: Any) -> Any:
        return lambda x: fun(x).add_(1).mul_(3)

    args = [seeded(2, 3)]
    assert_bitwise(
        grads(changed(remat(last_view)), args), grads(changed(last_view), args)
    )


@pytest.mark.contract
def test_parts_of_an_unsafe_split_share_memory() -> None:
    """What `unsafe_chunk` hands out are views, whatever its schema says."""

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        return torch.unsafe_chunk(x, 2)

    assert_bitwise(grads(remat(parts), [seeded(4, 3)]), grads(parts, [seeded(4, 3)]))


class Reversed(torch.autograd.Function):
    """A view of its argument, with the gradient turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -gradient


class Auxiliary(torch.autograd.Function):
    """Its first argument as it is, with a loss hung on it, as for the balance of experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, torch.full_like(ctx.saved_tensors[0], 3.0)


def with_loss(x: Tensor, w: Tensor) -> Tensor:
    return Auxiliary.apply(x, (x @ w).square().sum())  # pyright: ignore[reportReturnType]


def beside_its_base(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    return h, Reversed.apply(h)


def view_of_it(x: Tensor, w: Tensor) -> Any:
    return cast("Tensor", Reversed.apply(x)).T, x @ w


def hooked_view(x: Tensor, w: Tensor) -> Any:
    rows = x.view(-1)
    rows.register_hook(lambda gradient: gradient * 2)
    return rows, x @ w


def hooked_argument(x: Tensor, w: Tensor) -> Any:
    x.register_hook(lambda gradient: gradient * 2)
    return x.view(-1), x @ w


def written_when_detached(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The alias gets a gradient of its own by what is written to it."""
    base = x * 2
    alias = base.detach()
    alias.mul_(w)
    return base, alias


def part_written_when_detached(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    base = x * 2
    alias = base.detach()
    alias[:1].copy_(w[:1])
    return alias, base


def reversed_first(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    base = x.sin() * w
    return Reversed.apply(base), base


def reversed_argument(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x, Reversed.apply(x), w * 1


def views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    base = x.sin() * w
    return base, base[:1], base.view(-1)


def views_before_a_write(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    base = x * w
    view = base[:1]
    base.mul_(w)
    return base, view


def conjugated(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    value = torch.complex(x, w)
    return value, value.conj(), value.imag


def conjugated_before(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Its cotangent is conjugated lazily."""
    value = torch.complex(x, w)
    return value.mH, value


OWN = [with_loss, beside_its_base, view_of_it, hooked_view, hooked_argument]
OTHERS = [
    written_when_detached,
    part_written_when_detached,
    reversed_first,
    reversed_argument,
    views,
    views_before_a_write,
    conjugated,
    conjugated_before,
]


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("fun", [*OWN, *OTHERS])
def test_what_shares_memory_may_have_a_derivative_of_its_own(
    fun: Callable[..., Any], engine: Any
) -> None:
    """It is no view of the argument, or of the other output, to autograd: each output alone."""

    def numbers(f: Callable[..., Any]) -> list[Any]:
        given = [seeded(4, 4, seed=seed).requires_grad_() for seed in range(2)]
        outputs = trees.tensor_leaves(f(*given))
        how: dict[str, Any] = {"allow_unused": True, "retain_graph": True}
        return [
            [y.detach(), *torch.autograd.grad(y.abs().sum(), given, **how)]
            for y in outputs
        ]

    for found, expected in zip(
        numbers(remat(fun, engine=engine)), numbers(fun), strict=True
    ):
        assert_bitwise(found, expected)


def test_a_loss_on_an_argument_without_a_gradient() -> None:
    """The output needs a gradient although what it shares its memory with needs none."""
    x, w = seeded(4, 5), seeded(5, 5, seed=1).requires_grad_()

    (found,) = torch.autograd.grad(remat(with_loss)(x, w).sum(), w)

    assert torch.equal(found, torch.autograd.grad(with_loss(x, w).sum(), w)[0])


def test_only_a_derivative_of_its_own_costs_a_copy() -> None:
    """Views that a user's function stands far from are views."""

    def upstream(x: Tensor) -> tuple[Tensor, Tensor]:
        h = cast("Tensor", Reversed.apply(x.sin())).exp()
        return h, h.T

    h, transposed = remat(upstream)(seeded(4, 5).requires_grad_())

    assert transposed.data_ptr() == h.data_ptr()


@pytest.mark.parametrize("alias", [lambda x: x.detach(), lambda x: x.data.T.T])
def test_a_gradient_that_is_written_to_a_detached_alias_is_returned(alias: Any):
    """The argument changes, without a gradient; what is returned has it."""
    w, rows = seeded(3, 3, seed=1).requires_grad_(), seeded(3, 3, seed=2)

    def fun(x: Tensor) -> Tensor:
        part = alias(x)
        part[1:] = (rows @ w)[1:]
        return part

    def gradient(f: Any) -> list[Tensor]:
        x = seeded(3, 3)
        y = f(x)
        return [y.detach(), x, *torch.autograd.grad(y.square().sum(), w)]

    assert_bitwise(gradient(remat(fun)), gradient(fun))


Pair = tuple[Tensor, Tensor]
#: Two tensors of one storage that have numbers in common, and two that have none.
IN_COMMON: dict[str, Callable[[Tensor], Pair]] = {
    "view": lambda t: (t, t[0]),
    "view_written": lambda t: (t[1], t),
    "past_the_version": lambda t: (t, t.data[0]),
    "bits": lambda t: (t, t.view(torch.int64)[0].view(torch.float64)),
    "diagonal": lambda t: (t.diagonal(), t[2]),
}
APART: dict[str, Callable[[Tensor], Pair]] = {
    "rows": lambda t: (t.data[0], t.data[1]),
    "columns": lambda t: (t.data[:, 0], t.data[:, 2]),
    "empty": lambda t: (t, t[:0].sum(0)[:0]),
    "parts": lambda t: (t.real, t.clone()),
}


def writes(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    return x.sin() * b.sum()


def _given(pair: Callable[[Tensor], Pair]) -> tuple[Tensor, Tensor, Tensor]:
    return seeded(4).requires_grad_(), *pair(seeded(4, 4, seed=1))


def _values(fun: Any, pair: Callable[[Tensor], Pair]) -> list[Tensor]:
    x, a, b = _given(pair)
    y = fun(x, a, b)
    return [y.detach(), a, b, *torch.autograd.grad(y.sum(), x)]


@pytest.mark.contract
@pytest.mark.parametrize("pair", IN_COMMON.values(), ids=IN_COMMON)
def test_a_write_that_shows_in_another_operand_is_refused(
    pair: Callable[[Tensor], Pair],
) -> None:
    """Before anything changes, captured tensors too; a run again sees it."""
    region = remat(writes)
    _values(region, APART["rows"])  # the trace is there, and its operands were apart
    x, a, b = _given(pair)
    before = a.clone()

    with pytest.raises(MutationError, match=r"`a` shares memory with `b`.*make these"):
        region(x, a, b)
    with pytest.raises(MutationError, match="`a` shares memory with `b`"):
        torch.func.grad(lambda x: region(x, a, b).sum())(x.detach())
    with pytest.raises(MutationError, match="closure variable `a` shares memory with"):
        remat(lambda x: writes(x, a, b))(x)
    assert torch.equal(a, before)
    assert_bitwise(_values(remat(writes, engine="rerun"), pair), _values(writes, pair))


@pytest.mark.contract
@pytest.mark.filterwarnings('ignore:.*engine="rerun"')
def test_auto_runs_such_a_call_again() -> None:
    """And only such a one."""
    region = remat(writes, engine="auto")

    for pair in (APART["rows"], IN_COMMON["view"], APART["rows"], IN_COMMON["view"]):
        assert_bitwise(_values(region, pair), _values(writes, pair))


@pytest.mark.contract
@pytest.mark.parametrize("pair", APART.values(), ids=APART)
def test_a_write_beside_another_operand_is_none_to_it(
    pair: Callable[[Tensor], Pair],
) -> None:
    """One storage may hold many tensors, as that of flattened buffers does."""
    assert_bitwise(_values(remat(writes), pair), _values(writes, pair))
