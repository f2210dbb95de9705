"""Law 3. Least recomputation, where plain autograd differentiates gradients.

Its one level serves all orders. From the second step on, a region whose gradients were recorded
(`create_graph=True`) runs what its policy says at every order.
"""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from remat import checkpoint_name, policies, remat
from tests.support import (
    ALIASING,
    LiveBytes,
    assert_bitwise,
    assert_close,
    count_operators,
    held_bytes,
    seeded,
)

pytestmark = pytest.mark.filterwarnings("ignore::remat.RematWarning")

PRODUCT, TANH = "aten.mm", "aten.tanh"


def layer(x, w):
    """The layer of the tables of nests."""
    return torch.tanh(x @ w)


def gated(x, w):
    """Two products, of which the policies save other values."""
    return x + torch.sin(x @ w) * torch.tanh(x @ w.mT)


class Scaled(torch.autograd.Function):
    """What a program does not show: a region around it stays closed."""

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0] * 3


def scaled(x, w):
    """A layer with a derivative of its own."""
    return Scaled.apply(torch.tanh(x @ w)).sin()


def test_a_new_size_is_no_first_step():
    """With open sizes, what was recorded at one of them is known at the others."""
    region = remat(gated, policy=policies.everything_saveable, dynamic_shapes=True)

    def step(fun, length):
        x, w = (seeded(k, 4, seed=k).requires_grad_() for k in (length, 4))
        (found,) = torch.autograd.grad(fun(x, w).sum(), x, create_graph=True)
        return torch.autograd.grad(found.square().sum(), (x, w))

    step(region, 2)
    for length in (3, 5):
        found, expected = (
            count_operators(step, fun, length)[PRODUCT] for fun in (region, gated)
        )
        assert found == expected
        assert_close(step(region, length), step(gated, length))


def partly_detached(x, w):
    """A value that waits is an output, too, of which autograd must know nothing."""
    h = torch.tanh(x @ w)
    return h.detach(), h * h


def chosen(x, w):
    """Masks and indices wait, which have no gradients."""
    h = x @ w
    return torch.where(h > 0, h * h, h.sin()) + h.sort(-1)[0].sin()


def weights():
    """One square matrix for each of four layers."""
    return [(seeded(16, 16, seed=k) / 3).requires_grad_() for k in range(4)]


def stacked(f, x, ws):
    """Four layers in a row."""
    for w in ws:
        x = f(x, w)
    return x


def penalty(f, ws):
    """The gradient of a gradient penalty, and of what it is added to."""
    x = seeded(64, 16).requires_grad_()
    y = stacked(f, x, ws)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return torch.autograd.grad(slope.square().sum() + y.sum(), ws)


def hessian_vector(f, ws):
    """A product of the Hessian of all weights."""
    y = stacked(f, seeded(64, 16), ws)
    slopes = torch.autograd.grad(y.square().sum(), ws, create_graph=True)
    along = [w.detach() for w in ws]
    return torch.autograd.grad(slopes, ws, along)


def third(f, ws):
    """A third derivative, as of a PINN with a second one in its residual."""
    x = seeded(64, 16).requires_grad_()
    y = stacked(f, x, ws).sum()
    for _ in range(2):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        y = y.square().sum()
    return torch.autograd.grad(y, ws)


each_loss = pytest.mark.parametrize("loss", [penalty, hessian_vector, third])
each_layer = pytest.mark.parametrize("f", [layer, gated])


def counted(loss, f) -> Counter[str]:
    """The operators of a step, after those in which regions learn what follows what."""
    ws = weights()
    for _ in range(3):
        loss(f, ws)
    return count_operators(lambda *ws: loss(f, ws), *ws)


@each_loss
@pytest.mark.parametrize("f", [layer, gated, scaled])
@pytest.mark.parametrize(
    "policy",
    [None, policies.save_matmul_outputs, policies.everything_saveable],
    ids=["nothing", "matmuls", "everything"],
)
def test_each_step_has_the_numbers_of_plain_torch(loss, f, policy):
    """The first one, which finds that gradients are recorded, and those after it."""
    region, ws = remat(f, policy=policy), weights()

    for _ in range(3):
        assert_close(loss(region, ws), loss(f, ws))


