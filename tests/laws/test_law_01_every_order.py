"""Law 1. Same numbers at every order, or plain torch's error.

Each function is a region, differentiated twice by nests of torch.func and of plain autograd,
under policies that save different values of the backward and of tangents.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import grad, jvp, vjp, vmap
from torch.utils._pytree import tree_map_only

from remat import TraceError, checkpoint_name, policies, random, remat, storage
from tests.laws.derivatives import TORCH
from tests.laws.nests import NESTS, loss
from tests.support import assert_close, in_turn, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

WIDTH = 4
W, X = seeded(WIDTH, WIDTH) / 2, seeded(3, WIDTH, seed=1)
COTANGENT = seeded(3, WIDTH, seed=2)
KEY = random.key(3)
POLICIES = {
    "nothing": policies.nothing_saveable,
    "matmuls": policies.save_matmul_outputs,
    "everything": policies.everything_saveable,
}
EVERYTHING = POLICIES["everything"]
SECOND_ORDER = ("grad(grad)", "jvp(grad)", "grad(vmap(grad))")

Unit = Callable[[Tensor, Tensor], Tensor]


class Cubed(torch.autograd.Function):
    """A user's cube, with a backward that can be differentiated, and forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangents[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * tangents[0]


class CubedOnce(torch.autograd.Function):
    """The same with a backward that says that it cannot be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *cotangents: Tensor
    ) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangents[0]


def attention(w: Tensor, x: Tensor) -> Tensor:
    """Each half of a row attends to both."""
    h = (x @ w).view(-1, 2, WIDTH // 2)
    return (torch.softmax(h @ x.view_as(h).mT, -1) @ h).flatten(1)


def in_place(w: Tensor, x: Tensor) -> Tensor:
    """Changes a value, and a part of it, after it was read."""
    h = x @ w
    y = h.sin()
    h = h.clone().mul_(y)
    h[:, 1:3].add_(y[:, :2]).tanh_()
    return h * y


def normalized_without_gradient(w: Tensor, x: Tensor) -> Tensor:
    """A scale that no gradient flows through."""
    h = x @ w
    with torch.no_grad():
        scale = 1 + h.square().mean()
    return torch.tanh(h / scale)


def solved(w: Tensor, x: Tensor) -> Tensor:
    """A system of equations: autograd has another formula for a gradient's gradient."""
    return torch.linalg.solve(w + 3 * torch.eye(WIDTH), x.mT).mT


def hooked(w: Tensor, x: Tensor) -> Tensor:
    """A gradient that a hook makes a constant of."""
    h = x @ w
    if h.requires_grad:
        h.register_hook(torch.detach)
    return torch.tanh(h) @ w


FUNCTIONS: dict[str, Unit] = {
    "layer_norm": lambda w, x: F.layer_norm(x @ w, (WIDTH,), w[0].cos(), w[1]),
    "attention": attention,
    "gelu": lambda w, x: F.gelu(x @ w) @ w,
    "silu": lambda w, x: F.silu(x @ w) @ w,
    "group_norm": lambda w, x: F.group_norm(x @ w, 2, w[0].cos(), w[1]),
    "solve": solved,
    # Its backward writes into complex zeros, which has no formula as an operator.
    "spectrum": lambda w, x: torch.fft.irfft(torch.fft.rfft((x @ w).sin()), n=WIDTH),
    "sparse": lambda w, x: (x @ w).sin().to_sparse().to_dense() @ w,
    "dropout": lambda w, x: random.dropout(KEY, torch.tanh(x @ w), 0.3) @ w,
    "in_place": in_place,
    "autograd.Function": lambda w, x: Cubed.apply(torch.tanh(x @ w)) @ w,
    "no_grad": normalized_without_gradient,
    "hook": hooked,
    "detach": lambda w, x: torch.tanh(x @ w) * (x @ w).detach().sin(),
    "once_differentiable": lambda w, x: CubedOnce.apply(torch.tanh(x @ w)) @ w,
}


