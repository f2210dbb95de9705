"""Twenty small models of unlike kinds, whose steps are planned under a limit of their peak.

Those of libraries are modules; the others are functions of their parameters, whose parts are
regions, each decorated where it is made: a model's regions are its own.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import fit, modules, random, remat
from tests.benchmarks import peaks, transformers
from tests.support import tensors_in

SIZE = transformers.Size(width=64, layers=3, length=64)
EXAMPLES, WIDTH = 8, 32
Params = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A training step.

    Attributes:
        loss: what is differentiated, and takes nothing.
        plan: applies what keeps a step, with an optimizer, to a limit, by such costs; its
            predicted peak, the cost of what it recomputes, and the gap.
        parameters: what the optimizer changes.
        others: what else lives all the time.
    """

    loss: Callable[[], Tensor]
    plan: Callable[[int, torch.optim.Optimizer, str], tuple[int, int, float]]
    parameters: list[Tensor]
    others: list[Tensor]


def _of_module(
    net: nn.Module, call: dict[str, Tensor], loss: Callable[[Any], Tensor]
) -> Model:
    def planned(
        peak: int, optimizer: torch.optim.Optimizer, costs: str
    ) -> tuple[int, int, float]:
        step = modules.Step(loss, optimizer)
        found = modules.plan(net, peak=peak, step=step, costs=costs)(**call)
        assert found.gap is not None, "there is a limit of the peak"
        cost = sum(row.plan.recompute_cost for row in found.rows)
        return found.predicted_peak_bytes, cost, found.gap

    others = [*net.parameters(), *net.buffers(), *call.values()]
    wanted: list[Tensor] = [each for each in net.parameters() if each.requires_grad]
    return Model(lambda: loss(net(**call)), planned, wanted, others)


def _of_transformers(name: str) -> Model:
    module = transformers.a_model(transformers.MODELS[name], SIZE, "plain")
    batch = transformers.a_batch(module, SIZE, EXAMPLES)
    return _of_module(module, batch, lambda found: found.loss)


def _of_net(net: nn.Module, x: Tensor, name: str = "input") -> Model:
    return _of_module(net, {name: x}, lambda found: found.square().mean())


def _of_step(step: Callable[..., Tensor], params: Any, *batch: Any) -> Model:
    """A function from parameters and a batch to its loss, of which `fit` finds the regions."""
    own = tensors_in(params)

    def planned(
        peak: int, optimizer: torch.optim.Optimizer, costs: str
    ) -> tuple[int, int, float]:
        found = fit(step, peak=peak, optimizer=optimizer, costs=costs)(params, *batch)
        found.apply()
        cost = sum(p.recompute_cost for row in found.rows for p in row.plans)
        return found.predicted_peak_bytes, cost, found.gap

    wanted = [each for each in own if each.requires_grad]
    return Model(
        lambda: step(params, *batch), planned, wanted, [*own, *tensors_in(batch)]
    )


def _w(*shape: int) -> Tensor:
    """A parameter, drawn small."""
    return (torch.randn(shape) / shape[0] ** 0.5).requires_grad_()


def _stack(count: int, **shapes: tuple[int, ...]) -> list[Params]:
    return [{name: _w(*s) for name, s in shapes.items()} for _ in range(count)]


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _attention(p: Params, x: Tensor, y: Tensor | None = None, **options: Any) -> Tensor:
    """Self-attention of two heads, or attention to `y`."""
    q, k, v = x @ p["q"], *((x if y is None else y) @ p["kv"]).chunk(2, -1)
    heads = [each.unflatten(-1, (2, -1)).transpose(1, 2) for each in (q, k, v)]
    found = F.scaled_dot_product_attention(*heads, **options)
    return found.transpose(1, 2).flatten(2) @ p["o"]


def _mlp(p: Params, x: Tensor) -> Tensor:
    return F.gelu(x @ p["up"]) @ p["down"]


_OF_ATTENTION = {"q": (WIDTH, WIDTH), "kv": (WIDTH, 2 * WIDTH), "o": (WIDTH, WIDTH)}
_OF_MLP = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
_OF_BLOCK = {**_OF_ATTENTION, **_OF_MLP}


def _tokens(length: int = 64) -> Tensor:
    return torch.arange(EXAMPLES * length).reshape(EXAMPLES, length) % 97


