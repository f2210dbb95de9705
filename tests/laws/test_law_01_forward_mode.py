"""Law 1, same numbers: tangents, of the kernels and outputs that have rules of their own.

"Without lossy storage, the outputs of one call, and the contributions it makes to
gradients given its cotangents, are bitwise those of `fun` under `.backward()` on a CPU."
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import policies, remat
from tests.laws.derivatives import second, slope
from tests.support import assert_close, seeded, swept

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


@pytest.mark.parametrize("which", [(0,), (0, 1), (2,)], ids=str)
def test_forward_mode_over_a_norm_with_constant_parameters(
    which: tuple[int, ...],
) -> None:
    """Tangents for some of input, weight and bias: torch cannot trace that by itself."""
    args = (seeded(3, 4), seeded(4, seed=1), seeded(4, seed=2))

    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, (4,), w, b).sin().exp()

    def derivative(fun: Any) -> Any:
        def loss(*moved: Tensor) -> Tensor:
            full = list(args)
            for index, tensor in zip(which, moved, strict=True):
                full[index] = tensor
            return fun(*full).sum()

        moved = tuple(args[index] for index in which)
        everything = tuple(range(len(which)))
        return torch.func.jvp(torch.func.grad(loss, everything), moved, moved)

    assert_close(derivative(remat(norm)), derivative(norm))


@pytest.mark.contract
def test_forward_mode_over_an_operator_that_prints_its_arguments() -> None:
    """In-place lerp is looked up by trial, which printed tensors and broke the thread."""

    def mixed(x: Tensor) -> Tensor:
        return (x * 2).lerp_(x.sin(), x.cos())

    x = seeded(3, 4)

    assert_close(slope(remat(mixed))(x), slope(mixed)(x))


@pytest.mark.contract
@pytest.mark.parametrize("wrap", [lambda fun: fun, remat], ids=["plain", "region"])
def test_only_a_backward_asks_for_the_derivative_of_a_tangent(wrap: Any) -> None:
    """`glu` has tangents that torch cannot differentiate: its values can be."""
    weight = seeded(4, 8).requires_grad_()
    fun = wrap(lambda x: F.glu(x @ weight))
    x = seeded(3, 4, seed=1)

    found: Any = torch.func.jvp(fun, (x,), (x,))
    value, tangent = found

    (found,) = torch.autograd.grad(value.sum(), weight, retain_graph=True)
    assert_close(found, torch.autograd.grad(F.glu(x @ weight).sum(), weight)[0])
    with pytest.raises(RuntimeError, match="glu_jvp is not implemented"):
        tangent.sum().backward()


@pytest.mark.contract
def test_forward_mode_beside_a_gradient_that_is_zero() -> None:
    """A formula's zeros without memory are given memory when they leave."""
    x = seeded(3, 4)

    assert_close(slope(remat(torch.sgn))(x), slope(torch.sgn)(x))


@pytest.mark.contract
def test_forward_mode_over_attention_with_a_mask_to_learn() -> None:
    """Which kernel runs depends on what requires grad, also inside forward mode."""
    mask = seeded(6, 6)

    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    def moved(fun: Callable[..., Any]) -> Any:
        first = torch.func.grad(lambda x, m: fun(x, m).sin().sum(), (0, 1))
        return torch.func.jvp(first, (x, mask), (x.cos(), mask.cos()))

    x = seeded(2, 1, 6, 8)

    assert_close(moved(remat(attend)), moved(attend))


@pytest.mark.contract
def test_forward_mode_per_example_beside_a_parameter() -> None:
    """Tangents that are zeros without memory are added to others under two vmaps."""
    weight = seeded(3, seed=1).requires_grad_()

    def fun(x: Tensor) -> Tensor:
        return (x * weight).sin()

    def gradient(fun: Callable[..., Any]) -> Any:
        found = torch.func.vmap(torch.func.jacfwd(fun))(seeded(4, 2, 3))
        return found, torch.autograd.grad(found.cos().sum(), weight)

    assert_close(gradient(remat(fun)), gradient(fun))


def cut_in_two(x: Tensor) -> tuple[Tensor, ...]:
    """Its argument and a value, and what is detached of both."""
    y = x.sin()
    return x.mT, x.detach(), x.detach().mT, y, y.mT.detach()


def in_halves(x: Tensor) -> tuple[Tensor, ...]:
    """The same after a change in place, of parts."""
    y = x.sin().mul_(2)
    return y, y.detach().chunk(2)[0], y.chunk(2)[1]


@pytest.mark.contract
@pytest.mark.parametrize("fun", [cut_in_two, in_halves])
def test_what_is_detached_has_no_tangent(fun: Callable[..., Any]) -> None:
    """In a region that a parameter keeps from running plainly, too."""
    weight = seeded(3, seed=1).requires_grad_()

    def both(x: Tensor) -> tuple[Tensor, ...]:
        return *fun(x), weight.sin()

    x = seeded(2, 3)

    assert_close(
        torch.func.jvp(remat(both), (x,), (x.cos(),)),
        torch.func.jvp(both, (x,), (x.cos(),)),
    )


