"""The work: units that a contender wraps, and the steps that are built of them.

A unit is a pure function of its parameters and of what the unit below gives. Shapes: b batch,
s sequence, d width, h heads, c channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Params = dict[str, Tensor]
Unit = Callable[[Params, Tensor], Tensor]
Loss = Callable[[Unit, Sequence[Params], Tensor], Tensor]
Attend = Callable[..., Tensor]

HEAD_WIDTH = 64
VOCABULARY = 256


def num_heads(width: int) -> int:
    """Of `HEAD_WIDTH` channels each, but two at least."""
    return max(2, width // HEAD_WIDTH)


def block(
    p: Params, x: Tensor, attend: Attend = F.scaled_dot_product_attention
) -> Tensor:
    """Attention and a GELU MLP, each after a layer norm; x and the result are (b, s, d)."""
    x = attention(p, x, attend)
    h = F.layer_norm(x, x.shape[-1:], p["norm2"], p["bias2"])
    return x + F.gelu(h @ p["up"]) @ p["down"]


def attention(
    p: Params, x: Tensor, attend: Attend = F.scaled_dot_product_attention
) -> Tensor:
    """The first half of a block."""
    b, s, d = x.shape
    heads = num_heads(d)
    h = F.layer_norm(x, (d,), p["norm1"], p["bias1"])
    q, k, v = (h @ p["qkv"]).view(b, s, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
    a = attend(q, k, v, is_causal=True)
    return x + a.transpose(1, 2).reshape(b, s, d) @ p["out"]


def convolutions(p: Params, x: Tensor) -> Tensor:
    """Two convolutions of 3 by 3, each after a group norm and GELU; x is (b, c, s, s)."""
    h = F.gelu(F.group_norm(x, 4, p["norm1"], p["bias1"]))
    h = F.conv2d(h, p["first"], padding=1)
    h = F.gelu(F.group_norm(h, 4, p["norm2"], p["bias2"]))
    return x + F.conv2d(h, p["second"], padding=1)


def gated(p: Params, x: Tensor) -> Tensor:
    """A gated MLP after a layer norm; x and the result are (s, d), or (b, s, d)."""
    h = F.layer_norm(x, x.shape[-1:], p["norm"], p["bias"])
    return x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def euler(p: Params, x: Tensor) -> Tensor:
    """One step of an ODE whose slope is an MLP; x and the result are (b, d)."""
    return x + 0.01 * (torch.tanh(x @ p["up"] + p["bias"]) @ p["down"])


def _normal(shapes: dict[str, tuple[int, ...]], scale: float) -> Params:
    return {name: torch.randn(shape) * scale for name, shape in shapes.items()}


def block_parameters(d: int) -> Params:
    """The parameters of one transformer block."""
    weights = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    norms = dict.fromkeys(("norm1", "bias1", "norm2", "bias2"), (d,))
    return _normal({**weights, **norms}, d**-0.5)


def summed(unit: Unit, params: Sequence[Params], x: Tensor) -> Tensor:
    """The sum of what the last of the units gives."""
    for own in params:
        x = unit(own, x)
    return x.sum()


def squared(unit: Unit, params: Sequence[Params], x: Tensor) -> Tensor:
    """The mean square of what the last unit gives, which has a second derivative."""
    for own in params:
        x = unit(own, x)
    return x.square().mean()


def next_token(unit: Unit, params: Sequence[Params], tokens: Tensor) -> Tensor:
    """The mean cross-entropy of the next token; the last parameters are the tables."""
    *layers, tables = params
    x = F.embedding(tokens[:, :-1], tables["token"]) + tables["place"]
    for own in layers:
        x = unit(own, x)
    logits = F.layer_norm(x, x.shape[-1:], tables["norm"]) @ tables["unembed"]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Work:
    """One step of training, or of what else differentiates.

    Attributes:
        title: what it is, with its sizes.
        unit: what a contender wraps.
        params: those of each unit; of what stands around the units, last.
        x: the batch.
        unit_input: what a unit gets, for its shape.
        loss: the units and what stands around them.
        transform: how it is differentiated: "backward", "grad", "per example", "hvp".
        num_steps: how often in a row a contender applies the unit.
    """

    title: str
    unit: Unit
    params: list[Params]
    x: Tensor
    unit_input: Tensor
    loss: Loss = summed
    transform: str = "backward"
    num_steps: int = 1

    @property
    def num_units(self) -> int:
        """How often a unit is called."""
        return len(self.params) - (self.loss is next_token)

    def step(self, unit: Unit) -> list[Tensor]:
        """The gradients, by a unit that is wrapped or not."""
        return TRANSFORMS[self.transform](self, unit)

    def forward(self, unit: Unit) -> Tensor:
        """The loss, whose graph is what a `.backward()` waits for."""
        return self.loss(unit, self.params, self.x)

    def leaves(self) -> list[Tensor]:
        """All parameters."""
        return [tensor for own in self.params for tensor in own.values()]


def _backward(work: Work, unit: Unit) -> list[Tensor]:
    leaves = work.leaves()
    work.forward(unit).backward()
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found  # type: ignore[return-value]


def _bare(work: Work) -> list[Params]:
    return [{name: t.detach() for name, t in own.items()} for own in work.params]


def _flat(grads: list[Params]) -> list[Tensor]:
    return [tensor for own in grads for tensor in own.values()]


def _grad(work: Work, unit: Unit) -> list[Tensor]:
    gradient = torch.func.grad(lambda params: work.loss(unit, params, work.x))
    return _flat(gradient(_bare(work)))


def _per_example(work: Work, unit: Unit) -> list[Tensor]:
    gradient = torch.func.grad(lambda params, x: work.loss(unit, params, x))
    return _flat(torch.func.vmap(gradient, (None, 0))(_bare(work), work.x))


def _hessian_vector(work: Work, unit: Unit) -> list[Tensor]:
    gradient = torch.func.grad(lambda params: work.loss(unit, params, work.x))
    bare = _bare(work)
    return _flat(torch.func.jvp(gradient, (bare,), (bare,))[1])


TRANSFORMS: dict[str, Callable[[Work, Unit], list[Tensor]]] = {
    "backward": _backward,
    "grad": _grad,
    "per example": _per_example,
    "hvp": _hessian_vector,
}


def _work(
    title: str, unit: Unit, params: list[Params], x: Tensor, **rest: object
) -> Work:
    if rest.get("transform", "backward") == "backward":
        for own in params:
            for tensor in own.values():
                tensor.requires_grad_()
    return Work(title, unit, params, x, **{"unit_input": x, **rest})  # type: ignore[arg-type]


def blocks(
    number: int, batch: int, sequence: int, width: int, transform: str = "backward"
) -> Work:
    """A stack of transformer blocks."""
    torch.manual_seed(0)
    params = [block_parameters(width) for _ in range(number)]
    x = torch.randn(batch, sequence, width)
    title = f"{number} blocks of width {width}, sequence {sequence}, batch {batch}"
    return _work(title, block, params, x, transform=transform)


def gpt(layers: int, batch: int, sequence: int, width: int) -> Work:
    """A small GPT with its embedding and its loss."""
    torch.manual_seed(0)
    params = [block_parameters(width) for _ in range(layers)]
    shapes = {
        "token": (VOCABULARY, width),
        "place": (sequence, width),
        "norm": (width,),
        "unembed": (width, VOCABULARY),
    }
    params.append(_normal(shapes, width**-0.5))
    tokens = torch.randint(VOCABULARY, (batch, sequence + 1))
    like = torch.randn(batch, sequence, width)
    title = (
        f"GPT of {layers} layers of width {width}, sequence {sequence}, batch {batch}"
    )
    return _work(title, block, params, tokens, unit_input=like, loss=next_token)


def conv_net(number: int, batch: int, channels: int, size: int) -> Work:
    """A stack of residual convolutions."""
    torch.manual_seed(0)
    kernel = (channels, channels, 3, 3)
    norms = dict.fromkeys(("norm1", "bias1", "norm2", "bias2"), (channels,))
    shapes = {"first": kernel, "second": kernel, **norms}
    params = [_normal(shapes, (9 * channels) ** -0.5) for _ in range(number)]
    x = torch.randn(batch, channels, size, size)
    title = f"{number} residual units of {channels} channels, {size} by {size}, batch {batch}"
    return _work(title, convolutions, params, x)


def mlps(
    transform: str, layers: int, batch: int, sequence: int, width: int, hidden: int
) -> Work:
    """A stack of gated MLPs under a transform that is no plain gradient."""
    torch.manual_seed(0)
    shapes = {
        "norm": (width,),
        "bias": (width,),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    params = [_normal(shapes, width**-0.5) for _ in range(layers)]
    x = torch.randn(batch, sequence, width)
    title = (
        f"{layers} gated MLPs of width {width}, hidden {hidden}, sequence {sequence}, "
        f"batch {batch}"
    )
    return _work(title, gated, params, x, loss=squared, transform=transform)


def ode(num_steps: int, batch: int, width: int, hidden: int) -> Work:
    """Equal steps of an ODE, whose slope is an MLP."""
    torch.manual_seed(0)
    shapes = {"up": (width, hidden), "bias": (hidden,), "down": (hidden, width)}
    params = [_normal(shapes, width**-0.5)]
    x = torch.randn(batch, width)
    title = (
        f"{num_steps} steps of an ODE of width {width}, hidden {hidden}, batch {batch}"
    )
    return _work(title, euler, params, x, loss=squared, num_steps=num_steps)
