"""What storages cost and save: the demo's GPT, its matmul outputs waiting in each.

Every row starts from the same parameters, sees the same batches and drops out by the same
keys; steps take turns. Plain autograd: under torch.func inputs wait as they are.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from remat import policies, random, remat, storage
from remat._regions import forwards, waiting as waiting_module
from remat.reporting._demo.gpt import GPTShape, block, initial_parameters, make_loss
from remat.reporting._demo.run import draw_batches

STEPS = 60


@dataclass
class Row:
    """One storage: its loss function, parameters and records."""

    name: str
    loss: object
    parameters: dict
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    file_bytes: int = 0
    kept_bytes: int = 0

    def step(self, batch: Tensor, key: Tensor) -> None:
        """One step of training."""
        started = time.perf_counter()
        loss = self.loss(self.parameters, batch, key)  # type: ignore[operator]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times_s.append(time.perf_counter() - started)
        self.losses.append(loss.item())

    def count(self, batch: Tensor, key: Tensor) -> None:
        """The bytes that wait in one step, in memory and in files."""
        honest = waiting_module.wait

        def wait(value: Tensor, how: object, place: object) -> Tensor:
            found = honest(value, how, place)  # type: ignore[arg-type]
            self.kept_bytes += value.nbytes
            waiting = isinstance(found, waiting_module.Waiting)
            for each in found.stored.tensors if waiting else (found,):
                if each.untyped_storage().filename is None:
                    self.memory_bytes += each.nbytes
                else:
                    self.file_bytes += each.nbytes
            return found

        with mock.patch.object(forwards, "wait", wait):
            self.loss(self.parameters, batch, key)  # type: ignore[operator]


def storages(folder: str) -> dict[str, storage.AbstractStorage]:
    """By the name of the row."""
    file = storage.Offload(path=folder)
    return {
        "`Keep()`": storage.Keep(),
        "`Cast(torch.bfloat16)`": storage.Cast(torch.bfloat16),
        "`Quantize(8)`": storage.Quantize(8),
        "`Quantize(4)`": storage.Quantize(4),
        "`Quantize(2)`": storage.Quantize(2),
        "`Quantize(4, stochastic=True, key=...)`": storage.Quantize(
            4, stochastic=True, key=random.key(1)
        ),
        "`Offload(path=...)`": file,
        "`Quantize(8) >> Offload(path=...)`": storage.Quantize(8) >> file,
    }


def row(name: str, layer: object, shape: GPTShape) -> Row:
    """A row before its first step."""
    parameters = initial_parameters(shape, torch.Generator().manual_seed(0))
    leaves = [each for group in parameters.values() for each in group.values()]
    for each in leaves:
        each.requires_grad_()
    optimizer = torch.optim.AdamW(leaves, lr=1e-3)
    return Row(name, make_loss(shape, layer), parameters, optimizer)  # type: ignore[arg-type]


def main(threads: int) -> None:
    """Prints the table."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(storages(folder), STEPS)
    print(f"torch {torch.__version__}, {threads} thread(s), {STEPS} steps\n")
    print(table(rows))


def measured(
    storages: dict[str, storage.AbstractStorage],
    num_steps: int,
    shape: GPTShape | None = None,
) -> list[Row]:
    """The demo's GPT without remat, then with its matmul outputs in each storage."""
    shape = shape or GPTShape()
    rows = [row("no remat", block, shape)]
    for name, how in storages.items():
        region = remat(block, policy=policies.save_matmul_outputs.stored(how))
        rows.append(row(name, region, shape))
    for number, batch in enumerate(draw_batches(shape, num_steps, 0)):
        for each in rows:
            each.step(batch, random.fold_in(random.key(0), number))
    batch = next(draw_batches(shape, 1, 0))
    for each in rows:
        each.count(batch, random.key(0))
    rows[1].memory_bytes = rows[2].kept_bytes  # `Keep` is never asked to store
    return rows


def table(rows: list[Row]) -> str:
    """The rows as they stand in the docs; the first is without remat, the second keeps."""
    lines = [
        "| matmul outputs in | MiB in memory | MiB in files | step over no remat | loss |",
        "|---|--:|--:|--:|--:|",
    ]
    base = rows[0].times_s[5:]
    for each in rows:
        pairs = zip(each.times_s[5:], base, strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        sizes = [f"{size / 2**20:.2f}" for size in (each.memory_bytes, each.file_bytes)]
        shown = sizes if each is not rows[0] else ["", ""]
        loss = statistics.mean(each.losses[-5:])
        lines.append(
            f"| {each.name} | {shown[0]} | {shown[1]} | {ratio:.2f} | {loss:.4f} |"
        )
    return "\n".join(lines)