@pytest.mark.contract
def test_forward_mode_over_an_output_that_no_example_moves() -> None:
    """It is repeated over the batch, without room for a tangent of each example."""
    weight = seeded(3, seed=1).requires_grad_()

    def fun(x: Tensor) -> Tensor:
        return weight.cumsum(0)

    def within(fun: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: fun(x) * x

    def pushed(fun: Callable[..., Tensor]) -> Any:
        x = seeded(2, 3)
        return torch.func.jvp(torch.func.vmap(within(fun)), (x,), (x.cos(),))

    assert_close(pushed(remat(lambda x: remat(fun)(x))), pushed(fun))


@pytest.mark.parametrize("num_classes", [4, *swept([6])])
def test_forward_mode_over_a_class_of_each_row(num_classes: int) -> None:
    """Routing by `F.one_hot` has second derivatives of every order of modes."""

    def routed(x: Tensor) -> Tensor:
        weight, expert = x.softmax(-1).max(-1)
        chosen = F.one_hot(expert, num_classes=num_classes).to(x.dtype)
        return (chosen * weight[:, None] * x.sin().sum()).square().sum()

    x = seeded(3, 4)
    for derive in (torch.func.hessian, slope, second):
        assert_close(derive(remat(routed))(x), derive(routed)(x))


def _inner_value(fun: Any, x: Tensor, w: Tensor) -> Tensor:
    """Values of a gradient by the operand that the region reads, under one by another."""
    value = torch.func.grad_and_value(lambda x: fun(x, w).sin().sum())
    return torch.func.grad_and_value(lambda w: (value(x)[1] * w).sum())(w)[1]


def _of_pullback(fun: Any, x: Tensor, w: Tensor) -> Tensor:
    return torch.func.vjp(lambda w: torch.func.vjp(fun, x, w)[0].sin(), w)[0]


def _of_mapped_pullback(fun: Any, x: Tensor, w: Tensor) -> Tensor:
    """Of directional derivatives, for two cotangents at once."""
    along = lambda x: torch.func.jvp(lambda x: fun(x, w), (x,), (x.cos(),))[1]  # noqa: E731
    found: Any = torch.func.vjp(along, x)
    out, pull = found
    return torch.func.vmap(lambda c: pull(c)[0])(torch.stack([out, out.cos()]))


def _mapped(fun: Any, x: Tensor, w: Tensor) -> Tensor:
    return torch.func.vjp(
        lambda w: torch.func.vmap(lambda x: torch.func.vjp(fun, x, w)[0])(x), w
    )[0]


BETWEEN = {f.__name__[1:]: f for f in (_inner_value, _of_pullback, _of_mapped_pullback)}
READS: dict[str, Any] = {
    "one": lambda x, w: x.tanh(),
    "apart": lambda x, w: x.tanh() * (w.sum(-1, keepdim=True) * 0 + 1),
    "both": lambda x, w: x.tanh() * w,
}


@pytest.mark.parametrize("is_nested", [True, *swept([False])], ids=["nested", "alone"])
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("nest", [*BETWEEN, *swept(["mapped"])])
def test_tangents_of_values_under_levels_of_reverse_mode(
    nest: str, reads: str, is_nested: bool
) -> None:
    """A level that an output does not depend on takes no tangent from it."""
    fun, between = READS[reads], BETWEEN.get(nest, _mapped)
    everything = policies.everything_saveable
    region: Any = remat(fun, policy=everything)
    if is_nested:
        inner: Any = remat(lambda x, w: (fun(x, w), w.sum(-1)), policy=everything)
        region = remat(lambda x, w: (inner(x, w)[0].sin(), x * 3))
    results = {
        "plain": (lambda x, w: fun(x, w).sin()) if is_nested else fun,
        "region": (lambda x, w: region(x, w)[0]) if is_nested else region,
    }
    x, w = seeded(3, 3), seeded(3, seed=1).requires_grad_()

    def pushed(fun: Any) -> Any:
        return torch.func.jvp(lambda x: between(fun, x, w), (x,), (x.sin(),))

    assert_close(pushed(results["region"]), pushed(results["plain"]))


@pytest.mark.parametrize("is_followed", [False, True])
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_forward_mode_mapped_by_autograd(engine: Any, is_followed: bool) -> None:
    """Its own vmap wraps tangents only, and knows few operators: neither `alias` nor a dual's."""
    w, x = seeded(3, 3, 1).requires_grad_(), seeded(3, 4, seed=1)
    inner = remat(torch.tanh)

    def fun(x: Tensor) -> Tensor:
        return inner(F.conv1d(x, w)) * x.sin()

    region = remat(fun, engine=engine)
    x.requires_grad_(is_followed)
    of: Any = torch.autograd.functional
    first = {"vectorize": True, "strategy": "forward-mode"}
    second = {"vectorize": True, "outer_jacobian_strategy": "forward-mode"}

    assert_close(of.jacobian(region, x, **first), of.jacobian(fun, x, **first))
    assert_close(
        of.hessian(lambda x: region(x).sum(), x, **second),
        of.hessian(lambda x: fun(x).sum(), x, **second),
    )
