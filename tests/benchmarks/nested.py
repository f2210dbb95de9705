"""Derivatives of derivatives: `python -m tests.benchmarks nested`, or one of its rows.

Each row is a network of tanh layers, one region as a whole, under a nest of transforms as it
is used: by plain torch and under four policies. A line has the time over plain torch's, the
most that a step had allocated, and how many matrix products and operators (views aside) it
runs. No peer runs there but JAX, which is not measured here.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, vmap
from torch.utils._pytree import tree_leaves, tree_map

from remat import checkpoint_name, policies, remat
from tests.benchmarks.contenders import PLAIN, POLICIES
from tests.benchmarks.memory import allocated
from tests.benchmarks.tables import heading
from tests.benchmarks.timing import Pace, Ratio, clock, interleaved, paired
from tests.support import ALIASING, PRODUCTS, count_operators

Params = list[dict[str, Tensor]]
Network = Callable[[Params, Tensor], Tensor]

KEPT = {
    "nothing": POLICIES["nothing"],
    "matmuls": POLICIES["matmuls"],
    "names": policies.save_only_these_names("layer"),
    "everything": POLICIES["everything"],
}


@dataclass(frozen=True)
class Sizes:
    """Of a network and of what it is given.

    Attributes:
        layers: of the network, the last one without tanh.
        width: of the layers between.
        points: how many examples there are.
        inputs: the width of an example.
        outputs: the width of what the network gives.
    """

    layers: int
    width: int
    points: int
    inputs: int = 2
    outputs: int = 1

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.width}, {self.points:,} points, "
            f"{self.inputs} inputs, {self.outputs} outputs"
        )


@dataclass(frozen=True)
class Row:
    """One nest of transforms, as it is used.

    Attributes:
        title: what it computes.
        step: runs it on a network.
        sizes: each is a table.
        quick: small enough for a test.
    """

    title: str
    step: Callable[[Network, Params, Tensor], Any]
    sizes: tuple[Sizes, ...]
    quick: Sizes


@dataclass(frozen=True)
class Line:
    """What one contender came to.

    Attributes:
        ratio: its time, and that over plain torch's.
        peak_bytes: the most that a step had allocated.
        products: how many products of matrices and vectors it runs.
        operators: how many operators it runs, without views.
    """

    ratio: Ratio
    peak_bytes: int
    products: int
    operators: int


def network(params: Params, x: Tensor) -> Tensor:
    """Dense layers, each output named, for an example (d,) or a batch (b, d)."""
    *hidden, last = params
    for own in hidden:
        x = checkpoint_name(torch.tanh(x @ own["w"] + own["b"]), "layer")
    return x @ last["w"] + last["b"]


def parameters(sizes: Sizes) -> Params:
    """Those of a network."""
    inner = [sizes.width] * (sizes.layers - 1)
    widths = [sizes.inputs, *inner, sizes.outputs]
    return [
        {"w": torch.randn(above, below) * above**-0.5, "b": torch.randn(below)}
        for above, below in itertools.pairwise(widths)
    ]


def pinn(f: Network, params: Params, x: Tensor) -> Any:
    """The gradient of the mean squared residual of Poisson's equation."""

    def residual(params: Params, point: Tensor) -> Tensor:
        return torch.trace(hessian(lambda z: f(params, z).sum())(point)) - 1

    return grad(lambda params: vmap(lambda z: residual(params, z))(x).square().mean())(
        params
    )


def maml(f: Network, params: Params, x: Tensor, num_steps: int = 5) -> Any:
    """The gradient through inner steps of gradient descent, over eight tasks."""

    def loss(params: Params, x: Tensor) -> Tensor:
        return (f(params, x) - x.sin().sum(-1, keepdim=True)).square().mean()

    def adapted(own: Params, x: Tensor) -> Tensor:
        seen, unseen = x.chunk(2)
        for _ in range(num_steps):
            gradient = grad(loss)(own, seen)
            own = tree_map(lambda p, g: p - 0.01 * g, own, gradient)
        return loss(own, unseen)

    tasks = x.unflatten(0, (8, -1))
    return grad(lambda params: vmap(lambda x: adapted(params, x))(tasks).mean())(params)


