"""Law 1, same numbers: gradients of single examples, where a kernel meets the mapped dimension.

"Without lossy storage, the outputs of one call, and the contributions it makes to
gradients given its cotangents, are bitwise those of `fun` under `.backward()` on a CPU."
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import remat
from tests.support import assert_close, in_turn, seeded, swept

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_attention_heads_by_transposition_per_example() -> None:
    """A program is mapped although examples lie in memory in another order."""

    def attend(x: Tensor) -> Tensor:
        heads = x.view(2, 6, 2, 4).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return out.transpose(1, 2).reshape(2, 6, 8).sin()

    def per_example(fun: Any) -> Tensor:
        one = torch.func.grad(lambda x: fun(x).sum())
        return torch.func.vmap(one)(seeded(3, 2, 6, 8))

    assert_close(per_example(remat(attend)), per_example(attend))


def test_a_group_norm_in_mixed_precision_per_example() -> None:
    """torch's rules for vmap widen what it gives, and hand two dtypes to its backward's kernel."""
    weight, x = seeded(8, dtype=torch.float32), seeded(3, 2, 8, 4, dtype=torch.bfloat16)
    mix = seeded(4, 4, seed=2, dtype=torch.bfloat16)

    def norm(weight: Tensor, x: Tensor) -> Tensor:
        normed = F.group_norm(x @ mix, 2, weight)
        return (normed.to(x.dtype) @ mix).float().sin().sum()

    def per_example(fun: Any) -> Any:
        return torch.func.vmap(torch.func.grad(fun, argnums=(0, 1)), (None, 0))(
            weight, x
        )

    found, expected = per_example(remat(norm)), per_example(norm)

    assert [each.dtype for each in found] == [torch.float32, torch.bfloat16]
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.solve(matrix, right)


def solve_by_factors(matrix: Tensor, right: Tensor) -> Tensor:
    factors, pivots = torch.linalg.lu_factor(matrix)
    return torch.linalg.lu_solve(factors, pivots, right[:, None])[:, 0]


@pytest.mark.parametrize("fun", [solve, solve_by_factors])
@pytest.mark.parametrize("argnum", [0, 1])
def test_jacobians_of_a_solved_system_per_example(
    fun: Callable[[Tensor, Tensor], Tensor], argnum: int
) -> None:
    """torch takes the factors of other examples where two maps leave a dimension between them."""
    matrices = seeded(3, 5, 5) + 4 * torch.eye(5, dtype=torch.float64)
    rights = seeded(3, 5, seed=1)
    jacobian = torch.func.jacrev(remat(fun), argnum)

    found = torch.func.vmap(jacobian)(matrices, rights)
    found_for_one = torch.func.vmap(jacobian, (None, 0))(matrices[0], rights)

    plain = torch.func.jacrev(fun, argnum)
    each = zip(matrices, rights, strict=True)
    assert_close(found, torch.stack([plain(*args) for args in each]))
    first = [plain(matrices[0], right) for right in rights]
    assert_close(found_for_one, torch.stack(first))


@pytest.mark.parametrize(
    ("adjoint", "solve_many"), in_turn([False, True], [False, True])
)
def test_hessians_of_a_solved_system_per_example(
    solve_many: bool, adjoint: bool
) -> None:
    """The map of a Jacobian of one row gives the right sides a dimension that factors lack."""

    def solved(right: Tensor, matrix: Tensor) -> Tensor:
        factors, pivots = torch.linalg.lu_factor(matrix)
        columns = right.sin()[:, None] * right if solve_many else right.sin()[:, None]
        return torch.linalg.lu_solve(factors, pivots, columns, adjoint=adjoint)

    def hessian(fun: Callable[[Tensor, Tensor], Tensor]) -> Any:
        return torch.func.hessian(lambda right, matrix: fun(right, matrix).sum())

    matrices = seeded(4, 3, 3) + 4 * torch.eye(3, dtype=torch.float64)
    rights = seeded(4, 3, seed=1)

    found = torch.func.vmap(hessian(remat(solved)))(rights, matrices)

    each = zip(rights, matrices, strict=True)
    assert_close(found, torch.stack([hessian(solved)(*args) for args in each]))


def test_a_map_hides_from_a_function_what_is_differentiated_below_it() -> None:
    """As without a region: it may ask, and torch chooses operators by it."""

    def asks(w: Tensor, x: Tensor) -> Tensor:
        h = x @ w
        return h.sin() if h.requires_grad else h.cos()

    def gradient(fun: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        w, x = seeded(4, 4), seeded(3, 2, 4, seed=1)
        return torch.func.grad(lambda w: torch.func.vmap(fun, (None, 0))(w, x).sum())(w)

    assert_close(gradient(remat(asks)), gradient(asks))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", [*swept([nn.GRUCell]), nn.RNNCell])
def test_a_gradient_of_two_maps_of_a_recurrent_cell(kind: Any) -> None:
    """Between two maps torch has rules for these as they are, not for their parts."""
    cell, w = kind(4, 4, dtype=torch.float64).requires_grad_(False), seeded(2, 4, 4)
    vmap = torch.func.vmap

    def gradient(step: Any) -> Tensor:
        def total(x: Tensor) -> Tensor:
            return vmap(lambda w: vmap(step, (None, 0))(w, x))(w).sin().sum()

        return torch.func.grad(total)(seeded(3, 4, 4, seed=1))

    def step(w: Tensor, x: Tensor) -> Any:
        return cell(x @ w, x.sin())

    assert_close(gradient(remat(step)), gradient(step))


@pytest.mark.parametrize("kind", [*swept([nn.LSTMCell]), nn.GRUCell, nn.RNNCell])
def test_a_gradient_of_gradients_per_example_of_a_recurrent_cell(kind: Any) -> None:
    """torch maps these only where a gradient is taken of what is mapped: it takes them apart."""
    cell, x = kind(4, 4, dtype=torch.float64), seeded(3, 4)
    weights = {name: each.detach() for name, each in cell.named_parameters()}

    def step(weights: Any, x: Tensor) -> Tensor:
        state = (x.sin(), x.cos()) if kind is nn.LSTMCell else x.sin()
        returned = torch.func.functional_call(cell, weights, (x, state))
        return returned[0] if isinstance(returned, tuple) else returned

    def second(fun: Any) -> Any:
        one = torch.func.grad(lambda w, x: fun(w, x[None]).square().sum(), argnums=1)
        each = torch.func.vmap(one, (None, 0))
        return torch.func.grad(lambda w: each(w, x).square().sum())(weights)

    assert_close(second(remat(step)), second(step))


def pulled_twice(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The gradient of a pullback's result."""
    return torch.func.grad(lambda x: torch.func.vjp(f, x)[1](x.sum())[0].sin().sum())