def outcome(run: Callable[[], Any]) -> Any:
    """What a run gives, detached, or the type of what it raises."""
    try:
        found = run()
    except (RuntimeError, NotImplementedError) as error:
        return type(error)
    return tree_map_only(Tensor, Tensor.detach, found)


def assert_alike(run: Callable[[Unit], Any], f: Unit, policy: str) -> None:
    """A region gives the numbers of its function, or raises what it raises."""
    region = remat(f, policy=POLICIES[policy])
    found, expected = outcome(lambda: run(region)), outcome(lambda: run(f))

    assert isinstance(found, type) == isinstance(expected, type), (found, expected)
    if isinstance(expected, type):
        assert found is expected
    else:
        assert_close(found, expected)


@pytest.mark.parametrize(
    ("name", "nest", "policy"), in_turn(FUNCTIONS, SECOND_ORDER, POLICIES)
)
def test_second_derivatives_by_torch_func(name: str, nest: str, policy: str) -> None:
    """Of smooth operators, of draws, of what changes in place, and of the user's own rules."""
    assert_alike(lambda f: NESTS[nest](TORCH, f, W, X), FUNCTIONS[name], policy)


#: What each time is tried: a solver, a write, and a product twice.
OF_ONE_POLICY = {
    ("solve", "grad(vmap(grad))"),
    ("in_place", "grad(grad)"),
    ("gelu", "grad(vmap(grad))"),
}


@pytest.mark.parametrize(
    ("name", "nest"),
    [
        pytest.param(*case, marks=() if case in OF_ONE_POLICY else pytest.mark.sweep)
        for case in itertools.product(FUNCTIONS, SECOND_ORDER)
    ],
)
def test_second_derivatives_of_regions_of_one_policy(name: str, nest: str) -> None:
    """Two in one that saves what is between them: it reads what they have computed again."""
    region = functools.partial(remat, policy=policies.save_only_these_names("between"))

    def in_turns(f: Unit) -> Unit:
        return lambda w, x: f(w, checkpoint_name(f(w, x), "between").sin())

    f = FUNCTIONS[name]
    whole = region(in_turns(region(f)))
    found = outcome(lambda: NESTS[nest](TORCH, whole, W, X))
    expected = outcome(lambda: NESTS[nest](TORCH, in_turns(f), W, X))

    if isinstance(expected, type):
        assert found is expected
    else:
        assert_close(found, expected)


def of_pull(read: Callable[[Any, Tensor], Tensor]) -> Callable[[Unit], Any]:
    """A gradient of what is read from a pullback of the function at some weights."""

    def run(f: Unit) -> Any:
        return grad(lambda w: read(vjp(lambda x: f(w, x), X)[1], w))(W)

    return run


def kept_pull(f: Unit) -> Any:
    """A pullback that is called when the gradient around it is complete."""
    kept: list[Any] = []

    def number(w: Tensor) -> Tensor:
        out, pull, *_ = vjp(lambda x: f(w, x), X)
        kept.append(pull)
        return out.square().sum()

    gradient = grad(number)(W)
    return gradient, kept[0](COTANGENT)


def pulled_twice(f: Unit) -> Any:
    """The same pullback for two cotangents, without anything around it."""
    pull = vjp(f, W, X)[1]
    return pull(COTANGENT), pull(COTANGENT.sin()), vmap(pull)(COTANGENT.repeat(2, 1, 1))


def recorded(f: Unit, w: Tensor) -> Tensor:
    """The squares of a gradient that plain autograd takes at some level, and records."""
    (found,) = torch.autograd.grad(loss(f)(w, X), w, create_graph=True)
    return found.square().sum()


