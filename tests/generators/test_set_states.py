"""A function that sets the state of a default generator: a trace cannot repeat that, a run can."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import (
    ImplicitRandomnessError,
    RecomputationError,
    RematWarning,
    SideEffectError,
    modules,
    random,
    remat,
)
from remat._generators import trackers
from tests.support import assert_bitwise

pytestmark = pytest.mark.contract
SEED = 5


def default() -> Any:
    """Torch's functions for the generator from which tensors of the default device are drawn."""
    kind = torch.get_default_device().type
    return torch if kind == "cpu" else getattr(torch, kind)


def fork() -> contextlib.AbstractContextManager[None]:
    kind = torch.get_default_device().type
    how: dict[str, Any] = {} if kind == "cpu" else {"device_type": kind}
    return torch.random.fork_rng(devices=[0] if how else [], **how)


def seeded_anew(x: Tensor) -> Tensor:
    """With the seed that the generator has, which tells the two states apart by nothing."""
    with fork():
        torch.manual_seed(SEED)
        return F.dropout(x, 0.5)


def repeated(x: Tensor) -> Tensor:
    """As reversible layers draw the masks of their forward again."""
    state = default().get_rng_state()
    first = F.dropout(x, 0.5)
    default().set_rng_state(state)
    return F.dropout(first.sin(), 0.5)


def forked(x: Tensor) -> Tensor:
    with fork():
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
    state = default().get_rng_state()

    with pytest.raises((ImplicitRandomnessError, SideEffectError), match="rerun"):
        remat(fun, rng="preserve")(torch.ones(20, requires_grad=True))

    assert_bitwise(default().get_rng_state(), state)


@pytest.mark.parametrize("engine", ["rerun", "auto"])
@pytest.mark.parametrize("fun", SETTING)
@pytest.mark.filterwarnings("ignore:.*runs the function again:remat.RematWarning")
def test_a_run_repeats_it(fun: Callable[[Tensor], Tensor], engine: Any) -> None:
    """The masks are those of the plain function, and so is what is drawn later."""
    region = remat(fun, engine=engine, rng="preserve")

    assert_bitwise(drawn(region), drawn(fun))


def test_a_fork_without_a_draw_is_traced() -> None:
    """The generator is where it was, and later draws continue there."""

    def fun(x: Tensor) -> Tensor:
        with fork():
            y = F.dropout(x.sin(), 0.0)
        default().set_rng_state(default().get_rng_state())
        return F.dropout(y, 0.5)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RematWarning)
        assert_bitwise(drawn(remat(fun, rng="preserve")), drawn(fun))


class Repeating(nn.Module):
    """What lucidrains' reversible blocks call `Deterministic`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.state = default().get_rng_state()

    def forward(self, x: Tensor) -> Tensor:
        with fork():
            default().set_rng_state(self.state)
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


class _Tracker:
    """States by name, which a trace and a run reach by a name that is made as they run."""

    def __init__(self) -> None:
        self.states = {
            "model": torch.Generator(torch.get_default_device())
            .manual_seed(3)
            .get_state()
        }

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states = dict(states)

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        before = default().get_rng_state()
        default().set_rng_state(self.states["model"])
        try:
            yield
        finally:
            self.states["model"] = default().get_rng_state()
            default().set_rng_state(before)


TRACKER: Any = None


def tracked(x: Tensor) -> Tensor:
    with globals()["track".upper() + "ER"].fork():
        y = F.dropout(x, 0.5)
    return y if y.sum() > -9 else x


@pytest.mark.parametrize("engine", ["rerun", "auto"])
@pytest.mark.filterwarnings("ignore:.*runs the function again:remat.RematWarning")
def test_a_tracker_that_is_not_registered_is_told(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state has gone on since the forward; registered, it is put back."""
    tracker = _Tracker()
    monkeypatch.setitem(globals(), "TRACKER", tracker)
    region = remat(tracked, engine=engine, rng="preserve")
    x = torch.ones(20, requires_grad=True)
    before = default().get_rng_state()
    y = region(x)

    with pytest.raises(
        RecomputationError, match=r"set_states.py:\d+: .*register_tracker"
    ):
        y.sum().backward()

    assert_bitwise(default().get_rng_state(), before)
    known = {*trackers.registered}
    random.register_tracker(tracker)
    try:
        y = region(x)
        assert_bitwise(torch.autograd.grad(y.sum(), x)[0], y)
    finally:
        for number in {*trackers.registered} - known:
            del trackers.registered[number]