@pytest.mark.parametrize(
    "policy", [policies.save_matmul_outputs, policies.everything_saveable]
)
def test_a_detached_output_waits_without_a_gradient(policy):
    """Although it is one tensor with what waits for the backward."""
    region, w = remat(partly_detached, policy=policy), weights()[0]

    def loss(f):
        x = seeded(64, 16).requires_grad_()
        y = f(x, w)[1].sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(slope.square().sum() + y, w)

    for _ in range(3):
        assert_close(loss(region), loss(partly_detached))


@pytest.mark.parametrize("hook", ["of the output", "of its node"])
@pytest.mark.parametrize(
    "policy", [policies.save_matmul_outputs, policies.save_only_these_names("h")]
)
def test_hooks_of_an_output_see_its_gradients_alone(policy, hook):
    """Whatever waits beside the output, of which outer gradients go to that alone."""
    region = remat(lambda x, w: checkpoint_name(x @ w, "h").tanh().sin(), policy=policy)
    seen: list[int] = []

    def halved(gradient):
        seen.append(gradient.dim())
        return gradient / 2

    def loss():
        x, w = seeded(64, 16).requires_grad_(), weights()[0]
        y = region(x, w)
        if hook == "of the output":
            y.register_hook(halved)
        else:
            y.grad_fn.register_prehook(lambda gradients: (*map(halved, gradients),))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), w)

    first = loss()
    for _ in range(2):
        seen.clear()
        assert_close(loss(), first)
        assert seen == [2]


@each_loss
@pytest.mark.parametrize("f", [layer, gated, chosen])
def test_everything_runs_what_plain_torch_runs(loss, f):
    """No operator more."""
    region = remat(f, policy=policies.everything_saveable)

    plain, found = counted(loss, f), counted(loss, region)

    computing = found.keys() - ALIASING
    assert {op: found[op] for op in computing if found[op] > plain[op]} == {}
    assert (found[PRODUCT], found[TANH]) == (plain[PRODUCT], plain[TANH])


@each_loss
@each_layer
def test_no_product_runs_again_where_products_are_saved(loss, f):
    """At any order; what is between them does."""
    region = remat(f, policy=policies.save_matmul_outputs)

    plain, found = counted(loss, f), counted(loss, region)

    assert found[PRODUCT] == plain[PRODUCT]
    assert found[TANH] > plain[TANH]


def test_a_region_that_saves_nothing_lends():
    """The derivatives of its backward and its forward share what both recompute."""

    def net(x, *ws):
        return stacked(layer, x, ws)

    def loss(f, ws):
        x = seeded(64, 16).requires_grad_()
        (slope,) = torch.autograd.grad(f(x, *ws).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), ws)

    peer = functools.partial(checkpoint, net, use_reentrant=False)

    assert counted(loss, remat(net))[TANH] == counted(loss, peer)[TANH] == 12


@pytest.mark.parametrize("loss", [penalty, hessian_vector])
def test_the_peak_falls_as_less_is_saved(loss):
    """And is plain's at most."""
    peaks = []
    for policy in (None, policies.save_matmul_outputs, policies.everything_saveable):
        region, ws = remat(gated, policy=policy), weights()
        loss(region, ws)
        loss(region, ws)
        with LiveBytes() as live:
            loss(region, ws)
        peaks.append(live.peak)
    with LiveBytes() as live:
        loss(gated, weights())

    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[1] < peaks[2] <= live.peak


@pytest.mark.parametrize(
    "policy", [policies.save_matmul_outputs, policies.everything_saveable]
)
def test_the_first_order_stays_as_it_was(policy):
    """Its bits, and what it holds."""
    region, (w, *_), x = remat(gated, policy=policy), weights(), seeded(64, 16)
    before = held_bytes(region, x, w)

    penalty(region, weights())

    assert held_bytes(region, x, w) == before
    assert_bitwise(
        torch.autograd.grad(region(x, w).sum(), w),
        torch.autograd.grad(gated(x, w).sum(), w),
    )
