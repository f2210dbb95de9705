"""Predicted peaks beside the allocator's: `python -m tests.benchmarks peaks`.

The step of each of twelve models is one region, under plans, a peak and policies. The command
fails where a step takes more than was predicted, or a tenth less.
"""

import importlib
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import Plan, plan, policies, random, remat
from remat.reporting._demo.gpt import GPTShape, block, initial_parameters, make_loss
from tests.benchmarks import transformers
from tests.benchmarks.memory import allocated
from tests.benchmarks.tables import heading

SIZE = transformers.Size(width=128, layers=3, length=64)
EXAMPLES = 8
MOST_ABOVE = 0.1


@dataclass(frozen=True)
class Model:
    """A step's loss, what it takes, and what it is differentiated by."""

    loss: Callable[..., Tensor]
    args: tuple[Any, ...]
    leaves: list[Tensor]


def _of_transformers(name: str) -> Model:
    model = transformers.a_model(transformers.MODELS[name], SIZE, "plain")
    batch = transformers.a_batch(model, SIZE, EXAMPLES)
    return _of_module(model, lambda batch: model(**batch).loss, batch)


def _of_module(model: nn.Module, loss: Callable[..., Tensor], *args: Any) -> Model:
    return Model(
        loss, args, [each for each in model.parameters() if each.requires_grad]
    )


def _demo() -> Model:
    shape = GPTShape(layers=4, width=64, heads=2, time=64, batch=EXAMPLES)
    generator = torch.Generator().manual_seed(0)
    parameters = initial_parameters(shape, generator)
    size = (shape.batch, shape.time + 1)
    batch = torch.randint(0, 256, size, generator=generator)
    leaves = [
        w.requires_grad_() for group in parameters.values() for w in group.values()
    ]
    return Model(make_loss(shape, block), (parameters, batch, random.key(0)), leaves)


def _convolutions() -> Model:
    def stage(given: int, made: int) -> list[nn.Module]:
        return [nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.GELU()]

    net = nn.Sequential(
        *stage(3, 32), *stage(32, 64), nn.MaxPool2d(2), *stage(64, 64), *stage(64, 128),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    labels = torch.arange(EXAMPLES)
    images = torch.randn(EXAMPLES, 3, 32, 32)
    return _of_module(net, lambda x: F.cross_entropy(net(x), labels), images)


def encoder() -> tuple[nn.Module, Tensor]:
    """torch's own transformer, and its input."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.1)
    net = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return net, torch.randn(EXAMPLES, 64, 128)


def mixer() -> tuple[nn.Module, Tensor]:
    """Layers of an MLP along the tokens and one along the channels, and an input."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(2))
            self.mlps = nn.ModuleList(
                nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n))
                for n in (64, 128)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.mlps[0](self.norms[0](x).mT).mT
            return x + self.mlps[1](self.norms[1](x))

    return nn.Sequential(*(Layer() for _ in range(4))), torch.randn(EXAMPLES, 64, 128)


def _of_net(net: nn.Module, x: Tensor) -> Model:
    return _of_module(net, lambda x: net(x).square().mean(), x)


MODELS: dict[str, Callable[[], Model]] = {
    **{name: lambda name=name: _of_transformers(name) for name in transformers.MODELS},
    "GPT of the demo": _demo,
    "convolutions": _convolutions,
    "nn.TransformerEncoder": lambda: _of_net(*encoder()),
    "MLP-Mixer": lambda: _of_net(*mixer()),
}


def _planned(model: Model) -> Iterator[tuple[str, Plan]]:
    """The plans of a step, by how they were asked for."""

    def by(**asked: Any) -> Plan:
        return plan(remat(model.loss, rng="preserve"), **asked)(*model.args)

    def saving(allowed: Any) -> Plan:
        return by(budget=policies.budget(1 << 40, allow=allowed))

    yield "nothing", saving(policies.nothing_saveable)
    yield "matmuls", saving(policies.save_matmul_outputs)
    yield "budget=0.5", by(budget=0.5)
    yield "budget=0.25", (quarter := by(budget=0.25))
    yield "everything", (most := saving(policies.everything_saveable))
    between = (quarter.predicted_peak_bytes + most.predicted_peak_bytes) // 2
    yield "peak between these", by(peak=between)


@dataclass(frozen=True)
class Line:
    """A model under a plan: bytes."""

    model: str
    asked: str
    predicted: int
    measured: int

    @property
    def above(self) -> float:
        """How much more was predicted, as a part of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def is_right(self) -> bool:
        """Whether the prediction may be trusted."""
        return 0 <= self.above <= MOST_ABOVE


def measured(name: str) -> Iterator[Line]:
    """A model under all of its plans."""
    torch.manual_seed(0)
    model, one = MODELS[name](), torch.ones(())
    for asked, found in _planned(model):
        region = remat(model.loss, policy=found.policy, rng="preserve")

        def step(region: Any = region) -> Any:
            return torch.autograd.grad(region(*model.args), model.leaves, one)

        step()
        yield Line(name, asked, found.predicted_peak_bytes, allocated(step).peak)


def main(threads: int) -> int:
    """Prints the table; how many predictions are wrong."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    print(heading())
    print(f"transformers {importlib.import_module('transformers').__version__}\n")
    print(
        "| model | asked for | predicted MiB | measured MiB | above |\n|---|---|--:|--:|--:|"
    )
    lines: list[Line] = []
    for name in MODELS:
        for line in measured(name):
            lines.append(line)
            mib = [f"{size / 2**20:.2f}" for size in (line.predicted, line.measured)]
            cells = [line.model, line.asked, *mib, f"{line.above:+.1%}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    right = sum(line.is_right for line in lines)
    lowest, *_, highest = sorted(line.above for line in lines)
    within = statistics.quantiles((line.above for line in lines), n=10)
    print(
        f"\n{right} of {len(lines)} right: {lowest:+.1%} to {highest:+.1%}, eight of ten "
        f"{within[0]:+.1%} to {within[-1]:+.1%}."
    )
    return len(lines) - right