def _inputs(*shape: int) -> Tensor:
    return torch.randn(EXAMPLES, *shape)


def perceptron() -> Model:
    """Layers of widths that differ, each a call of one region."""
    widths = [16, 64, 32, 128, 32, 8]
    layer = remat(lambda w, x: F.silu(_norm(x @ w)))

    def step(params: list[Tensor], x: Tensor) -> Tensor:
        for w in params:
            x = layer(w, x)
        return x.square().mean()

    return _of_step(
        step,
        [_w(*each) for each in itertools.pairwise(widths)],
        torch.randn(512, 16),
    )


def convolutions() -> Model:
    """Convolutions with group norm and pooling, each stage a region of its own."""

    def stage(w: Tensor, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(F.group_norm(F.conv2d(x, w, padding=1), 4)), 2)

    stages = [remat(stage) for _ in range(3)]

    def step(params: list[Tensor], x: Tensor) -> Tensor:
        for own, w in zip(stages, params, strict=True):
            x = own(w, x)
        return x.mean((2, 3)).square().sum()

    widths = [4, 8, 16, 32]
    params = [_w(made, given, 3, 3) for given, made in itertools.pairwise(widths)]
    return _of_step(step, params, _inputs(4, 32, 32))


def u_net() -> Model:
    """Stages down and up, of which the later read what the earlier gave."""

    @remat
    def down(w: Tensor, x: Tensor) -> Tensor:
        return F.gelu(F.conv2d(F.gelu(F.conv2d(x, w, padding=1)), w, padding=1))

    @remat
    def up(w: Tensor, x: Tensor, skipped: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2.0) + skipped
        return F.gelu(F.conv2d(F.gelu(F.conv2d(x, w, padding=1)), w, padding=1))

    def step(params: list[Tensor], x: Tensor) -> Tensor:
        skipped = []
        for w in params[:3]:
            skipped.append(down(w, x))
            x = F.avg_pool2d(skipped[-1], 2)
        for w in params[3:]:
            x = up(w, x, skipped.pop())
        return x.square().mean()

    return _of_step(step, [_w(8, 8, 3, 3) for _ in range(6)], _inputs(8, 32, 32))


