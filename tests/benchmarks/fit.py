"""Steps under a limit of their peak: `python -m tests.benchmarks fit`.

`modules.plan(peak=, step=)` plans the whole training step of some models for limits between
the lowest peak that it knows and that of a step which saves everything. The command fails
where the tensors of a step take more than its limit, or a tenth less than was predicted. What
the allocator counted beside them, inside kernels, is printed: no program shows it.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import modules
from tests.benchmarks import peaks, transformers
from tests.benchmarks.memory import allocated
from tests.benchmarks.tables import heading
from tests.support import LiveBytes

SIZE = transformers.Size(width=128, layers=4, length=128)
EXAMPLES = 8
PARTS = (0.0, 0.1, 0.3, 0.6, 1.0)
MOST_ABOVE = 0.1


@dataclass(frozen=True)
class Model:
    """A model, a call of it, and what is a loss of what it returns."""

    module: nn.Module
    call: dict[str, Tensor]
    loss: Callable[[Any], Tensor]


def _of_transformers(name: str) -> Model:
    module = transformers.a_model(transformers.MODELS[name], SIZE, "plain")
    batch = transformers.a_batch(module, SIZE, EXAMPLES)
    return Model(module, batch, lambda found: found.loss)


def _of_module(net: nn.Module, x: Tensor, name: str = "input") -> Model:
    return Model(net, {name: x}, lambda found: found.square().mean())


def _residual() -> tuple[nn.Module, Tensor]:
    """Convolutions with batch norm, around which their input is added."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.ModuleList(
                nn.Conv2d(32, 32, 3, padding=1) for _ in range(2)
            )
            self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.norms[0](self.convolutions[0](x)))
            return F.relu(x + self.norms[1](self.convolutions[1](y)))

    return nn.Sequential(*(Stage() for _ in range(6))), torch.randn(8, 32, 32, 32)


MODELS: dict[str, Callable[[], Model]] = {
    **{
        name: lambda name=name: _of_transformers(name)
        for name in ("Llama", "GPT-2", "BERT", "ViT")
    },
    "nn.TransformerEncoder": lambda: _of_module(*peaks.encoder(), "src"),
    "MLP-Mixer": lambda: _of_module(*peaks.mixer()),
    "residual net": lambda: _of_module(*_residual()),
}


@dataclass(frozen=True)
class Line:
    """A model under a limit: bytes."""

    model: str
    limit: int
    predicted: int
    measured: int
    allocated: int

    @property
    def above(self) -> float:
        """How much more was predicted, as a part of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def is_right(self) -> bool:
        """Whether the step keeps to its limit, and the prediction may be trusted."""
        return self.measured <= self.limit and self.above <= MOST_ABOVE


def measured(name: str) -> Iterator[Line]:
    """A model under limits from its lowest peak to that of a step that saves everything."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.module.parameters())
    step = modules.Step(model.loss, optimizer)

    def planned(**asked: Any) -> modules.ModulePlan:
        return modules.plan(model.module, step=step, **asked)(**model.call)

    whole = planned(budget=1 << 40)
    high = whole.predicted_peak_bytes
    least = sum(row.plan.problem.fixed_bytes for row in whole.rows)
    low = min(high, planned(budget=least).predicted_peak_bytes)
    for limit in sorted({int(low + part * (high - low)) for part in PARTS}):
        found = planned(peak=limit).predicted_peak_bytes
        yield Line(name, limit, found, *_bytes_of_step(model, optimizer))


def _bytes_of_step(model: Model, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """The most that lives in a step once the optimizer has its state: tensors, and all."""

    def step() -> None:
        model.loss(model.module(**model.call)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [each for state in optimizer.state.values() for each in state.values()]
    resident = [*model.module.parameters(), *model.module.buffers(), *states]
    resident += model.call.values()
    # Token ids may be the labels, too.
    storages = {each.data_ptr(): each.untyped_storage().nbytes() for each in resident}
    before = sum(storages.values())
    with LiveBytes() as memory:
        step()
    return before + memory.peak, before + allocated(step).peak


def main(threads: int) -> int:
    """Prints the table; how many steps are over their limits, or predicted wrong."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    print(heading())
    print(f"transformers {importlib.import_module('transformers').__version__}\n")
    print("| model | limit MiB | predicted MiB | tensors MiB | allocator MiB | above |")
    print("|---|--:|--:|--:|--:|--:|")
    lines: list[Line] = []
    for name in MODELS:
        for line in measured(name):
            lines.append(line)
            sizes = (line.limit, line.predicted, line.measured, line.allocated)
            cells = [f"{size / 2**20:.2f}" for size in sizes]
            print(
                f"| {line.model} | {' | '.join(cells)} | {line.above:+.1%} |",
                flush=True,
            )
    over = sum(line.measured > line.limit for line in lines)
    lowest, *_, highest = sorted(line.above for line in lines)
    print(
        f"\n{over} of {len(lines)} steps over their limits; predictions {lowest:+.1%} to "
        f"{highest:+.1%} above."
    )
    return sum(not line.is_right for line in lines)
