"""Python's `random` and numpy's in a region: a trace says so, a rerun draws the same again."""

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from remat import RematWarning, _user_lines, modules, remat

pytestmark = pytest.mark.contract

DRAWS = {"python": random.random, "numpy": np.random.rand}


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    monkeypatch.setattr(_user_lines, "_said", set())
    random.seed(0)
    np.random.seed(0)


def region_of(draw, **options):
    """A function that a draw decides, a fresh one: it is warned of once a function."""

    class Scaled(torch.nn.Module):
        def forward(self, x):
            return torch.sin(x * draw()).exp()

    return remat(Scaled(), **options)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_trace_warns_that_a_draw_became_a_constant(draw):
    region = remat(lambda x: torch.sin(x * draw()))
    x = torch.ones(3, requires_grad=True)

    with pytest.warns(RematWarning, match="drawn from while it was traced") as told:
        first = region(x)

    assert "test_host_random.py" in str(told[0].message)
    assert 'use engine="rerun"' in str(told[0].message)
    assert told[0].filename.endswith("test_host_random.py")
    assert torch.equal(region(x), first)


def test_it_is_said_once_a_function():
    region = remat(lambda x: x.sin() * random.random())
    with pytest.warns(RematWarning):
        region(torch.ones(3, requires_grad=True))

    region(torch.ones(4, requires_grad=True))  # another trace, and no error


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_rerun_draws_the_same_again(draw):
    region = region_of(draw, engine="rerun")
    x: Any = torch.ones(3, requires_grad=True)
    plain: Any = torch.ones(3, requires_grad=True)
    out = region(x)
    between = draw()
    out.sum().backward()
    after = draw()

    random.seed(0)
    np.random.seed(0)
    torch.sin(plain * draw()).exp().sum().backward()

    assert torch.equal(x.grad, plain.grad)
    assert (between, after) == (draw(), draw())


def test_layers_that_are_dropped_at_random():
    """Stochastic depth by `random.random()`, in blocks that run again."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return x if random.random() < 0.5 else x + torch.tanh(self.linear(x)).sin()

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(8)))
    x = torch.randn(2, 4)

    def gradients() -> list[Any]:
        random.seed(1)
        model.zero_grad()
        model(x).square().sum().backward()
        return [each.grad for each in model.parameters()]

    expected = gradients()
    modules.apply(model, Block, engine="rerun")

    for one, other in zip(gradients(), expected, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_nothing_is_said_where_nothing_is_drawn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remat(lambda x: x.sin().exp())(torch.ones(3, requires_grad=True))


def branching(x, draw):
    """A trace of it is refused after it has drawn."""
    scale = draw()
    return (x * scale).exp() if x.sum() > 0 else x * scale


def writing(x, draw):
    """Its trace starts again, since an argument gets a gradient."""
    out = torch.zeros(3)
    return write(out, x, draw) + out


def write(out, x, draw):
    """Writes what has a gradient to an argument without one."""
    return out.copy_(x * draw()).sin()


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("restarts", [False, True], ids=["refused", "started again"])
def test_a_trace_that_is_given_up_takes_its_draws_back(draw, restarts, monkeypatch):
    x = torch.ones(3, requires_grad=True)
    fun = writing if restarts else branching
    expected = fun(x, draw).detach(), draw()
    random.seed(0)
    np.random.seed(0)

    if restarts:
        monkeypatch.setitem(globals(), "write", remat(write))
        found = fun(x, draw)
    else:
        found = remat(lambda x: fun(x, draw), engine="auto")(x)

    assert torch.equal(found, expected[0])
    assert draw() == expected[1]
