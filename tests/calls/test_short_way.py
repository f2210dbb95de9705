"""The short way under one level of reverse mode: few frames, the same numbers, the same errors."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap

import remat as package
from remat import SavedTensorModifiedError, first_order, policies, remat
from tests.functions import FUNCTIONS
from tests.support import assert_bitwise, in_turn, on_tensors, scalar_loss, seeded

# Forward mode itself compiles decompositions with torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")

ROOT = str(Path(package.__file__).parent)
W, X, B = seeded(8, 8), seeded(6, 8), seeded(8)
POLICIES = {
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
}


def layer(w: Tensor, x: Tensor, b: Tensor) -> Tensor:
    return (x @ w + b).tanh() * x


def gradient(f: Callable[..., Tensor], x: Tensor = X) -> Tensor:
    return grad(lambda w: f(w, x, B).sum())(W)


def of_each(f: Callable[..., Tensor]) -> Tensor:
    return vmap(lambda x: gradient(f, x))(X)


def in_two_layers(f: Callable[..., Tensor]) -> Tensor:
    return grad(lambda w: f(w, f(w, X, B), B).square().sum())(W)


def squared(f: Callable[..., Tensor]) -> Tensor:
    return grad(lambda w: f(w, X, B).square().sum())(W)


def by_pullback(f: Callable[..., Tensor]) -> Tensor:
    pull = vjp(lambda w: f(w, X, B), W)[1]
    return pull(torch.ones_like(X))[0] + pull(X)[0]


def of_each_pair(f: Callable[..., Tensor]) -> Tensor:
    return vmap(lambda x, w: grad(lambda w: f(w, x, B).sum())(w))(X, W.expand(6, 8, 8))


WAYS = [gradient, of_each, in_two_layers, squared, by_pullback, of_each_pair]


def count_frames(run: Callable[[], object]) -> int:
    """Calls of the package's own Python functions in one run, once all is traced."""
    for _ in range(4):
        run()
    found = 0

    def listen(frame: Any, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(ROOT)

    sys.setprofile(listen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize(("way", "most"), [(gradient, 40), (of_each, 80)])
def test_a_call_and_its_backward_take_few_frames(
    way: Callable[..., Tensor], most: int, kind: str
) -> None:
    """Forward and backward together; the long way takes several times as many."""
    region = remat(layer, policy=POLICIES[kind])

    assert count_frames(lambda: way(region)) <= most


def in_a_pair(w: Tensor, x: Tensor, b: Tensor) -> Any:
    h = x @ w + b
    return h.tanh(), {"input": x, "sine": h.sin()}


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize(("mapped", "most"), [(False, 40), (True, 80)])
def test_results_in_containers_take_few_frames(
    kind: str, mapped: bool, most: int
) -> None:
    """Tuples and dicts, an input among the results."""
    region = remat(in_a_pair, policy=POLICIES[kind])

    def summed(w: Tensor, x: Tensor, b: Tensor) -> Tensor:
        value, others = region(w, x, b)
        return value.sum() + others["input"].sum() + others["sine"].sum()

    way = of_each if mapped else gradient
    assert count_frames(lambda: way(summed)) <= most


def of_parameters(module: nn.Module) -> Any:
    """What `functional_call` puts in place of parameters is captured, and wrapped."""
    given = {name: each.detach() for name, each in module.named_parameters()}
    return lambda x: grad(lambda p: functional_call(module, p, (x,)).sum())(given)


@pytest.mark.parametrize(("mapped", "most"), [(False, 40), (True, 80)])
def test_a_module_takes_few_frames_too(mapped: bool, most: int) -> None:
    """Under `functional_call`, which reads and sets the module's attributes."""
    module: Any = remat(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double())
    module.cache_clear()  # of all of this class in the process
    way = of_parameters(module)

    assert count_frames(lambda: (vmap(way) if mapped else way)(X)) <= most


@pytest.mark.parametrize("first", ["plain", "grad", "grad of grad", "each"])
def test_parameters_of_any_level_get_their_gradients(first: str) -> None:
    """Whichever way the module is called first."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
    given = {name: each.detach() for name, each in module.named_parameters()}

    def gradient(f: nn.Module, p: Any, x: Tensor = X) -> Any:
        return grad(lambda p: functional_call(f, p, (x,)).square().sum())(p)

    def size(f: nn.Module, p: Any) -> Tensor:
        return torch.stack([each.square().sum() for each in gradient(f, p).values()])

    ways: dict[str, Callable[[nn.Module], Any]] = {
        "plain": lambda f: torch.autograd.grad(f(X).sum(), [*module.parameters()]),
        "grad": lambda f: gradient(f, given),
        "grad of grad": lambda f: grad(lambda p: size(f, p).sum())(given),
        "each": lambda f: vmap(lambda x: gradient(f, given, x))(X),
        "of leaves": lambda f: gradient(f, dict(module.named_parameters())),
        "doubled": lambda f: gradient(
            f, {name: each * 2 for name, each in given.items()}
        ),
    }
    region: Any = remat(module)

    for name in (first, *ways, *ways):
        torch.testing.assert_close(ways[name](region), ways[name](module))


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_are_those_of_the_first_call(
    way: Callable[..., Tensor], kind: str
) -> None:
    """The first call takes the long way, later ones the short one."""
    region = remat(layer, policy=POLICIES[kind])

    found = [way(region) for _ in range(4)]

    for each in found:
        assert_bitwise(each, found[0])
    torch.testing.assert_close(found[0], way(layer))


def products(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first output is made as a view of a product in two dimensions."""
    return torch.matmul(x.expand(2, 6, 8), W), x.cos()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("name", "transform"),
    in_turn(["products", *(each.name for each in FUNCTIONS)], ["grad", "vmap_grad"]),
)
def test_later_calls_give_the_bits_of_the_first(name: str, transform: str) -> None:
    """Of every function that the tests know, alone and mapped."""
    known = {each.name: each for each in FUNCTIONS}
    fun = known[name].fun if name in known else products
    args = known[name].make_args() if name in known else (X,)
    region = remat(fun)

    def gradients() -> Any:
        loss, tensors = on_tensors(scalar_loss(region), args)
        gradient = grad(loss, tuple(range(len(tensors))))
        if transform == "grad":
            return gradient(*tensors)
        batches = [torch.stack([each, each * 0.5]) for each in tensors]
        return vmap(gradient, randomness="different")(*batches)

    first = gradients()

    for _ in range(3):
        assert_bitwise(gradients(), first)


def test_what_a_level_or_autograd_around_wants_is_not_lost() -> None:
    """Wrappers hide it: the same call is made with and without something around it."""
    region = remat(layer)
    leaf = W.clone().requires_grad_()

    def loss(f: Callable[..., Tensor], w: Tensor) -> Tensor:
        return grad(lambda x: f(w, x, B).square().sum())(X).square().sum()

    for _ in range(3):
        assert_bitwise(loss(region, W), loss(region, W))
        outer = grad(lambda w: loss(region, w))(W)
        torch.testing.assert_close(outer, grad(lambda w: loss(layer, w))(W))
        (around,) = torch.autograd.grad(loss(region, leaf), leaf)
        torch.testing.assert_close(around, outer)
        pushed = jvp(lambda w: loss(region, w), (W,), (W,))[1]
        torch.testing.assert_close(pushed, (outer * W).sum())


def test_what_was_changed_since_the_forward_is_refused() -> None:
    """As on the long way, by the versions of what the wrappers wrap."""
    region = remat(layer)

    def spoiled(x: Tensor) -> Tensor:
        def loss(w: Tensor, x: Tensor) -> Tensor:
            out = region(w, x, B).sum()
            x.add_(1.0)
            return out

        return grad(loss)(W, x)

    for _ in range(4):
        with pytest.raises(SavedTensorModifiedError, match="changed in place"):
            spoiled(X.clone())


def test_gradients_of_gradients_are_refused_under_first_order() -> None:
    """The long way serves such a call; its numbers are the same."""
    region = remat(layer)

    for _ in range(3):
        with first_order():
            assert_bitwise(gradient(region), gradient(region))


def test_a_gradient_inside_a_level_can_be_differentiated_there() -> None:
    """By torch.autograd.grad with create_graph=True, which torch permits inside grad."""

    def loss(f: Callable[..., Tensor], w: Tensor) -> Tensor:
        (inner,) = torch.autograd.grad(f(w, X, B).square().sum(), w, create_graph=True)
        return inner.square().sum()

    region = remat(layer)
    for _ in range(3):
        torch.testing.assert_close(
            grad(lambda w: loss(region, w))(W), grad(lambda w: loss(layer, w))(W)
        )
