"""A function that sets the state of a default generator: a trace cannot repeat that, a run can."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import (
    ImplicitRandomnessError,
    RematWarning,
    SideEffectError,
    modules,
    remat,
)
from tests.support import assert_bitwise

pytestmark = pytest.mark.contract
SEED = 5


def seeded_anew(x: Tensor) -> Tensor:
    """With the seed that the generator has, which tells the two states apart by nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return F.dropout(x, 0.5)


def repeated(x: Tensor) -> Tensor:
    """As reversible layers draw the masks of their forward again."""
    state = torch.get_rng_state()
    first = F.dropout(x, 0.5)
    torch.set_rng_state(state)
    return F.dropout(first.sin(), 0.5)


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return F.dropout(x, 0.5)


def left(x: Tensor) -> Tensor:
    y = F.dropout(x, 0.5)
    torch.manual_seed(SEED)
    return y


SETTING = [seeded_anew, repeated, forked, left]


def drawn(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Results and gradients of two calls, and what is drawn after them."""
    torch.manual_seed(SEED)
    torch.rand(7)
    found: list[Tensor] = []
    for _ in range(2):
        x = torch.ones(20, requires_grad=True)
        y = call(x)
        found += [y.detach(), *torch.autograd.grad(y.square().sum(), x)]
    return [*found, torch.rand(3)]


@pytest.mark.parametrize("fun", SETTING)
def test_a_trace_refuses_it(fun: Callable[[Tensor], Tensor]) -> None:
    """It would draw on from where the generator stands; the state is as before."""
    state = torch.get_rng_state()

    with pytest.raises((ImplicitRandomnessError, SideEffectError), match="rerun"):
        remat(fun, rng="preserve")(torch.ones(20, requires_grad=True))

    assert_bitwise(torch.get_rng_state(), state)


@pytest.mark.parametrize("engine", ["rerun", "auto"])
@pytest.mark.parametrize("fun", SETTING)
@pytest.mark.filterwarnings("ignore:.*runs the function again:remat.RematWarning")
def test_a_run_repeats_it(fun: Callable[[Tensor], Tensor], engine: str) -> None:
    """The masks are those of the plain function, and so is what is drawn later."""
    region = remat(fun, engine=engine, rng="preserve")

    assert_bitwise(drawn(region), drawn(fun))


def test_a_fork_without_a_draw_is_traced() -> None:
    """The generator is where it was, and later draws continue there."""

    def fun(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            y = F.dropout(x.sin(), 0.0)
        torch.set_rng_state(torch.get_rng_state())
        return F.dropout(y, 0.5)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RematWarning)
        assert_bitwise(drawn(remat(fun, rng="preserve")), drawn(fun))


class Repeating(nn.Module):
    """What lucidrains' reversible blocks call `Deterministic`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.state = torch.get_rng_state()

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            return self.net(x)


def test_a_module_that_draws_again_what_it_drew() -> None:
    torch.manual_seed(SEED)
    plain = Repeating()
    torch.rand(3)
    model = Repeating()
    model.load_state_dict(plain.state_dict())
    model.state = plain.state
    modules.apply(model, lambda name, _: not name, engine="auto")
    x = torch.ones(3, 4)

    with pytest.warns(RematWarning, match="sets a generator's state"):
        found = model(x)

    assert_bitwise(found, plain(x))
    assert_bitwise(
        torch.autograd.grad(found.sum(), [*model.parameters()]),
        torch.autograd.grad(plain(x).sum(), [*plain.parameters()]),
    )