def by_leaf(number: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient by plain autograd."""
    leaf = W.clone().requires_grad_()
    return torch.autograd.grad(number(leaf), leaf)[0]


def sine_of_tanh(w: Tensor) -> Tensor:
    """What a region below computes."""
    return w.tanh().sin()


#: Regions that return more than what is differentiated, or whose values wait elsewhere.
RETURNING_MORE: dict[str, Callable[[Tensor], Any]] = {
    "whole numbers": remat(
        lambda w: (sine_of_tanh(w), torch.arange(2)), policy=EVERYTHING
    ),
    "a detached value": remat(
        lambda w: (sine_of_tanh(w), w.detach().sin()), policy=EVERYTHING
    ),
    "offloaded": remat(
        lambda w: (sine_of_tanh(w), w * 2),
        policy=EVERYTHING.stored(storage.Offload(pin=False)),
    ),
}


def tangent_of_gradient(f: Unit, w: Tensor) -> Any:
    """Forward mode over the gradient by the weights."""
    return jvp(grad(lambda w: loss(f)(w, X)), (w,), (w.cos(),))


TWICE_OVER: dict[str, Callable[[Unit], Any]] = {
    "jvp(jvp(grad))": lambda f: jvp(
        lambda w: tangent_of_gradient(f, w), (W,), (W.sin(),)
    ),
    "grad(jvp(grad))": lambda f: grad(
        lambda w: tangent_of_gradient(f, w)[1].square().sum()
    )(W),
    "grad(vmap(jvp(grad)))": lambda f: grad(
        lambda w: (
            vmap(lambda w: tangent_of_gradient(f, w)[1])(torch.stack([w, w * w]))
            .square()
            .sum()
        )
    )(W),
}


@pytest.mark.parametrize(("nest", "kind"), in_turn(TWICE_OVER, RETURNING_MORE))
def test_levels_around_forward_mode_over_a_region(kind: str, nest: str) -> None:
    """What a closed one saved has no tangents: its pushed backward stays closed too."""
    found = TWICE_OVER[nest](lambda w, _: RETURNING_MORE[kind](w)[0])

    assert_close(found, TWICE_OVER[nest](lambda w, _: sine_of_tanh(w)))


class HalfDetached(torch.autograd.Function):
    """The sine, whose derivative is a constant to its backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *cotangents: Tensor
    ) -> Tensor:
        (x,) = ctx.saved_tensors
        return cotangents[0] * x.detach().cos()


def inside(rule: Callable[[Tensor], Tensor]) -> Unit:
    """A function around a region with a user's rule, which was traced before."""
    inner = remat(rule, policy=EVERYTHING)
    inner((X @ W).requires_grad_()).sum().backward()
    return lambda w, x: inner(x @ w) @ w


half_detached = HalfDetached.apply
RULES: dict[str, Unit] = {
    "by the class": lambda w, x: HalfDetached.apply(x @ w) @ w,
    "by its method": lambda w, x: half_detached(x @ w) @ w,
    "in a region": inside(lambda x: HalfDetached.apply(x)),
    "a region": inside(half_detached),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", RULES)
def test_a_rule_with_a_derivative_of_its_own(way: str, policy: str) -> None:
    """Its gradient is that of the operators inside, but its gradient's gradient is not."""
    region = remat(RULES[way], policy=POLICIES[policy])

    found = NESTS["grad(grad)"](TORCH, region, W, X)

    assert_close(found, NESTS["grad(grad)"](TORCH, RULES["by the class"], W, X))


PULLED: dict[str, Callable[[Unit], Any]] = {
    "twice": pulled_twice,
    "twice under grad": of_pull(
        lambda pull, w: (pull(COTANGENT)[0] * pull(COTANGENT.sin() @ w)[0]).sum()
    ),
    "the cotangent made of the outcome": of_pull(
        lambda pull, _: pull(pull(COTANGENT)[0])[0].square().sum()
    ),
    "under grad(grad)": lambda f: grad(lambda w: pulled_in_grad(f, w).square().sum())(
        W
    ),
    "after the gradient": kept_pull,
    "outside of torch.func": lambda f: by_leaf(
        lambda w: vjp(lambda x: f(w, x), X)[1](COTANGENT)[0].square().sum()
    ),
}


def pulled_in_grad(f: Unit, w: Tensor) -> Tensor:
    """A gradient of a pullback's squares, at weights that may be differentiated further."""
    return grad(lambda w: vjp(lambda x: f(w, x), X)[1](COTANGENT)[0].square().sum())(w)


def recorded_gradient(f: Unit, w: Tensor) -> Tensor:
    """The same of the squares of torch.func's gradient."""
    first = grad(loss(f))(w, X).square().sum()
    return torch.autograd.grad(first, w, create_graph=True)[0].square().sum()


def recorded_by_a_leaf(f: Unit, w: Tensor) -> Tensor:
    """A gradient by a leaf that no level of torch.func knows."""
    x = X.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(f)(w, x), x, create_graph=True)
    return found.square().sum()


