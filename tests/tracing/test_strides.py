"""A trace knows how kernels lay out what they return, and what writes in place leaves."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap

from remat import remat
from remat._torch import fakes
from tests.support import assert_bitwise, assert_close, grads, seeded, swept

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


_aten: Any = torch.ops.aten
TWO_LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softplus": lambda g, x: _aten.softplus_backward(g, x, 1, 20),
    "elu": lambda g, x: _aten.elu_backward(g, 1, 1, 1, False, x),
    "hardtanh": lambda g, x: _aten.hardtanh_backward(g, x, -1, 1),
    "hardswish": lambda g, x: _aten.hardswish_backward(g, x),
    "hardsigmoid": lambda g, x: _aten.hardsigmoid_backward(g, x),
    "logit": lambda g, x: _aten.logit_backward(g, x),
    "bce": lambda g, x: _aten.binary_cross_entropy_backward(g, x, x),
    "mse": lambda g, x: _aten.mse_loss_backward(g, x, x, 0),
    "mean_mse": lambda g, x: _aten.mse_loss_backward(g.sum(), x, x, 1),
    "smooth_l1": lambda g, x: _aten.smooth_l1_loss_backward(g, x, x, 0, 1.0),
    "huber": lambda g, x: _aten.huber_loss_backward(g, x, x, 0, 1.0),
    "log_softmax": lambda g, x: _aten._log_softmax_backward_data(g, x, 1, g.dtype),
    "power": lambda g, _: torch.pow(2, g),
    "relu": lambda g, x: _aten.threshold_backward(g, x, 0),
    "leaky_relu": lambda g, x: _aten.leaky_relu_backward(g, x, 0.1, False),
    "log_sigmoid": lambda g, x: _aten.log_sigmoid_backward(g, x, g.new_empty(x.shape)),
}


ALIKE = {
    "log_sigmoid_forward": lambda _, x: _aten.log_sigmoid_forward(x)[0],
    "gelu": lambda g, x: _aten.gelu_backward(g, x),
    "tanh": lambda g, x: _aten.tanh_backward(g, x),
    "silu": lambda g, x: _aten.silu_backward(g, x),
    "product": torch.mul,
    "quotient": torch.div,
    "sum": lambda g, x: torch.add(g, x, alpha=2),
    "choice": lambda g, x: torch.where(g > 0, g, x),
    "three": lambda g, x: torch.addcmul(g, x, x),
    "with_a_number": lambda g, x: torch.sub(g * x.new_ones((), dtype=torch.float32), x),
}


@pytest.mark.contract
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, *swept([torch.float16])]
)
@pytest.mark.parametrize(
    "function", (TWO_LAYOUTS | ALIKE).values(), ids=TWO_LAYOUTS | ALIKE
)
def test_a_trace_knows_how_kernels_lay_out_what_they_return(
    function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    """Where inputs are laid out in two ways torch's own fake tensors had other strides."""
    x = seeded(2, 3, 4).sigmoid().to(dtype)
    orders = itertools.permutations(range(3))
    laid_out = [
        torch.empty_permuted(x.shape, order, dtype=x.dtype).copy_(x) for order in orders
    ]

    mode: Any = fakes.fake_mode(torch.device("cpu"), None)
    for pair in itertools.product([*laid_out, x[:, :1].expand(x.shape)], repeat=2):
        with mode:
            known = function(*map(mode.from_tensor, pair))
        assert known.stride() == function(*pair).stride()


@pytest.mark.contract
@pytest.mark.parametrize("view", [Tensor.reshape, _aten.view, _aten._unsafe_view])
def test_a_trace_knows_the_strides_of_a_view_of_one_example(view: Any) -> None:
    """Kernels tell the memory format from them; torch's own fake tensors had others."""
    x, size = seeded(1, 6, 4).mT.requires_grad_(), (1, 4, 2, 3)

    _, known = remat(lambda x: (y := view(x, size), y.stride()))(x)
    assert known == view(x, size).stride()


