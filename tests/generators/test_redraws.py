"""Draws that a backward repeats, each from the generator state recorded before it.

Numbers are bitwise those of plain autograd, whatever else draws, is saved, or is dead.
"""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import checkpoint_name, plan, policies, remat
from remat._generators import device_states
from tests.support import (
    assert_bitwise,
    assert_close,
    held_bytes,
    in_turn,
    seeded,
    swept,
)

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
]
STATE = device_states.size_bytes(torch.get_default_device())
names = policies.save_only_these_names
preserve: Any = functools.partial(remat, rng="preserve")


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.4)


def run_of(x: Tensor, count: int = 4) -> Tensor:
    """Each mask is multiplied by what the backward needs."""
    for _ in range(count):
        x = drop(torch.sin(x))
    return torch.sin(x)


def against_the_order(x: Tensor) -> Tensor:
    """The backward needs the last mask first."""
    return drop(drop(drop(x)))


def some_named(x: Tensor) -> Tensor:
    """Draws that a policy may save, each of which moves the generator for the others."""
    h = torch.sin(x)
    for name in ("first", "second", "third"):
        h = torch.sin(h * checkpoint_name(torch.rand_like(h), name))
    return torch.sin(drop(h))


def some_dead(x: Tensor) -> Tensor:
    """Draws between those of the gradients that no gradient needs."""
    torch.rand(3)
    y = torch.sin(drop(torch.sin(x)))
    z = drop(y).detach() * torch.rand(())
    return torch.sin(drop(y)) + z


def other_draws(x: Tensor) -> Tensor:
    """By rejection, by halves, and with probabilities that are computed."""
    h = torch.sin(x * torch.poisson(x.detach().abs() * 3) + torch.randn(7)[:1])
    h = torch.sin(h * torch.bernoulli(torch.sigmoid(h.detach())))
    return torch.sin(h + torch.empty_like(h).exponential_() * torch.randperm(3))


inner = preserve(run_of)


def nested(x: Tensor) -> Tensor:
    return torch.sin(drop(inner(drop(inner(torch.sin(x))))))


def nested_plain(x: Tensor) -> Tensor:
    return torch.sin(drop(run_of(drop(run_of(torch.sin(x))))))


FUNS = [run_of, against_the_order, some_named, some_dead, other_draws, nested]
POLICIES = {
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
    "second": names("second"),
    "ends": names("first", "third"),
    "masks": policies.by_op("aten.bernoulli", "aten.rand_like"),
}


def plain_of(fun: Any) -> Any:
    return nested_plain if fun is nested else fun


def trained(fun: Any) -> list[Tensor]:
    """Two calls from one seed, their backwards in another order, and the generator."""
    torch.manual_seed(7)
    x = seeded(2, 3).requires_grad_()
    calls = [fun(x), fun(x)]
    torch.rand(5)
    found = [*(y.detach() for y in calls), torch.get_rng_state()]
    for y in calls:
        found += torch.autograd.grad(y, x, torch.cos(y.detach()), retain_graph=True)
        found += torch.autograd.grad(y.sum(), x, create_graph=True)
        found += torch.autograd.grad(found[-1].square().sum(), x, allow_unused=True)
    return [each.detach() for each in [*found, torch.get_rng_state(), torch.rand(2)]]


@pytest.mark.parametrize(
    ("policy", "fun"),
    in_turn(POLICIES, [some_named, some_dead, other_draws, nested]),
)
def test_the_same_numbers(fun: Any, policy: str) -> None:
    """Values, gradients of two orders and the generator's state are plain's."""
    region = preserve(fun, policy=POLICIES[policy])
    expected = trained(plain_of(fun))

    assert_close(trained(region), expected)
    torch.manual_seed(7)
    x = seeded(2, 3).requires_grad_()
    found = torch.autograd.grad(region(x).sum(), x)
    torch.manual_seed(7)
    assert_bitwise(found, torch.autograd.grad(plain_of(fun)(x).sum(), x))


@pytest.mark.parametrize(
    ("policy", "num_states"),
    [
        (policies.nothing_saveable, 4),
        (names("second"), 4),
        (policies.everything_saveable, 4),
    ],
    ids=str,
)
def test_one_state_waits_for_a_draw(policy: Any, num_states: int) -> None:
    """Each draw can be repeated by itself, whatever a policy saves."""
    region = preserve(some_named, policy=policy)
    x = seeded(2, 3).requires_grad_()
    saved = region.saved_residuals(x)
    saved_bytes = sum(each.size_bytes for each in saved if each.op != "input")

    assert [each.size_bytes for each in saved if "state" in each.reason] == (
        [STATE] * num_states
    )
    assert held_bytes(region, x) == saved_bytes


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)])
def test_some_gradients_alone(wanted: tuple[int, ...]) -> None:
    """A gradient that needs the last draw alone is right."""

    def two(a: Tensor, b: Tensor) -> Tensor:
        return torch.sin(drop(torch.sin(a))) + torch.sin(drop(torch.sin(b)))

    def gradients(fun: Any) -> Any:
        torch.manual_seed(3)
        args = [seeded(5).requires_grad_(), seeded(5, seed=1).requires_grad_()]
        y = fun(*args)
        return torch.autograd.grad(y.sum(), [args[index] for index in wanted])

    assert_bitwise(gradients(preserve(two)), gradients(two))


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f),
    "grad_grad": lambda f: torch.func.grad(
        lambda x: torch.func.grad(f)(x).square().sum()
    ),
    "vjp_jvp": lambda f: (
        lambda x: torch.func.vjp(
            lambda x: torch.func.jvp(f, (x,), (torch.cos(x),))[1], x
        )[1](torch.ones(()))
    ),
    "jvp_grad": lambda f: (
        lambda x: torch.func.jvp(torch.func.grad(f), (x,), (torch.cos(x),))
    ),
}


