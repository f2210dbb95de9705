"""The functions on which the laws are tried: small, pure, of every kind that users write.

Each is a name, a function, and a maker of its arguments; makers give the same numbers at
every call. Shapes: b batch, t sequence, d width, h heads.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import einops
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import seeded

Pair = namedtuple("Pair", "first second")
F32 = torch.float32
Arguments = tuple[Any, ...]
Fun = Callable[..., Any]


class Function(NamedTuple):
    """A pure function, its name, and what makes its arguments."""

    name: str
    fun: Fun
    make_args: Callable[[], Arguments]


FUNCTIONS: list[Function] = []


def tried_on(make_args: Callable[[], Arguments]) -> Callable[[Fun], Fun]:
    """Enters the function below into `FUNCTIONS`."""

    def enter(fun: Fun) -> Fun:
        FUNCTIONS.append(Function(fun.__name__, fun, make_args))
        return fun

    return enter


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> Any:
    """A maker of normal tensors, scaled by the root of their last size but one."""

    def make() -> Arguments:
        return tuple(
            seeded(*shape, seed=i, dtype=dtype)
            * max(shape[-2] if shape[1:] else 1, 1) ** -0.5
            for i, shape in enumerate(shapes)
        )

    return make


def integers(*shape: int, high: int, seed: int = 7) -> Tensor:
    """Integers below `high`, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(high, shape, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


# Networks.


@tried_on(tensors((5, 8), (8, 16), (16,), (16, 8), (8,)))
def mlp(x, w, b, v, c):
    return F.linear(torch.tanh(x @ w + b), v.T, c)


def attention_args(dtype=F32):
    """Parameters and a (b, t, d) input of one attention block."""
    x, qkv, out, up, down, scale, shift = tensors(
        (2, 6, 8), (8, 24), (8, 8), (8, 16), (16, 8), (8,), (8,), dtype=dtype
    )()
    return {"qkv": qkv, "out": out, "up": up, "down": down, "ln": (scale, shift)}, x


def attention_block(params, x, attend):
    """A pre-norm transformer block with two heads."""
    normal = F.layer_norm(x, (8,), *params["ln"])
    q, k, v = einops.rearrange(
        normal @ params["qkv"], "b t (c h d) -> c b h t d", c=3, h=2
    )
    x = x + einops.rearrange(attend(q, k, v), "b h t d -> b t (h d)") @ params["out"]
    return x + F.gelu(F.layer_norm(x, (8,)) @ params["up"]) @ params["down"]


@tried_on(attention_args)
def attention(params, x):
    sdpa = F.scaled_dot_product_attention
    return attention_block(params, x, lambda q, k, v: sdpa(q, k, v, is_causal=True))


@tried_on(attention_args)
def attention_math(params, x):
    def attend(q, k, v):
        scores = q @ k.mT / 2
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v

    return attention_block(params, x, attend)


@tried_on(lambda: attention_args(torch.bfloat16))
def attention_bfloat16(params, x):
    return attention(params, x)


@tried_on(tensors((2, 6, 4, 4), (6,), (6,)))
def group_norm(x, scale, shift):
    return F.group_norm(x.sin(), 3, scale, shift)


@tried_on(tensors((4, 3, 5), (3,), (3,)))
def batch_norm(x, scale, shift):
    return F.batch_norm(x.sin(), None, None, scale, shift, training=True)


@tried_on(tensors((4, 6), (6,), (6,)))
def layer_norm(x, scale, shift):
    return F.layer_norm(x.exp(), (6,), scale, shift)


@tried_on(tensors((3, 4), (3, 5), (3, 5), (9, 20)))
def lstm_cell_in_place(x, hidden, cell, weight):
    gates = torch.cat([x, hidden], 1) @ weight
    forget, enter, leave, new = gates.unsafe_chunk(4, 1)
    forget.sigmoid_()
    enter.sigmoid_()
    cell = cell * forget + enter * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


@tried_on(tensors((2, 3, 8, 8), (4, 3, 3, 3), (4,), (2, 4, 3, 3)))
def conv_net(x, w, b, v):
    x = F.max_pool2d(F.relu(F.conv2d(x, w, b, padding=1)), 2)
    return F.avg_pool2d(F.conv2d(x, v), 2).flatten(1)


@tried_on(lambda: (integers(2, 5, high=11), seeded(11, 6, dtype=F32)))
def embedding_tied(tokens, weight):
    return F.log_softmax(F.embedding(tokens, weight).tanh() @ weight.T, -1)


@tried_on(
    lambda: (seeded(4, 6, dtype=F32), seeded(6, 9, dtype=F32), integers(4, high=9))
)
def cross_entropy(x, weight, target):
    return F.cross_entropy(x.tanh() @ weight, target)


# Operators with a backward of their own.


@tried_on(tensors((4, 5), dtype=torch.complex64))
def complex_arithmetic(z):
    w = (z * z.conj()).exp() + z.abs() * 1j
    return torch.view_as_real(w.sin()), w.real, w.conj()


@tried_on(tensors((3, 5)))
def cumulative(x):
    return x.exp().cumprod(1), x.sin().cumsum(0)


@tried_on(tensors((3, 5)))
def normalizers(x):
    return x.sin().logsumexp(1), x.exp().softmax(0), x.cos().log_softmax(1)


@tried_on(tensors((3, 6)))
def activations(x):
    return F.silu(x.sin()) + F.gelu(x, approximate="tanh") * F.softplus(x.exp())


@tried_on(
    lambda: (seeded(5, 4, dtype=F32), integers(3, high=5), integers(3, 4, high=5))
)
def indexing(x, rows, cells):
    y = x.sin()
    put = y.index_put((rows,), x[rows].exp(), accumulate=True)
    return y[rows, 1:], y.gather(0, cells).exp(), put.sin(), y[..., None, ::2].cos()


@tried_on(lambda: (seeded(3, 4, dtype=F32), integers(3, 4, high=5)))
def scatter(x, cells):
    zeros = torch.zeros(5, 4, dtype=x.dtype)
    return zeros.scatter_add(0, cells, x.sin()).exp(), torch.where(x > 0, x.exp(), x)


@tried_on(tensors((4, 6)))
def many_outputs(x):
    y = x.sin()
    values, places = y.exp().topk(2, 1)
    ordered, order = y.sort(0)
    left, right = (ordered * y).split([2, 4], 1)
    return values.cos(), places, order, left, right.exp(), y.chunk(2)[1], y.unbind()[0]


@tried_on(tensors((4, 3), dtype=torch.float64))
def decompositions(x):
    square = x.sin().T @ x + torch.diag(torch.arange(1.0, 4.0, dtype=x.dtype))
    q, r = torch.linalg.qr(x.exp() + torch.eye(4, 3, dtype=x.dtype))
    spread = torch.linalg.svdvals(square)
    return q @ r.sin(), spread.log(), torch.linalg.eigvalsh(square + square.T)


@tried_on(tensors((3, 4), (4, 2, 5)))
def einsums(x, y):
    z = torch.einsum("ab,bcd->acd", x.sin(), y.cos())
    return einops.reduce(z.exp(), "a c d -> c a", "sum"), torch.einsum(
        "acd,acd->a", z, z
    )


@tried_on(tensors((4, 4), (4, 4), (4, 4)))
def triangular(x, y, z):
    return torch.bmm(x.sin().tril()[None], y.triu(1)[None]), torch.addmm(z, x, y.exp())


@tried_on(tensors((3, 4)))
def dropout_off(x):
    return F.dropout(x.sin(), 0.0, training=True).exp() * F.dropout(
        x, 0.5, training=False
    )


# Views and in-place operators.


@tried_on(tensors((2, 3, 4)))
def views(x):
    y = x.sin().transpose(0, 2)
    return (
        y.expand(5, 4, 3, 2).exp().flatten(0, 1),
        y[1:].squeeze(),
        y.reshape(-1).cos(),
    )


@tried_on(tensors((3, 4), (3, 4)))
def in_place(x, y):
    z = x.sin().mul_(y).add_(1.0)
    z[1:] = z[:-1].exp()
    z[:, 0].mul_(2.0)
    return z.cos_(), z * y


@tried_on(tensors((3, 4)))
def in_place_on_views(x):
    y = x.sin()
    y.T.reshape(4, 3)[0].add_(x[:, 1])
    y.view(-1)[::2].sigmoid_()
    return y * y


# What users write around operators.


class Doubled(torch.autograd.Function):
    """The sine with a gradient that is wrong on purpose, and must be kept."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad,), (cos,) = grad_outputs, ctx.saved_tensors
        return 2.0 * grad * cos


@tried_on(tensors((3, 4)))
def custom_gradient(x):
    return Doubled.apply(x.exp()).exp()


@tried_on(tensors((3, 4)))
def detached_inside(x):
    return x.sin() * x.exp().detach(), (x.cos().detach() * x).exp()


@tried_on(tensors((3, 4)))
def no_grad_inside(x):
    with torch.no_grad():
        scale = x.exp().sum()
    return (x.sin() * scale).exp()


@tried_on(tensors((3, 4)))
def constants_inside(x):
    rows = torch.arange(3.0).cos()
    return (x.sin() * rows[:, None] + torch.full((4,), 0.5)).exp() * torch.eye(
        3, 4
    ).exp()


@tried_on(
    lambda: (
        {"w": seeded(4, 4, dtype=F32), "rest": [Pair(seeded(4, dtype=F32), None), 2]},
        (seeded(3, 4, dtype=F32), None, "tanh"),
    )
)
def pytrees(params, inputs):
    x, nothing, activation = inputs
    y = getattr(torch, activation)(x @ params["w"]) * params["rest"][1]
    pair = Pair(y.exp(), nothing)
    return {"pair": pair, "bias": (params["rest"][0].first.sin() * y, None, 3)}


@tried_on(lambda: (seeded(4, dtype=F32), integers(4, high=3), seeded(4) > 0))
def integer_inputs(x, n, mask):
    return (x.sin() * n).exp(), n + 1, ~mask, torch.where(mask, x.exp(), 0.0)


@tried_on(tensors((0, 4), (4, 3), ()))
def empty_and_scalar(x, w, s):
    return x.sin() @ w, s.sin().exp(), (w.exp() * s.cos()).sum()


@tried_on(tensors((4, 6), (6, 6), dtype=torch.float16))
def half(x, w):
    return F.layer_norm(F.gelu(x @ w), (6,)).exp()


@tried_on(tensors((4, 6), (6, 6)))
def mixed_dtypes(x, w):
    y = (x.to(torch.bfloat16) @ w.to(torch.bfloat16)).float()
    return y.sin().double() * x.exp(), x.half().exp()


NAMES = [function.name for function in FUNCTIONS]