def curvature(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Along the tensor itself, of each of three examples."""

    def one(x: Tensor) -> Tensor:
        return torch.func.jvp(torch.func.grad(f), (x,), (x,))[1]

    return lambda x: torch.func.vmap(one)(torch.stack([x, -x, x.mT]))


@pytest.mark.contract
def test_the_trace_of_each_example() -> None:
    """A value for each example is filled in beside the values of the others."""
    x = seeded(3, 4, 4)

    def per_example(fun: Callable[..., Tensor]) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda x: fun(x).sin()))(x)

    assert_close(per_example(remat(torch.trace)), per_example(torch.trace))


@pytest.mark.contract
@pytest.mark.parametrize("second", [pulled_twice, torch.func.hessian, curvature])
def test_second_derivatives_of_a_trace(second: Any) -> None:
    """Its backward fills a diagonal, whose derivative asks in torch which places there are."""

    def of_square(fun: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: fun(x @ x).sin()

    x = seeded(3, 3)
    assert_close(
        second(of_square(remat(torch.trace)))(x), second(of_square(torch.trace))(x)
    )


@pytest.mark.contract
@pytest.mark.parametrize("argnums", [0, 1])
def test_what_no_example_reaches_is_not_mapped(argnums: int) -> None:
    """So that `out_dims=None` takes a result, or a gradient, that all examples share."""

    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().sum() * w.sum(), w.square().sin()

    def run(fun: Callable[..., Any]) -> Any:
        def loss(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            of_both, of_one = fun(x, w)
            return (of_both if argnums == 0 else of_one.sum()), of_one

        one = torch.func.grad(loss, argnums, has_aux=True)
        dims: Any = (0 if argnums == 0 else None, None)
        return torch.func.vmap(one, (0, None), dims)(seeded(4, 3), seeded(3, seed=1))

    assert_close(run(remat(both)), run(both))


@pytest.mark.contract
def test_each_example_drops_parts_of_what_they_share() -> None:
    """Drawn in place there, into a tensor that vmap does not map."""

    def run(fun: Callable[..., Any]) -> Tensor:
        torch.manual_seed(0)
        one = torch.func.grad(lambda x, z: (fun(x).square() * z).sum())
        each = torch.func.vmap(one, (None, 0), randomness="different")
        return each(seeded(8), seeded(3, seed=1))

    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5)

    assert_close(run(remat(dropped, rng="preserve")), run(dropped))


@pytest.mark.contract
def test_the_second_backward_of_a_layer_for_each_example() -> None:
    """Mapped, the gradient of the bias is the cotangent itself, and still an output."""
    x, weight, bias = seeded(3, 4), seeded(2, 4), seeded(2)

    def second(layer: Callable[..., Any]) -> tuple[Tensor, ...]:
        def loss(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
            return layer(x, w, b).sin().sum()

        each: Any = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, None, 0))
        given = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        found = torch.stack([g.cos().sum() for g in each(*given, x)])
        return torch.autograd.grad(found.sum(), given)

    assert_close(second(remat(F.linear)), second(F.linear))


@pytest.mark.contract
def test_a_strided_copy_of_each_example() -> None:
    """Its derivative writes to a strided view, for which torch's vmap has no rule."""
    x = seeded(3, 4)

    def per_example(fun: Callable[..., Any]) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda x: fun(x).sin().sum()))(x)

    for size, stride in (((), ()), ((2, 2), (2, 1))):
        fun = functools.partial(torch.as_strided_copy, size=size, stride=stride)
        assert_close(per_example(remat(fun)), per_example(fun))


@pytest.mark.contract
def test_a_function_that_runs_again_for_each_example() -> None:
    """It is run as torch runs it there, and takes apart what vmap has no rule for."""
    x, start = seeded(3, 4), torch.tensor(1)

    def per_example(fun: Callable[..., Any]) -> Tensor:
        one = torch.func.grad(lambda x: fun(x, 0, start, 2).sin().sum())
        return torch.func.vmap(one)(x)

    again = remat(torch.narrow, engine="rerun")

    assert_close(per_example(again), per_example(torch.narrow))
