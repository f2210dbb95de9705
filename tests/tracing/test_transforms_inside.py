"""Transforms of torch.func that a region's function calls, over tensors that it captures.

A level of torch.func takes its tensors past every mode: what stands for a captured one must be
put there, too. Oracle: the function without a region.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap as batched
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from remat import CapturedTensorError, modules, policies, remat
from tests.support import assert_bitwise, assert_close, daily, grads, seeded, swept

pytestmark = [
    pytest.mark.contract,
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]
ENGINES = ["trace", "rerun"]
GLOBAL = seeded(3, 3, seed=7).requires_grad_()
MEMBER = nn.Linear(3, 3, device="meta", dtype=torch.float64)


def loss(w: Tensor, x: Tensor) -> Tensor:
    """Its second derivatives in `w` and `x` depend on both."""
    return (x @ w).sin().sum()


class Meta(nn.Module):
    """Two gradient steps on kept data inside the forward, with a learned rate: MAML."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        self.rate = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
        self.register_buffer("data", seeded(4, 3, seed=8))

    def forward(self, x: Tensor) -> Tensor:
        def error(weights: dict[str, Tensor]) -> Tensor:
            return functional_call(self.net, weights, (self.data,)).square().mean()

        weights: Any = dict(self.net.named_parameters())
        for _ in range(2):
            steps = grad(error)(weights)
            weights = {key: weights[key] - self.rate * steps[key] for key in weights}
        return functional_call(self.net, weights, (x,)).sin()


