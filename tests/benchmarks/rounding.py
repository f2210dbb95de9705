"""What stochastic rounding leaves of a gradient: `python -m tests.benchmarks rounding`.

The norm of the mean gradient's error over the norm of the gradient, where an operator's
backward reads a value that `storage.Quantize(bits, stochastic=True)` rounded, by its bits:
zero where the backward is linear in what is saved, and the docs' table where it is not.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from remat import random, storage
from remat.storage import Stored

NUM_DRAWS = 1500
BITS = (2, 4, 8)


def draws(value: Tensor, bits: int = 2) -> list[Stored]:
    """The value, stochastically rounded, once for each draw."""
    hows = (
        storage.Quantize(bits, stochastic=True, key=random.key(seed))
        for seed in range(NUM_DRAWS)
    )
    return [how.store(value) for how in hows]


def _slope(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def slope(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]

    return slope


def _normalized(x: Tensor) -> Tensor:
    weight = torch.linspace(-2, 2, x.shape[-1], dtype=x.dtype, device=x.device)
    return (F.layer_norm(x, x.shape[-1:]) * weight).square()


#: Gradients by an operand, as the backward takes them from what is saved of it.
NONLINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": _slope(F.gelu),
    "softmax, squared": _slope(lambda x: x.softmax(-1).square()),
    "LayerNorm, squared": _slope(_normalized),
}


def bias(
    slope: Callable[[Tensor], Tensor], x: Tensor, drawn: Tensor
) -> tuple[float, float]:
    """The norm of the mean gradient's error over the gradient's, and its standard deviation."""
    expected = slope(x)
    found = torch.stack([slope(each) for each in drawn])
    error, deviation = found.mean(0) - expected, found.std(0) / len(drawn) ** 0.5
    size = expected.norm()
    return float(error.norm() / size), float(deviation.norm() / size)


def main(threads: int) -> None:
    """Prints the table, for 16 by 16 normal numbers in one group."""
    torch.set_num_threads(threads)
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    drawn = [torch.stack([each.restore() for each in draws(x, bits)]) for bits in BITS]
    print(f"torch {torch.__version__}, {NUM_DRAWS} draws\n")
    print("| operator |" + "".join(f" {bits} bits |" for bits in BITS))
    print("|---|" + "--:|" * len(BITS))
    for name, slope in NONLINEAR.items():
        found = [bias(slope, x, each) for each in drawn]
        print(f"| {name} |" + "".join(f" {a:.2g} ± {b:.1g} |" for a, b in found))
