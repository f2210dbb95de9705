"""Randomness that `rng="keys"` refuses.

"An operator that draws from a global or explicit `torch.Generator` raises
`ImplicitRandomnessError` and names operator and line (SDPA and dropout with p=0 do not
draw: judge by arguments, not by tags)." It is the default for functions.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import ImplicitRandomnessError, random, remat
from tests.support import assert_bitwise, default_generator, seeded


def dropout(x: Tensor) -> Tensor:
    return torch.sin(F.dropout(torch.sin(x), 0.5) * 2)


def rrelu(x: Tensor) -> Tensor:
    return F.rrelu(torch.sin(x), 0.1, 0.3, training=True).sin()


def attention(x: Tensor) -> Tensor:
    q = torch.sin(x)[None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sin()[0]


DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "dropout": (dropout, "dropout|bernoulli"),
    "rand": (lambda x: torch.sin(x * torch.rand(3)), "rand"),
    "randn_like": (lambda x: torch.sin(x * torch.randn_like(x)), "randn"),
    "normal_": (lambda x: torch.sin(x * torch.empty(3).normal_()), "normal"),
    "bernoulli": (lambda x: torch.sin(x * torch.bernoulli(x.sigmoid())), "bernoulli"),
    "randperm": (lambda x: torch.sin(x)[torch.randperm(2)], "randperm"),
    "multinomial": (lambda x: x.sin()[:, torch.ones(3).multinomial(1)], "multinomial"),
    "sdpa": (attention, "attention|dropout|bernoulli"),
    "rrelu": (rrelu, "rrelu"),
    "generator": (
        lambda x: torch.sin(x * torch.rand(3, generator=default_generator())),
        "rand",
    ),
}


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize(("fun", "operator"), DRAWS.values(), ids=DRAWS)
def test_keys_refuse_a_generator(
    fun: Callable[[Tensor], Tensor], operator: str, engine: Any
) -> None:
    """The default for functions raises, with operator and line, and says what to do.

    A run without a graph sees the generator move, and says after which call.
    """
    state = torch.get_rng_state()

    with pytest.raises(ImplicitRandomnessError, match=operator) as error:
        remat(fun, engine=engine)(seeded(2, 3).requires_grad_())

    assert "test_random_refused.py:" in str(error.value)
    assert 'rng="preserve"' in str(error.value)
    assert "TensorMeta" not in str(error.value)
    assert_bitwise(torch.get_rng_state(), state)


def frozen_dropout(x: Tensor) -> Tensor:
    return torch.sin(F.dropout(torch.sin(x), 0.5, training=False))


def zero_dropout(x: Tensor) -> Tensor:
    return torch.sin(F.dropout(torch.sin(x), 0.0))


def plain_attention(x: Tensor) -> Tensor:
    q = torch.sin(x)[None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.0).sin()[0]


def multi_head(x: Tensor) -> Tensor:
    q = torch.sin(x)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).sin()


@pytest.mark.contract
@pytest.mark.parametrize(
    "fun", [frozen_dropout, zero_dropout, plain_attention, multi_head]
)
@pytest.mark.parametrize("rng", ["keys", None])
def test_what_does_not_draw_is_allowed(
    fun: Callable[[Tensor], Tensor], rng: Any
) -> None:
    """p=0, evaluation, and attention without dropout are judged by their arguments."""
    x, y = seeded(1, 2, 4, 3).requires_grad_(), seeded(1, 2, 4, 3).requires_grad_()
    found = torch.autograd.grad(remat(fun, rng=rng)(x[0]).sum(), x)

    assert_bitwise(found, torch.autograd.grad(fun(y[0]).sum(), y))


def test_modules_may_ask_for_keys() -> None:
    """`rng="keys"` on a module refuses its dropout, unless it is in evaluation."""
    region = remat(nn.Sequential(nn.Tanh(), nn.Dropout(0.5), nn.Tanh()), rng="keys")
    with pytest.raises(ImplicitRandomnessError):
        region(seeded(2, 3).requires_grad_())

    region = remat(
        nn.Sequential(nn.Tanh(), nn.Dropout(0.5), nn.Tanh()).eval(), rng="keys"
    )
    region(seeded(2, 3).requires_grad_()).sum().backward()


def test_keys_refuse_an_explicit_generator_that_would_run_again() -> None:
    """A generator of the user's counts as well, and is put back."""
    own = torch.Generator(torch.get_default_device()).manual_seed(5)
    before = own.get_state()

    def fun(x: Tensor) -> Tensor:
        return torch.sin(x * torch.rand(3, generator=own))

    region = remat(fun, engine="rerun")
    with pytest.raises(ImplicitRandomnessError, match=r"torch\.rand at"):
        region(seeded(2, 3).requires_grad_())

    assert_bitwise(own.get_state(), before)


def test_what_does_not_draw_runs_again() -> None:
    """Silent dropout, and keys."""
    key = random.key(0)

    def fun(x: Tensor) -> Tensor:
        return random.dropout(key, F.dropout(torch.sin(x), 0.0), 0.5)

    region, x = remat(fun, engine="rerun"), seeded(4, 4).requires_grad_()

    found = torch.autograd.grad(region(x).sum(), x)

    assert_bitwise(found, torch.autograd.grad(fun(x).sum(), x))


def forks(x: Tensor, rate: float = 0.0) -> Tensor:
    """As a tracker does around dropout, which draws nothing at this rate."""
    before = torch.get_rng_state()
    torch.manual_seed(11)
    y = F.dropout(x.sin(), rate)
    torch.set_rng_state(before)
    return y


def sets_last(x: Tensor) -> Tensor:
    y = x.sin()
    torch.manual_seed(11)
    return y


@pytest.mark.parametrize("fun", [forks, sets_last])
def test_a_run_that_sets_a_generator_is_told_so(fun: Any) -> None:
    """Not that an operator draws, which may do nothing; the state is as before."""
    state = torch.get_rng_state()

    refused: Any = remat(fun, engine="rerun")
    with pytest.raises(
        ImplicitRandomnessError, match="or has set one before"
    ) as raised:
        refused(seeded(4).requires_grad_())

    assert "draw from keys" in str(raised.value)
    assert torch.equal(torch.get_rng_state(), state)
    region: Any = remat(fun, engine="rerun", rng="preserve")
    x = seeded(4).requires_grad_()
    assert_bitwise(region(x), fun(x))
