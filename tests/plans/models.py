"""Models to plan for, each a function, a call of it, and what is differentiated."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from remat import checkpoint_name, random, remat
from remat.reporting import LiveBytes
from remat.reporting._demo.gpt import GPTShape, block, initial_parameters, make_loss
from tests.support import seeded

SHAPE = GPTShape(layers=3, width=32, heads=2, time=32, batch=2)
Model = tuple[Any, tuple[Any, ...], list[Tensor]]
_aten = torch.ops.aten
UNCOUNTED = (
    _aten._unsafe_view.default,
    _aten._reshape_alias.default,
    torch.ops.remat.rng_swap.default,  # a few kilobytes of a generator's state
)
ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu


def mlp(x: Tensor, w: Tensor) -> Tensor:
    """Three unlike layers; each backward reads its output and its input."""
    h = checkpoint_name(torch.tanh(x @ w), "first")
    h = torch.tanh((h @ w) * 2)
    return torch.tanh(h @ w).square().sum()


def mlp_args() -> tuple[Tensor, Tensor]:
    """A batch and a weight, in double precision."""
    return seeded(6, 4), seeded(4, 4, seed=1).requires_grad_()


def gpt() -> Model:
    """The demo's GPT as one function, a call of it, and what is differentiated."""
    generator = torch.Generator().manual_seed(0)
    parameters = initial_parameters(SHAPE, generator)
    size = (SHAPE.batch, SHAPE.time + 1)
    batch = torch.randint(0, 256, size, generator=generator, device="cpu")
    batch = batch.to(torch.get_default_device())
    leaves = [
        t.requires_grad_() for group in parameters.values() for t in group.values()
    ]
    return make_loss(SHAPE, block), (parameters, batch, random.key(0)), leaves


def dropping() -> Model:
    """A module that draws: states of the generator are held."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 64),
        nn.Dropout(0.5),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Linear(64, 4),
    )
    return net, (seeded(256, 8, dtype=torch.float32),), list(net.parameters())


def region_of(f: Any, policy: Any) -> Any:
    """A function or a module as a region under a policy."""
    return remat(f, policy=policy)


class Costs(TorchDispatchMode):
    """FLOPs plus bytes read and written by each operator that is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(each.alias_info is not None for each in func._schema.returns):
            return result
        if func in UNCOUNTED:
            return result
        given = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        tensors = [*given.values(), *(t for t in tree_leaves(result) if t is not None)]
        self.total += sum(map(_distinct_bytes, tensors))
        packet = func.overloadpacket
        packet = (
            _aten._scaled_dot_product_flash_attention if packet is ATTENTION else packet
        )
        formula = flop_registry.get(packet)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


def _distinct_bytes(tensor: Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    dense = torch.Size(size if step else 1 for size, step in sizes)
    return dense.numel() * tensor.element_size()


def attention_flops(*args: Any, **kwargs: Any) -> int:
    """The CPU's attention counts like the GPU's: torch 2.13 has no formula for it."""
    return flop_registry[_aten._scaled_dot_product_flash_attention](*args, **kwargs)


vars(attention_flops)["_get_raw"] = True  # it takes tensors, not shapes


def measured(
    f: Any, args: tuple[Any, ...], leaves: list[Tensor]
) -> tuple[int, int, int, int]:
    """Bytes held, the peak, and FLOPs and cost of the backward of one call."""

    cotangent = torch.ones_like(f(*args))

    def gradients(output: Tensor) -> None:
        torch.autograd.grad(output, leaves, cotangent)

    gradients(f(*args))
    with LiveBytes() as live:
        output = f(*args)
        held = live.current_bytes - output.untyped_storage().nbytes()
        gradients(output)
    output = f(*args)
    mapping = {ATTENTION: attention_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as flops:
        gradients(output)
    output = f(*args)
    with Costs() as costs:
        gradients(output)
    return held, live.peak_bytes, flops.get_total_flops(), costs.total