def recurrent() -> Model:
    """A scan of LSTM cells, of which a few steps are a region."""

    def cell(p: Params, h: Tensor, c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (x @ p["x"] + h @ p["h"]).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    @remat
    def steps(p: Params, h: Tensor, c: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        for x in xs:
            h, c = cell(p, h, c, x)
        return h, c

    def step(p: Params, xs: Tensor) -> Tensor:
        h = c = torch.zeros(64, WIDTH)
        for part in xs.split(4):
            h, c = steps(p, h, c, part)
        return h.square().mean()

    params = {"x": _w(WIDTH, 4 * WIDTH), "h": _w(WIDTH, 4 * WIDTH)}
    return _of_step(step, params, torch.randn(24, 64, WIDTH))


def encoder_decoder() -> Model:
    """Two stacks, of which the second reads all that the first gives."""

    @remat
    def encode(p: Params, x: Tensor) -> Tensor:
        x = x + _attention(p, _norm(x))
        return x + _mlp(p, _norm(x))

    @remat
    def decode(p: Params, x: Tensor, y: Tensor) -> Tensor:
        x = x + _attention(p, _norm(x), is_causal=True)
        x = x + _attention(p, _norm(x), y)
        return x + _mlp(p, _norm(x))

    def step(params: Params, x: Tensor, y: Tensor) -> Tensor:
        for p in params["encoder"]:
            y = encode(p, y)
        for p in params["decoder"]:
            x = decode(p, x, y)
        return x.square().mean()

    params = {"encoder": _stack(2, **_OF_BLOCK), "decoder": _stack(3, **_OF_BLOCK)}
    return _of_step(step, params, _inputs(32, WIDTH), _inputs(96, WIDTH))


def experts() -> Model:
    """A mixture of experts that all see each token."""

    @remat
    def layer(p: Params, x: Tensor) -> Tensor:
        gates = (x @ p["gate"]).softmax(-1)
        hidden = F.silu(torch.einsum("btd,edf->ebtf", x, p["up"]))
        made = torch.einsum("ebtf,efd->ebtd", hidden, p["down"])
        return x + torch.einsum("bte,ebtd->btd", gates, made)

    def step(params: list[Params], x: Tensor) -> Tensor:
        for p in params:
            x = layer(p, x)
        return x.square().mean()

    shapes = {"gate": (WIDTH, 4), "up": (4, WIDTH, 64), "down": (4, 64, WIDTH)}
    return _of_step(step, _stack(4, **shapes), _inputs(32, WIDTH))


def rotary() -> Model:
    """Llama's block as functions: RMS norm, rotary positions, SwiGLU, keys shared by heads."""

    def rotated(x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[-2])[:, None] / 10.0 ** torch.arange(8)
        first, second = x.chunk(2, -1)
        turned = first * angles.cos() - second * angles.sin()
        return torch.cat([turned, second * angles.cos() + first * angles.sin()], -1)

    @remat
    def attend(p: Params, x: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], p["norm"])
        q, k, v = (
            (y @ p[name]).unflatten(-1, (-1, 16)).transpose(1, 2) for name in "qkv"
        )
        q, k, v = rotated(q), *(e.expand(-1, 2, -1, -1) for e in (rotated(k), v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + found.transpose(1, 2).flatten(2) @ p["o"]

    @remat
    def swiglu(p: Params, x: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], p["norm"])
        return x + (F.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    def step(params: list[Params], x: Tensor) -> Tensor:
        for p in params:
            x = swiglu(p, attend(p, x))
        return x.square().mean()

    shapes = {"norm": (WIDTH,), "q": (WIDTH, WIDTH), "k": (WIDTH, 16), "v": (WIDTH, 16)}
    shapes |= {"o": (WIDTH, WIDTH), "gate": (WIDTH, 96), "up": (WIDTH, 96)}
    params = _stack(4, **shapes, down=(96, WIDTH))
    return _of_step(step, params, _inputs(64, WIDTH))


def equation() -> Model:
    """The residual of a differential equation: derivatives by x inside of the region."""

    def solution(params: list[Tensor], x: Tensor) -> Tensor:
        for w in params[:-1]:
            x = torch.tanh(x @ w)
        return (x @ params[-1]).sum()

    @remat
    def residual(params: list[Tensor], x: Tensor) -> Tensor:
        def slope(x: Tensor) -> Tensor:
            return torch.func.grad(solution, argnums=1)(params, x)

        ones = torch.ones_like(x)
        value, curve = torch.func.jvp(slope, (x,), (ones,))[:2]
        return (curve + value.sin()).square().mean()

    def step(params: list[Tensor], x: Tensor) -> Tensor:
        return sum((residual(params, part) for part in x.split(64)), torch.zeros(()))

    params = [_w(1, WIDTH), _w(WIDTH, WIDTH), _w(WIDTH, WIDTH), _w(WIDTH, 1)]
    return _of_step(step, params, torch.randn(256, 1))


def adapters() -> Model:
    """Frozen weights, with adapters of low rank that are trained."""

    @remat
    def layer(own: Params, frozen: Params, x: Tensor) -> Tensor:
        up = frozen["up"] + own["a"] @ own["b"]
        return x + F.gelu(_norm(x) @ up) @ frozen["down"]

    def step(params: list[Any], x: Tensor) -> Tensor:
        for own, frozen in params:
            x = layer(own, frozen, x)
        return x.square().mean()

    frozen = [{k: w.detach() for k, w in p.items()} for p in _stack(4, **_OF_MLP)]
    own = _stack(4, a=(WIDTH, 4), b=(4, 4 * WIDTH))
    return _of_step(step, [*zip(own, frozen, strict=True)], _inputs(64, WIDTH))


def tied() -> Model:
    """A language model whose head is its embedding, with dropout from keys."""

    @remat
    def block(p: Params, x: Tensor, key: Tensor) -> Tensor:
        x = x + random.dropout(key, _attention(p, _norm(x), is_causal=True), 0.1)
        return x + _mlp(p, _norm(x))

    @remat
    def loss(embedding: Tensor, x: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy((x @ embedding.T).flatten(0, 1), tokens.flatten())

    def step(params: Params, tokens: Tensor, key: Tensor) -> Tensor:
        x = params["embedding"][tokens]
        for k, p in enumerate(params["blocks"]):
            x = block(p, x, random.fold_in(key, k))
        return loss(params["embedding"], x, tokens)

    params = {"embedding": _w(97, WIDTH), "blocks": _stack(3, **_OF_BLOCK)}
    return _of_step(step, params, _tokens(), random.key(0))


def normalized() -> Model:
    """Norms of five kinds, between convolutions along one axis."""
    norms: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: F.group_norm(x, 4),
        F.instance_norm,
        lambda x: F.rms_norm(x, x.shape[-1:]),
        lambda x: F.normalize(x, dim=1),
    ]
    regions = [
        remat(lambda w, x, norm=norm: x + F.gelu(F.conv1d(norm(x), w, padding=1)))
        for norm in norms
    ]

    def step(params: list[Tensor], x: Tensor) -> Tensor:
        for region, w in zip(regions, params, strict=True):
            x = region(w, x)
        return x.square().mean()

    return _of_step(step, [_w(16, 16, 3) for _ in norms], _inputs(16, 128))


def masked() -> Model:
    """Attention with a mask of what is padded, and a bias that is learnt."""

    @remat
    def block(p: Params, x: Tensor, mask: Tensor) -> Tensor:
        bias = p["bias"].masked_fill(~mask[:, None, None, :], -1e9)
        x = x + _attention(p, _norm(x), attn_mask=bias)
        return x + _mlp(p, _norm(x))

    def step(params: list[Params], x: Tensor, mask: Tensor) -> Tensor:
        for p in params:
            x = block(p, x, mask)
        return (x * mask[..., None]).square().mean()

    mask = torch.arange(32) < torch.arange(24, 32)[:, None]
    return _of_step(
        step, _stack(3, **_OF_BLOCK, bias=(2, 32, 32)), _inputs(32, WIDTH), mask
    )


def meta_learning() -> Model:
    """For each task one step of gradient descent, and the loss after it: a region."""

    def loss(params: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        for w in params:
            x = torch.tanh(x @ w)
        return (x - y).square().mean()

    @remat
    def adapted(params: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        steps = torch.func.grad(loss)(params, x, y)
        moved = [w - 0.1 * each for w, each in zip(params, steps, strict=True)]
        return loss(moved, x.flip(0), y.flip(0))

    def step(params: list[Tensor], xs: Tensor, ys: Tensor) -> Tensor:
        tasks = zip(xs, ys, strict=True)
        return sum((adapted(params, x, y) for x, y in tasks), torch.zeros(()))

    params = [_w(WIDTH, 64), _w(64, 64), _w(64, WIDTH)]
    return _of_step(step, params, torch.randn(4, 64, WIDTH), torch.randn(4, 64, WIDTH))


def variational() -> Model:
    """An autoencoder that draws what it decodes from a key; two regions, no stack."""

    @remat
    def encode(p: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = (F.silu(F.silu(x @ p["a"]) @ p["b"]) @ p["c"]).chunk(2, -1)
        return mean, F.softplus(scale)

    @remat
    def decode(p: Params, z: Tensor) -> Tensor:
        return F.silu(F.silu(z @ p["a"]) @ p["b"]) @ p["c"]

    def step(params: Params, x: Tensor, key: Tensor) -> Tensor:
        mean, scale = encode(params["encode"], x)
        made = decode(params["decode"], mean + scale * random.normal(key, mean.shape))
        return (made - x).square().mean() + (mean.square() - scale.log()).mean()

    def layers(first: int, last: int) -> Params:
        return {"a": _w(first, 96), "b": _w(96, 64), "c": _w(64, last)}

    params = {"encode": layers(48, 16), "decode": layers(8, 48)}
    return _of_step(step, params, torch.randn(256, 48), random.key(0))


MODELS: dict[str, Callable[[], Model]] = {
    **{
        name: lambda name=name: _of_transformers(name)
        for name in ("Llama", "GPT-2", "BERT", "ViT")
    },
    "nn.TransformerEncoder": lambda: _of_net(*peaks.encoder(), "src"),
    "MLP-Mixer": lambda: _of_net(*peaks.mixer()),
    "perceptron": perceptron,
    "convolutions": convolutions,
    "U-Net": u_net,
    "LSTM scan": recurrent,
    "encoder-decoder": encoder_decoder,
    "mixture of experts": experts,
    "rotary, SwiGLU": rotary,
    "differential equation": equation,
    "LoRA": adapters,
    "tied embedding": tied,
    "five norms": normalized,
    "masked attention": masked,
    "MAML": meta_learning,
    "variational autoencoder": variational,
}