RECORDED: dict[str, Callable[[Unit], Any]] = {
    "in grad": lambda f: grad(lambda w: recorded(f, w))(W),
    "in grad(grad)": lambda f: grad(
        lambda w: grad(lambda w: recorded(f, w))(w).square().sum()
    )(W),
    "in vmap(grad)": lambda f: vmap(
        lambda x: grad(lambda w: recorded(f, w) * (x @ w).sum())(W)
    )(X),
    "around grad": lambda f: by_leaf(lambda w: grad(loss(f))(w, X).square().sum()),
    "around grad, twice": lambda f: by_leaf(lambda w: recorded_gradient(f, w)),
    "around grad(grad)": lambda f: by_leaf(
        lambda w: NESTS["grad(grad)"](TORCH, f, w, X).square().sum()
    ),
    "by a leaf": lambda f: by_leaf(lambda w: recorded_by_a_leaf(f, w)),
}


SMOOTH = ["attention", "in_place", "autograd.Function", "detach"]


@pytest.mark.parametrize(("way", "name", "policy"), in_turn(PULLED, SMOOTH, POLICIES))
def test_pullbacks(way: str, name: str, policy: str) -> None:
    """Called more than once, under a gradient, and after it."""
    assert_alike(PULLED[way], FUNCTIONS[name], policy)


@pytest.mark.parametrize(("way", "name", "policy"), in_turn(RECORDED, SMOOTH, POLICIES))
def test_gradients_that_plain_autograd_records(
    way: str, name: str, policy: str
) -> None:
    """Inside of torch.func's, or around it."""
    assert_alike(RECORDED[way], FUNCTIONS[name], policy)


def unread(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """A layer, one of whose operands gets no gradient."""
    return (x @ w).tanh()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pullback_that_has_ended_where_an_operand_gets_no_gradient(
    policy: str,
) -> None:
    """Plain autograd records it for a captured leaf; the operand gets zeros."""

    def second(unit: Callable[..., Tensor]) -> list[Tensor | None]:
        leaf = W.clone().requires_grad_()
        pull = vjp(lambda x, y: unit(x, y, leaf), X, X.cos())[1]
        found = pull(X.sin())
        found[0].square().sum().backward()
        return [*found, leaf.grad]

    region = remat(unread, policy=POLICIES[policy])
    torch.testing.assert_close(second(region), second(unread))


def size_of_gradient(m: Tensor) -> Tensor:
    """Of a complex determinant. torch looks at values where this is differentiated."""
    region = remat(lambda m: torch.linalg.det(m).abs())
    return grad(region)(m).abs().square().sum()


def test_a_derivative_that_looks_at_values_is_refused_only_where_wanted() -> None:
    """A level outside that does not differentiate it is no reason."""
    matrix = torch.complex(seeded(3, 3), seeded(3, 3, seed=1))
    with pytest.raises(TraceError, match="allclose"):
        grad(size_of_gradient)(matrix)

    found = grad(lambda m: m.abs().sum() * size_of_gradient(m).detach())(matrix)

    assert_close(found, matrix.sgn() * size_of_gradient(matrix))
