"""Gradients of gradients in plain autograd: `python -m tests.benchmarks recorded`.

Gated layers, each one a region, under a gradient penalty and a product with the Hessian, both by
`create_graph=True`: plain torch, `torch.utils.checkpoint`, and three policies. A line has the
columns of `tests/benchmarks/nested.py`.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from remat import remat
from tests.benchmarks.contenders import PLAIN, POLICIES
from tests.benchmarks.nested import Line, line, table
from tests.benchmarks.tables import heading
from tests.benchmarks.timing import Pace, clock, interleaved, paired

Layer = Callable[[Tensor, Tensor], Tensor]
KEPT = ("nothing", "matmuls", "everything")


def gated(x: Tensor, w: Tensor) -> Tensor:
    """Two products."""
    return x + torch.sin(x @ w) * torch.tanh(x @ w.mT)


def _stacked(f: Layer, x: Tensor, ws: list[Tensor]) -> Tensor:
    return functools.reduce(f, ws, x)


def penalty(f: Layer, x: Tensor, ws: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of a loss and of the size of its gradient by the input."""
    x = x.clone().requires_grad_()
    y = _stacked(f, x, ws).square().mean()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return torch.autograd.grad(y + slope.square().sum(), ws)


def product(f: Layer, x: Tensor, ws: list[Tensor]) -> tuple[Tensor, ...]:
    """The Hessian of a loss times the weights."""
    y = _stacked(f, x, ws).square().mean()
    slopes = torch.autograd.grad(y, ws, create_graph=True)
    return torch.autograd.grad(slopes, ws, [w.detach() for w in ws])


STEPS = {"A gradient penalty": penalty, "A Hessian-vector product": product}


def measured(
    step: Callable[[Layer, Tensor, list[Tensor]], tuple[Tensor, ...]],
    sizes: tuple[int, int, int],
    quick: bool,
) -> dict[str, Line]:
    """Every contender: held against plain torch, counted, and timed in turn."""
    torch.manual_seed(0)
    layers, width, rows = sizes
    ws = [torch.randn(width, width) / width for _ in range(layers)]
    ws, x = [w.requires_grad_() for w in ws], torch.randn(rows, width)
    units: dict[str, Layer] = {
        PLAIN: gated,
        "torch.utils.checkpoint": functools.partial(
            checkpoint, gated, use_reentrant=False
        ),
        **{f"remat, {k}": remat(gated, policy=POLICIES[k]) for k in KEPT},
    }
    steps = {k: functools.partial(step, each, x, ws) for k, each in units.items()}
    expected = steps[PLAIN]()
    for each in steps.values():
        for _ in range(3):  # until what follows what is known
            torch.testing.assert_close(each(), expected, rtol=1e-3, atol=1e-4)
    pace = Pace.quick() if quick else Pace.of(steps)
    times = interleaved(steps, pace.rounds, pace.turns, pace.lead, clock())
    ratios = paired(times, times[PLAIN])
    return {name: line(ratios[name], each) for name, each in steps.items()}


def main(threads: int, quick: bool = False) -> None:
    """Prints a table for each step."""
    torch.set_num_threads(threads)
    print(heading())
    sizes = (2, 4, 8) if quick else (8, 64, 2048)
    for title, step in STEPS.items():
        shown = f"{title}; {sizes[0]} layers of {sizes[1]}, {sizes[2]:,} rows"
        print(table(shown, measured(step, sizes, quick)), flush=True)