class Attribute(nn.Module):
    """A weight that a method differentiates by."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return grad(loss)(self.w, x).sin() + x


def pulled_back(w: Tensor, x: Tensor) -> Tensor:
    out, pull, *_ = vjp(lambda w: (x @ w).sin(), w)
    return pull(out)[0] * out


def pushed_forward(w: Tensor, x: Tensor) -> Tensor:
    out, tangent, *_ = jvp(lambda w: (x @ w).sin(), (w,), (x,))
    return out * tangent


def ensemble(w: Tensor, x: Tensor) -> Tensor:
    weights = {"weight": torch.stack([w, w.sin()]), "bias": w[:2]}
    outs = vmap(lambda each: functional_call(MEMBER, each, (x,)))(weights)
    return outs.sin().sum(0)


def nested(w: Tensor, x: Tensor) -> Tensor:
    return grad(lambda y: grad(loss)(w, y).sin().sum())(x)


def one_by_one(w: Tensor, x: Tensor) -> Tensor:
    return vmap(grad(lambda w, x: (x @ w).sin().sum()), (0, None))(w, x) + x


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grad": lambda w, x: grad(loss)(w, x) + x,
    "vjp": pulled_back,
    "jvp": pushed_forward,
    "vmap": lambda w, x: vmap(lambda row: (x @ row).sin())(w),
    "jacrev": lambda w, x: jacrev(lambda w: (x @ w).sin().sum(0))(w).sum(0) + x,
    "vmap(grad)": one_by_one,
    "grad(grad)": nested,
    "an ensemble": ensemble,
    "a pytree": lambda w, x: grad(lambda p: loss(p["w"], x))({"w": w})["w"] + x,
}
PLACES: dict[str, Callable[[Any, Tensor], Callable[[Tensor], Tensor]]] = {
    "closure": lambda fun, w: lambda x: fun(w, x),
    "partial": partial,
}


def of_global(x: Tensor) -> Tensor:
    return grad(loss)(GLOBAL, x) + x


def by_closure(fun: Callable[[Tensor, Tensor], Tensor], engine: Any) -> Any:
    """(w, x) -> what a region that captures w gives of x."""
    return lambda w, x: remat(lambda x: fun(w, x), engine=engine)(x)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_function(
    name: str, place: str, engine: Any
) -> None:
    """Under plain autograd, of both tensors."""
    w, x = seeded(3, 3).requires_grad_(), seeded(3, 3, seed=1).requires_grad_()
    fun = PLACES[place](CASES[name], w)
    expected = fun(x)

    found = remat(fun, engine=engine)(x)

    assert_bitwise(found, expected)
    assert_bitwise(
        torch.autograd.grad(found.sum(), (w, x)),
        torch.autograd.grad(expected.sum(), (w, x)),
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("outer", [grad, vmap, jacrev], ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", CASES)
def test_an_outer_transform_sees_through(name: str, outer: Any, engine: Any) -> None:
    """Of the captured tensor, which a level outside has wrapped already."""
    w, x = seeded(3, 3), seeded(3, 3, seed=1)
    fun, region = CASES[name], by_closure(CASES[name], engine)
    many = torch.stack([w, w.cos()])

    def apply(fun: Any) -> Any:
        if outer is vmap:
            return vmap(lambda w: grad(lambda w: fun(w, x).sum())(w))(many)
        return outer(lambda w: fun(w, x).sum())(w)

    assert_close(apply(region), apply(fun))


@pytest.mark.parametrize("engine", ENGINES)
def test_second_derivatives_pass_through(engine: Any) -> None:
    """Of a captured tensor, under two levels."""
    w, x = seeded(3, 3), seeded(3, 3, seed=1)
    fun = CASES["grad"]
    region = by_closure(fun, engine)

    def twice(fun: Any) -> Any:
        return grad(lambda w: grad(lambda w: fun(w, x).sum())(w).sin().sum())(w)

    assert_close(twice(region), twice(fun))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_global_is_fetched_anew(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are those of the tensor that the name means at the call."""
    region, x = remat(of_global, engine=engine), seeded(3, 3).requires_grad_()
    region(x)
    other = seeded(3, 3, seed=9).requires_grad_()
    monkeypatch.setitem(globals(), "GLOBAL", other)

    found = torch.autograd.grad(region(x).sum(), (other, x))

    assert_bitwise(found, torch.autograd.grad(of_global(x).sum(), (other, x)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("whole", [True, False], ids=["around", "inside"])
def test_a_gradient_step_in_a_forward(whole: bool, engine: Any) -> None:
    """MAML with the region around the steps, or around the network inside of them."""
    torch.manual_seed(0)
    model, x = Meta(), seeded(2, 3)
    weights = list(model.parameters())
    expected = torch.autograd.grad(model(x).sum(), weights)
    region = remat(model, engine=engine) if whole else model
    if not whole:
        modules.apply(model, "net", engine=engine)

    found = torch.autograd.grad(region(x).sum(), weights)

    assert_bitwise(found, expected) if whole else assert_close(found, expected)


def test_an_attribute_of_a_module() -> None:
    """And what an optimizer writes to it is read at the next call."""
    module, x = Attribute(seeded(3, 3)), seeded(3, 3, seed=1)
    region = remat(module)
    region(x)
    with torch.no_grad():
        module.w.mul_(2)

    found = torch.autograd.grad(region(x).sum(), module.w)

    assert_bitwise(found, torch.autograd.grad(module(x).sum(), module.w))


def test_what_cannot_be_found_is_refused() -> None:
    """A level takes it all the same; the error is ours."""
    w, x = seeded(3, 3).requires_grad_(), seeded(3, 3).requires_grad_()
    kept = iter([w])

    with pytest.raises(CapturedTensorError, match="cannot be followed"):
        remat(lambda x: grad(loss)(next(kept), x))(x)


def test_torchs_own_functions_are_put_back() -> None:
    """After a call, and after an error."""
    entrances: Any = (eager_transforms, "_wrap_for_grad"), (batched, "_add_batch_dim")
    before = [getattr(*each) for each in entrances]
    w, x = seeded(3, 3).requires_grad_(), seeded(3, 3).requires_grad_()
    remat(lambda x: grad(loss)(w, x))(x)
    with pytest.raises(ZeroDivisionError):
        remat(lambda x: grad(lambda w: 1 / 0)(w))(x)

    assert [getattr(*each) for each in entrances] == before


def _with_a_parameter_of_its_own(x: Tensor) -> Tensor:
    module = nn.PReLU(4, init=0.3, dtype=x.dtype)
    return module(x) * nn.Parameter(torch.full((4,), 3.0, dtype=x.dtype)).sin()


def _with_a_parameter_of_what_is_mapped(x: Tensor) -> Tensor:
    weight = nn.Parameter(x * 2)
    assert weight.requires_grad
    assert isinstance(weight, nn.Parameter)
    return x * weight.sin()


@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize(
    "made", [_with_a_parameter_of_its_own, _with_a_parameter_of_what_is_mapped]
)
def test_a_parameter_that_the_function_makes_under_vmap(
    made: Callable[[Tensor], Tensor], engine: Any
) -> None:
    """torch makes it of a stand-in in another way, which every transform refuses."""
    region, xs = remat(made, engine=engine), seeded(3, 2, 4)

    def gradient(f: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.func.grad(lambda xs: torch.vmap(f)(xs).sin().sum())(xs)

    assert_bitwise(gradient(region), gradient(made))
    leaf = xs.clone().requires_grad_()
    (found,) = torch.autograd.grad(torch.vmap(region)(leaf).sin().sum(), leaf)
    assert_bitwise(found, gradient(made))


def _stepped(w: Tensor, x: Tensor) -> Tensor:
    """A loss after a step, whose gradient plain autograd takes inside."""
    inner = (x @ w).tanh().square().sum()
    (slope,) = torch.autograd.grad(inner, w, create_graph=True)
    return (x @ (w - 0.1 * slope)).square().sum()


@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize(
    "derive",
    [torch.func.hessian, lambda f: torch.func.jacfwd(torch.func.grad(f))],
    ids=["hessian", "jacfwd(grad)"],
)
def test_plain_autograd_inside_is_differentiated_forward_over_reverse(
    derive: Any, engine: Any
) -> None:
    """Where forward mode and vmap hide that an operand requires grad."""
    w, x = seeded(3, 2), seeded(4, 3, seed=1)
    assert_close(derive(remat(_stepped, engine=engine))(w, x), derive(_stepped)(w, x))


POWERS = {
    "square": torch.square,
    "cube": lambda x: x**3,
    "product": lambda x: x * x * x,
    "of two": lambda x: 2**x,
}
policy_of = pytest.mark.parametrize(
    "policy", [policies.nothing_saveable, policies.everything_saveable], ids=repr
)


@pytest.mark.parametrize("fun", POWERS.values(), ids=POWERS)
@pytest.mark.parametrize(
    "is_gradient", [True, *swept([False])], ids=["a gradient", "alone"]
)
def test_hessians_of_powers_inside_are_differentiated(
    fun: Any, is_gradient: bool
) -> None:
    """Tangents that are zeros are viewed there: torch's own views of fake ones are not fake."""

    def hessians(x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.hessian(lambda x: fun(x).sum()))(x)

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: hessians(x).sin().sum())(x)

    outer, x = gradient if is_gradient else hessians, seeded(2, 3)
    assert_close(grads(remat(outer), [x]), grads(outer, [x]))


@policy_of
@pytest.mark.parametrize("fun", daily(POWERS, ["cube"]))
def test_gradients_of_hessians_of_regions(fun: Any, policy: Any) -> None:
    """Those of the programs of one region, in the same way."""
    x = seeded(2, 3)

    def gradient(fun: Any) -> Tensor:
        hessians = torch.func.vmap(torch.func.hessian(fun))
        return torch.func.grad(lambda x: hessians(x).sin().sum())(x)

    def energy(x: Tensor) -> Tensor:
        return fun(x).sum()

    assert_close(gradient(remat(energy, policy=policy)), gradient(energy))


def test_no_trace_before_shows_in_the_tangent_of_a_view() -> None:
    """torch remembers the shape of such a tangent, and not how much memory it had."""
    w = seeded(2, 2, seed=1)

    def slopes(fun: Any) -> Any:
        def outer(x: Tensor) -> Tensor:
            tangent = torch.ones(2, dtype=x.dtype)
            return torch.func.jvp(fun, (x[0],), (tangent,))[1] * x.sum()

        return outer

    for fun in (lambda x: (x @ w).tanh().sum(), lambda x: (x @ w).sum()):
        plain, x = slopes(fun), seeded(3, 2)
        assert_close(grads(remat(plain), [x]), grads(plain, [x]))


def _wave(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).sin().sum()


def _laplacian(w: Tensor, x: Tensor) -> Tensor:
    """By forward mode over reverse mode."""
    return torch.func.jacfwd(torch.func.grad(_wave, 1), 1)(w, x).sum()


def test_a_gradient_that_frees_the_graph_of_what_is_returned() -> None:
    """An energy and its force at evaluation: nothing differentiates the energy afterwards."""
    layer = nn.Linear(3, 1).double()

    def energy_and_force(place: Tensor) -> tuple[Tensor, Tensor]:
        energy = layer(place).sin().sum()
        return energy, -torch.autograd.grad(energy, place)[0]

    place = seeded(4, 3).requires_grad_()
    found, expected = remat(energy_and_force)(place), energy_and_force(place)
    assert [each.requires_grad for each in found] == [True, False]
    for one, other in zip(found, expected, strict=True):
        assert_bitwise(one, other)


def test_a_forward_over_reverse_inside_is_differentiated_in_both_modes() -> None:
    """Whose forward torch cannot push as an opened region: the closed one is differentiated."""
    w, xs = seeded(3, 4), seeded(5, 3, seed=1)

    def pushed(f: Any) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            return torch.vmap(lambda x: f(w, x))(xs).square().sum()

        return torch.func.jvp(torch.func.grad(loss), (w,), (w,))[1]

    assert_close(pushed(remat(_laplacian)), pushed(_laplacian))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_gradient_of_such_a_product_inside(engine: Any) -> None:
    """A gradient of a forward over a reverse over another such."""
    w, xs = seeded(3, 4), seeded(5, 3, seed=1)

    def product(w: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            return torch.vmap(lambda x: _laplacian(w, x))(xs).square().sum()

        return torch.func.jvp(torch.func.grad(loss), (w,), (w,))[1].sum()

    found = torch.func.grad(remat(product, engine=engine))(w)
    assert_close(found, torch.func.grad(product)(w))


@pytest.mark.parametrize("engine", ENGINES)
def test_second_derivatives_of_a_loss_of_laplacians(engine: Any) -> None:
    """By the parameters of what the Laplacians are taken of."""
    w, xs = seeded(3, 2), seeded(5, 2, seed=1)

    def laplacian(w: Tensor) -> Tensor:
        def of_one(x: Tensor) -> Tensor:
            found: Any = torch.func.hessian(lambda x: torch.tanh(w @ x).sum())(x)
            return found.diagonal().sum()

        return torch.vmap(of_one)(xs).square().mean()

    def second(f: Any) -> Any:
        return torch.func.jacrev(torch.func.jacrev(f))(w)

    assert_close(second(remat(laplacian, engine=engine)), second(laplacian))


def test_a_hessian_of_products_inside() -> None:
    """Whose tangents are views of zeros."""
    w, xs = seeded(3, 2), seeded(5, 2, seed=1)

    def products(w: Tensor) -> Tensor:
        slope = torch.func.grad(lambda x: torch.tanh(w @ x).sum())
        push = torch.vmap(lambda x: torch.func.jvp(slope, (x,), (x,))[1].sum())
        return push(xs).sum()

    assert_close(
        torch.func.hessian(remat(products))(w), torch.func.hessian(products)(w)
    )