def hessians(f: Network, params: Params, x: Tensor) -> Any:
    """The Hessian by each point."""
    return vmap(jacfwd(jacrev(lambda z: f(params, z).sum())))(x)


def penalty(f: Network, params: Params, x: Tensor) -> Any:
    """The gradient of the mean squared Jacobian."""

    def size(params: Params) -> Tensor:
        return vmap(jacrev(lambda z: f(params, z)))(x).square().mean()

    return grad(size)(params)


def third(f: Network, params: Params, x: Tensor) -> Any:
    """The third derivative by each point, as of the Korteweg-de Vries equation."""
    return vmap(grad(grad_sum(grad_sum(lambda z: f(params, z).sum()))))(x)


def grad_sum(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The sum of a gradient."""
    return lambda z: grad(f)(z).sum()


ROWS = {
    "pinn": Row(
        "The gradient of a Laplacian",
        pinn,
        (Sizes(4, 64, 4096), Sizes(8, 256, 4096)),
        Sizes(3, 4, 8),
    ),
    "maml": Row(
        "MAML with five inner steps, eight tasks",
        maml,
        (Sizes(4, 64, 2048, inputs=16),),
        Sizes(3, 4, 32),
    ),
    "hessian": Row(
        "A Hessian by jacfwd(jacrev)",
        hessians,
        (Sizes(4, 64, 512, inputs=16),),
        Sizes(3, 4, 8),
    ),
    "penalty": Row(
        "The gradient of a Jacobian penalty",
        penalty,
        (Sizes(4, 64, 1024, inputs=16, outputs=8),),
        Sizes(3, 4, 8, outputs=2),
    ),
    "third": Row(
        "A third derivative", third, (Sizes(4, 64, 4096, inputs=1),), Sizes(3, 4, 8)
    ),
}


def measured(row: Row, sizes: Sizes, quick: bool) -> dict[str, Line]:
    """Every contender: its result held against plain torch's, counted, and timed in turn."""
    torch.manual_seed(0)
    params, x = parameters(sizes), torch.randn(sizes.points, sizes.inputs)
    regions = {f"remat, {name}": remat(network, policy=p) for name, p in KEPT.items()}
    units: dict[str, Network] = {PLAIN: network, **regions}
    steps = {
        name: lambda unit=unit: row.step(unit, params, x)
        for name, unit in units.items()
    }
    expected = tree_leaves(steps[PLAIN]())
    for step in steps.values():
        torch.testing.assert_close(tree_leaves(step()), expected, rtol=1e-3, atol=1e-4)
    pace = Pace.quick() if quick else Pace.of(steps)
    times = interleaved(steps, pace.rounds, pace.turns, pace.lead, clock())
    ratios = paired(times, times[PLAIN])
    return {name: _line(ratios[name], step) for name, step in steps.items()}


def _line(ratio: Ratio, step: Callable[[], Any]) -> Line:
    counts = count_operators(step)
    return Line(
        ratio,
        allocated(step).peak,
        sum(count for name, count in counts.items() if name in PRODUCTS),
        sum(count for name, count in counts.items() if name not in ALIASING),
    )


def table(title: str, lines: Mapping[str, Line]) -> str:
    """A Markdown table of one row at one size."""
    found = [
        f"### {title}\n",
        "| | ms | over no remat | quartiles | peak MiB | products | operators |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    found += [
        f"| {name} | {each.ratio.time_s * 1e3:.2f} | {each.ratio.median:.3f} | "
        f"{each.ratio.low:.3f} to {each.ratio.high:.3f} | "
        f"{each.peak_bytes / 2**20:.3f} | {each.products} | {each.operators} |"
        for name, each in lines.items()
    ]
    return "\n".join(found) + "\n"


def main(threads: int, names: Collection[str] = (), quick: bool = False) -> None:
    """Prints a table for each size of each row, or of those that are named."""
    torch.set_num_threads(threads)
    print(heading())
    for name, row in ROWS.items():
        sizes: Sequence[Sizes] = (row.quick,) if quick else row.sizes
        for each in sizes if not names or name in names else ():
            lines = measured(row, each, quick)
            print(table(f"{name}: {row.title}; {each}", lines), flush=True)