@pytest.mark.contract
def test_a_norm_of_one_example_after_a_view() -> None:
    """As in attention over pixels: the kernel summed in the order of another format."""
    x = seeded(1, 64, 8).float()
    weight = torch.ones(8, requires_grad=True)

    def fun(x: Tensor, weight: Tensor) -> Tensor:
        pixels = x.sin().mT.reshape(1, 8, 8, 8)
        normed = F.group_norm(pixels, 4, weight).flatten(2).mT
        return F.linear(normed, x[0, :8])

    assert_bitwise(grads(remat(fun), [x, weight]), grads(fun, [x, weight]))


@pytest.mark.contract
def test_what_log_sigmoid_gives_is_flattened() -> None:
    """Its kernel lays out densely what a trace took for transposed, as the input is, and viewed."""
    x = seeded(2, 3)

    found = remat(lambda x: F.logsigmoid(x.mT).mT.flatten().sin())(x.requires_grad_())
    assert_bitwise(found, F.logsigmoid(x).flatten().sin())


@pytest.mark.contract
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_expanded_operand_scales_is_flattened(dtype: torch.dtype) -> None:
    """In half precision a trace took the product for contiguous, and viewed it: an error."""

    def function(x: Tensor, scale: Tensor) -> Tensor:
        return (scale.expand(x.shape) * x).flatten(1).sin()

    x = seeded(2, 3, 4, 4).to(dtype).to(memory_format=torch.channels_last)
    scale = seeded(3, 1, 1).to(dtype)
    assert_bitwise(
        grad(lambda x: remat(function)(x, scale).sum())(x),
        grad(lambda x: function(x, scale).sum())(x),
    )


NORMS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "layer": lambda x, w: _aten.native_layer_norm(x, [4], w, None, 1e-5),
    "group": lambda x, w: _aten.native_group_norm(x, w, w, 2, 4, 4, 2, 1e-5),
    "group_backward": lambda x, w: _aten.native_group_norm_backward(
        x, x, w.new_zeros(2, 2), w.new_ones(2, 2), w, 2, 4, 4, 2, [True] * 3
    ),
    "batch": lambda x, w: _aten.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5),
    "batch_running": lambda x, w: _aten.native_batch_norm(
        x, None, None, w, w + 1, True, 0.1, 1e-5
    ),
    "batch_evaluated": lambda x, w: _aten.native_batch_norm(
        x, w, w, w, w + 1, False, 0.1, 1e-5
    ),
}


@pytest.mark.contract
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_trace_knows_the_dtypes_of_what_norms_keep(
    norm: Callable[[Tensor, Tensor], tuple[Tensor, ...]], dtype: torch.dtype
) -> None:
    """Statistics have the dtype of the weight, as under autocast, and not of the input."""
    x, weight = seeded(2, 4, 4).to(dtype), seeded(4).float()

    mode: Any = fakes.fake_mode(torch.device("cpu"), None)
    with mode:
        known = norm(mode.from_tensor(x), mode.from_tensor(weight))
    kept = norm(x, weight)
    assert [each.dtype for each in known] == [each.dtype for each in kept]
    assert [each.nbytes for each in known] == [each.nbytes for each in kept]


