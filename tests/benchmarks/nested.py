"""Derivatives of derivatives: `python -m tests.benchmarks nested`, or one of its rows.

Each row is a network of tanh layers, one region as a whole, under a nest of transforms as it
is used: by plain torch and under four policies. A line has the time over plain torch's, the
most that a step had allocated, and how many matrix products and operators (views aside) it
runs. No peer runs there but `jax.checkpoint`, whose lines stand where JAX is installed: its time
over plain torch's, and what XLA's own analysis says that a step needs.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from remat import checkpoint_name, policies, remat
from tests.benchmarks import jax_peer
from tests.benchmarks.contenders import PLAIN, POLICIES
from tests.benchmarks.memory import allocated
from tests.benchmarks.nests import STEPS, network
from tests.benchmarks.tables import heading
from tests.benchmarks.timing import Pace, Ratio, clock, interleaved, paired
from tests.laws.derivatives import TORCH
from tests.support import ALIASING, PRODUCTS, count_operators

Params = list[dict[str, Tensor]]

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
        sizes: each is a table.
        quick: small enough for a test.
    """

    title: str
    sizes: tuple[Sizes, ...]
    quick: Sizes


@dataclass(frozen=True)
class Line:
    """What one contender came to.

    Attributes:
        ratio: its time, and that over plain torch's.
        peak_bytes: the most that a step had allocated.
        products: how many products of matrices and vectors it runs, None if nobody counts them.
        operators: how many operators it runs, without views, None like those.
    """

    ratio: Ratio
    peak_bytes: int
    products: int | None = None
    operators: int | None = None

    @property
    def cells(self) -> str:
        """Those of the columns of a table."""
        ratio = self.ratio
        counts = ("" if n is None else n for n in (self.products, self.operators))
        return " | ".join(
            [
                f"{ratio.time_s * 1e3:.2f}",
                f"{ratio.median:.3f}",
                f"{ratio.low:.3f} to {ratio.high:.3f}",
                f"{self.peak_bytes / 2**20:.3f}",
                *map(str, counts),
            ]
        )


def parameters(sizes: Sizes) -> Params:
    """Those of a network."""
    inner = [sizes.width] * (sizes.layers - 1)
    widths = [sizes.inputs, *inner, sizes.outputs]
    return [
        {"w": torch.randn(above, below) * above**-0.5, "b": torch.randn(below)}
        for above, below in itertools.pairwise(widths)
    ]


ROWS = {
    "pinn": Row(
        "The gradient of a Laplacian",
        (Sizes(4, 64, 4096), Sizes(8, 256, 4096)),
        Sizes(3, 4, 8),
    ),
    "maml": Row(
        "MAML with five inner steps, eight tasks",
        (Sizes(4, 64, 2048, inputs=16),),
        Sizes(3, 4, 32),
    ),
    "hessian": Row(
        "A Hessian by jacfwd(jacrev)",
        (Sizes(4, 64, 512, inputs=16),),
        Sizes(3, 4, 8),
    ),
    "penalty": Row(
        "The gradient of a Jacobian penalty",
        (Sizes(4, 64, 1024, inputs=16, outputs=8),),
        Sizes(3, 4, 8, outputs=2),
    ),
    "third": Row("A third derivative", (Sizes(4, 64, 4096, inputs=1),), Sizes(3, 4, 8)),
}


def measured(name: str, sizes: Sizes, quick: bool) -> dict[str, Line]:
    """Every contender: its result held against plain torch's, counted, and timed in turn."""
    torch.manual_seed(0)
    params, x = parameters(sizes), torch.randn(sizes.points, sizes.inputs)
    plain = network(TORCH, checkpoint_name)
    regions = {f"remat, {keeps}": remat(plain, policy=p) for keeps, p in KEPT.items()}
    steps = {
        each: lambda unit=unit: STEPS[name](TORCH, unit, params, x)
        for each, unit in {PLAIN: plain, **regions}.items()
    }
    expected = tree_leaves(steps[PLAIN]())
    for step in steps.values():
        _require_close(tree_leaves(step()), expected)
    with _of_jax(name, params, x, expected) as answer:
        timed: dict[str, Callable[[], object]] = {**steps, **answer.steps}
        pace = Pace.quick() if quick else Pace.of(timed)
        times = interleaved(timed, pace.rounds, pace.turns, pace.lead, clock())
    ratios = paired(times, times[PLAIN])
    own = {each: line(ratios[each], step) for each, step in steps.items()}
    return own | {each: Line(ratios[each], n) for each, n in answer.peaks.items()}


def _require_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@contextlib.contextmanager
def _of_jax(
    name: str, params: Params, x: Tensor, expected: Sequence[Tensor]
) -> Generator[jax_peer.Answer]:
    """JAX's steps of a row; none where it is not installed."""
    task = jax_peer.Task({"nest": name}, params, x, tuple(KEPT))
    with jax_peer.answered(task) as answer:
        if answer is not None:
            # Its leaves are sorted by name, `b` before `w`, and torch's are not.
            order = sorted(range(len(expected)), key=lambda k: (k // 2, -k))
            right = [expected[k] for k in order] if len(order) > 1 else expected
            _require_close(answer.values, right)
        yield answer or jax_peer.Answer((), {}, {})


def line(ratio: Ratio, step: Callable[[], Any]) -> Line:
    """What a step comes to that took so long."""
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
    found += [f"| {name} | {each.cells} |" for name, each in lines.items()]
    return "\n".join(found) + "\n"


def main(threads: int, names: Collection[str] = (), quick: bool = False) -> None:
    """Prints a table for each size of each row, or of those that are named."""
    torch.set_num_threads(threads)
    print(heading())
    for name, row in ROWS.items():
        sizes: Sequence[Sizes] = (row.quick,) if quick else row.sizes
        for each in sizes if not names or name in names else ():
            lines = measured(name, each, quick)
            print(table(f"{name}: {row.title}; {each}", lines), flush=True)