@pytest.mark.parametrize(("transform", "fun"), in_turn(TRANSFORMS, FUNS))
def test_under_transforms(fun: Any, transform: str) -> None:
    """All derivatives are of one sample: equal to those of the function with its masks."""

    def found(fun: Any) -> Any:
        torch.manual_seed(3)
        return TRANSFORMS[transform](lambda x: fun(x).square().sum())(seeded(2, 3))

    assert_close(found(preserve(fun)), found(plain_of(fun)))


@pytest.mark.parametrize("randomness", ["different", *swept(["same"])])
@pytest.mark.parametrize("fun", [run_of, some_named, nested])
def test_under_vmap(fun: Any, randomness: Any) -> None:
    """Per-example gradients, and gradients of what is mapped, as without a region."""
    x = seeded(4, 2, 3)

    def per_example(fun: Any) -> Any:
        torch.manual_seed(3)
        gradient = torch.func.grad(lambda x: fun(x).square().sum())
        found = torch.func.vmap(gradient, randomness=randomness)(x)
        return found, torch.get_rng_state()

    def of_mapped(fun: Any) -> Any:
        torch.manual_seed(3)
        mapped = torch.func.vmap(fun, randomness=randomness)
        return torch.func.grad(lambda x: mapped(x).square().sum())(x)

    region = preserve(fun)

    assert_close(per_example(region), per_example(plain_of(fun)))
    assert_close(of_mapped(region), of_mapped(plain_of(fun)))


_library = torch.library.Library("remat_redraws", "DEF")
_library.define("quietly(Tensor x) -> Tensor")
_library.impl(
    "quietly",
    lambda x: torch.rand(x.shape[0], device=x.device),
    "CompositeExplicitAutograd",
)
_library.impl("quietly", lambda x: x.new_empty(x.shape[0]), "Meta")


def somebody_between(x: Tensor) -> tuple[Tensor, Tensor]:
    """An operator that does not say that it draws, as another thread would not."""
    h = drop(torch.sin(drop(torch.sin(x))))
    other = torch.ops.remat_redraws.quietly(x.detach())
    return torch.sin(drop(torch.sin(drop(torch.sin(h))))), other


def test_somebody_else_draws_in_between() -> None:
    """Each draw starts from its own state, so those after it are right too."""

    def values(fun: Any) -> Any:
        torch.manual_seed(3)
        x = seeded(64).requires_grad_()
        y, other = fun(x)
        return y, other, torch.autograd.grad(y.sum(), x), torch.get_rng_state()

    region = preserve(somebody_between)

    assert_bitwise(values(region), values(somebody_between))


class Block(nn.Module):
    """Dropout as transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_a_narrow_block(autocast: bool) -> None:
    """Its dropouts draw the same masks again, and the generator ends in the same state."""
    block = Block()
    region = remat(block)
    x = seeded(2, 8, 32, dtype=torch.float32).requires_grad_()

    def trained(fun: Any) -> Any:
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = fun(x)
        gradients = torch.autograd.grad(y.float().sum(), [x, *block.parameters()])
        return y, gradients, torch.get_rng_state()

    assert_bitwise(trained(region), trained(block))


def test_a_plan_counts_what_waits() -> None:
    """A plan counts one state for each draw, which is what a call then holds."""
    x = seeded(64, 64).requires_grad_()
    found = plan(preserve(run_of), budget=0.9)(x)
    region = preserve(run_of, policy=found.policy)

    assert held_bytes(region, x) == found.saved_bytes
    assert found.problem.fixed_bytes == 4 * STATE


def test_a_compiled_graph_draws_the_same() -> None:
    """A compiler gets each draw with its state: the numbers are the same."""
    region = preserve(run_of)
    compiled = torch.compile(region, backend="aot_eager", fullgraph=True)

    def trained(fun: Any) -> Any:
        torch.manual_seed(3)
        x = seeded(64).requires_grad_()
        y = fun(x)
        return y, torch.autograd.grad(y.sum(), x), torch.get_rng_state()

    assert_bitwise(trained(compiled), trained(run_of))