@pytest.mark.contract
@pytest.mark.parametrize(
    "activation", [F.softplus, F.elu, F.hardtanh, F.hardswish, F.hardsigmoid]
)
def test_a_gradient_laid_out_like_another_tensor_is_viewed(
    activation: Callable[[Tensor], Tensor],
) -> None:
    """The view was laid out for another gradient, and the backward ended in torch's error."""

    def fun(x: Tensor) -> Tensor:
        return activation(x.view(2, 3, 4)).transpose(1, 2)

    x, cotangent = seeded(2, 12).requires_grad_(), seeded(2, 4, 3, seed=1)

    found, right = (
        torch.autograd.grad(each(x), x, cotangent) for each in (remat(fun), fun)
    )
    assert_bitwise(found, right)


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize("activation", [F.softplus, F.elu, F.logsigmoid, F.leaky_relu])
def test_a_cotangent_that_all_examples_share(
    activation: Callable[[Tensor], Tensor], examples: int
) -> None:
    """The kernel gives its output the size of the cotangent first, and then the examples'."""

    def curved(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        slope = grad(lambda x: f(x).sum())
        return vmap(lambda x: jvp(slope, (x,), (x.cos(),))[1])

    x = seeded(examples, 3)
    assert_close(curved(remat(activation))(x), curved(activation)(x))


def _group_norm(x: Tensor) -> Tensor:
    return F.group_norm(x, 2)


def _group_norm_backward(x: Tensor) -> Tensor:
    _, mean, rstd = _aten.native_group_norm(x, None, None, 2, 4, 6, 2, 1e-5)
    wanted = [True, False, False]
    return _aten.native_group_norm_backward(
        x.sin(), x, mean, rstd, None, 2, 4, 6, 2, wanted
    )[0]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(_group_norm, marks=pytest.mark.contract),
        _group_norm_backward,  # torch 2.13 has no fake one for some of these layouts
    ],
)
def test_a_norm_of_groups_keeps_the_memory_format(
    function: Callable[[Tensor], Tensor],
) -> None:
    """Channels that lie together stay so, whatever torch's own fake tensors take."""
    x = seeded(2, 4, 3, 2)

    for order in itertools.permutations(range(4)):
        laid_out = torch.empty_permuted(x.shape, order, dtype=x.dtype).copy_(x)
        mode: Any = fakes.fake_mode(torch.device("cpu"), None)
        with mode:
            known = function(mode.from_tensor(laid_out))
        assert known.stride() == function(laid_out).stride()


@pytest.mark.contract
def test_a_norm_of_groups_is_reshaped() -> None:
    """What could be viewed if channels were apart is copied, as their strides demand."""

    def fun(x: Tensor) -> Tensor:
        return (F.group_norm(x, 2).reshape(2, 2, 12) * x.reshape(2, 2, 12)).sin()

    x = seeded(2, 4, 3, 2).to(memory_format=torch.channels_last).requires_grad_()

    found, right = remat(fun)(x), fun(x)

    assert_bitwise(found, right)
    assert_bitwise(*(torch.autograd.grad(y.sum(), x) for y in (found, right)))


def _into(y: Tensor) -> Tensor:
    """Writes what is laid out one way to a tensor that is laid out in another."""
    with torch.no_grad():
        found = torch.empty(y.shape, dtype=y.dtype)
        torch.mul(y, 2, out=found)
    return found


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda y: y.cumsum_(0),
    "fill": lambda y: y.masked_fill_(y > 0.5, 0.5),
    "scatter": lambda y: y.scatter_add_(0, torch.zeros(2, 4).long(), _ones(2, 4)),
    "index": lambda y: y.index_add_(0, torch.tensor([1]), _ones(1, 4)),
    "triangle": lambda y: y.tril_(),
    "matmul": lambda y: y.addmm_(_ones(3, 2), _ones(2, 4)),
    "alias": lambda y: (y.view_as(y).cumsum_(1), y)[1],
    "part": lambda y: (y[1:].cumsum_(1), y)[1],
    "list": lambda y: (_aten._foreach_mul_([y], 2.0), y.cumsum_(0))[1],
    "out": _into,
}


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


@pytest.mark.contract
@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
def test_an_operator_in_place_leaves_the_strides(
    write: Callable[[Tensor], Tensor],
) -> None:
    """Of what it writes to, for whoever views it next; the pure operator chooses others."""

    def fun(x: Tensor) -> tuple[Tensor, Tensor]:
        written = write(x.t() * 1)
        return written, x.sin() * written.t().reshape(x.shape)

    x = seeded(4, 3).requires_grad_()
    (right, after), (found, then) = fun(x), remat(fun)(x)

    assert found.stride() == right.stride()
    assert_bitwise(found, right)
    assert_bitwise(then, after)
    assert_bitwise(
        torch.autograd.grad(then.sum(), x), torch.autograd.grad(after.sum(), x)
    )
