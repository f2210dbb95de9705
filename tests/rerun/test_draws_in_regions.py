"""Draws of a function that runs again inside other regions: each has the numbers of its first run.

Masks and gradients are plain's, and generators and trackers end where plain leaves them.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp
from torch.utils.checkpoint import checkpoint

from remat import random, remat
from tests.random.trackers import GraphSafe, InPlace, Tracker, generator_state
from tests.support import assert_bitwise, assert_close, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]


def drawing(tracker: Tracker) -> dict[str, Any]:
    """Functions that draw more than once, from the default generator or a tracker's state."""

    def twice(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) * x + F.dropout(x.sin(), 0.4)

    def forked(x: Tensor) -> Tensor:
        with tracker.fork("tp"):
            return twice(x)

    def in_turn(x: Tensor) -> Tensor:
        return twice(forked(twice(x)) + forked(x))

    return {"twice": twice, "forked": forked, "in turn": in_turn}


def composed(fun: Any) -> Any:
    return lambda x: fun(fun(x) * 2) + F.dropout(x, 0.5)


def differentiated(fun: Any) -> Any:
    """Draws after a derivative for which the function has run again."""

    def outer(x: Tensor) -> Tensor:
        gradient = grad(lambda x: fun(x).sum())(x)
        return F.dropout(gradient, 0.5) + F.dropout(gradient, 0.4)

    return outer


@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize(
    ("kind", "name", "around"),
    [
        *itertools.product(
            [Tracker, GraphSafe], ["forked", "in turn"], [composed, differentiated]
        ),
        # Under a level of torch.func such a tracker could not write.
        (InPlace, "in turn", composed),
        (Tracker, "twice", composed),
        (Tracker, "twice", differentiated),
    ],
)
def test_a_run_again_inside_draws_as_the_first(
    kind: Any, name: str, around: Any, engine: Any
) -> None:
    """So do two regions inside, one in the other, and draws that follow a derivative."""
    tracker = kind()
    fun = drawing(tracker)[name]
    inner: Any = remat(fun, engine="rerun", rng="preserve")
    outer: Any = remat(around(inner), engine=engine, rng="preserve")

    def step(fun: Any) -> list[Tensor]:
        torch.manual_seed(0)
        tracker.add("tp", 5)
        x = seeded(3, 4).requires_grad_()
        value = fun(x)
        (gradient,) = torch.autograd.grad(value.sum(), x)
        state = tracker.get_states()["tp"]
        ended = state if isinstance(state, Tensor) else state.get_state()
        return [value, gradient, ended.clone(), generator_state()]

    tracker.add("tp", 5)
    with random.register_tracker(tracker):
        expected = step(around(fun))
        for _ in range(2):
            assert_bitwise(step(outer), expected)


@pytest.mark.parametrize("name", ["twice", "forked"])
def test_masks_of_second_derivatives_inside(name: str) -> None:
    tracker = Tracker()
    fun = drawing(tracker)[name]
    inner: Any = remat(fun, engine="rerun", rng="preserve")

    def products(fun: Any) -> Any:
        torch.manual_seed(0)
        tracker.add("tp", 5)
        x = seeded(3, 4)
        return jvp(grad(lambda x: composed(fun)(x).square().sum()), (x,), (x.cos(),))

    tracker.add("tp", 5)
    with random.register_tracker(tracker):
        found = products(remat(inner, rng="preserve"))
        assert_close(found, products(fun))


@pytest.mark.filterwarnings("ignore:.*runs the function again in its backward")
@pytest.mark.parametrize("engine", ["rerun", "auto"])
def test_torchs_checkpoint_inside_draws_again(engine: Any) -> None:
    """It sets generators in its backward, which the function did not set."""
    weight = seeded(4, 4).requires_grad_()

    def layer(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x @ weight, 0.5).sin(), 0.4)

    def fun(x: Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=False)

    def gradient(fun: Any) -> Tensor:
        torch.manual_seed(0)
        return torch.autograd.grad(fun(seeded(3, 4, seed=1)).sum(), weight)[0]

    region: Any = remat(fun, engine=engine, rng="preserve")
    for _ in range(2):
        assert_bitwise(gradient(region), gradient(layer))
