"""The demo: a small GPT learns English under several policies, and is measured.

It trains under `torch.func.grad`, where recomputation by saved-tensor hooks raises. The text ships
with every CPython: the help topics of `pydoc`. All rows start from the same parameters, see the
same batches and use the same dropout keys. Their steps take turns, so that a slow moment of the
machine affects all of them. Bytes are measured by `LiveBytes`. Rows are shown as a table or JSON.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from remat import policies, random
from remat._api import remat
from remat._torch import trees
from remat.policies._sizes import show_size
from remat.reporting._demo.gpt import (
    Block,
    GPTShape,
    Parameters,
    block,
    initial_parameters,
    make_loss,
)
from remat.reporting._measure.live_bytes import LiveBytes
from remat.reporting._measure.step import median_and_spread
from remat.reporting._show.progress import progress
from remat.reporting._show.text import show_ratio, table

_LEARNING_RATE = 1e-3
_POLICIES = (
    policies.nothing_saveable,
    policies.save_matmul_outputs,
    policies.save_only_these_names("attn"),
)
_HEADINGS = ("policy", "final loss", "held", "", "peak", "", "step time", "", "")


_LEGEND = """
held: bytes that live between forward and backward; peak: the most in one step;
both measured, beyond parameters and batch. Ratios are to no remat; +- is half of
what the quartiles of the times are apart."""


@final
@dataclass(frozen=True, slots=True)
class DemoRow:
    """What one policy cost, and what it computed."""

    name: str  # the policy, as code, or "no remat"
    losses: tuple[float, ...]  # the loss of each step, in nats a byte
    # what lives between forward and backward, beyond parameters and batch
    held_bytes: int
    # the most that lives at one time in one step, gradients included, beyond
    # parameters and batch
    peak_bytes: int
    step_time_s: float  # median time of one step
    spread_s: float  # half of what the quartiles of these times are apart


@final
class _Trainer:
    """One row while it trains: its loss function, its own parameters, its records."""

    def __init__(self, name: str, block: Block, shape: GPTShape, seed: int) -> None:
        self.name = name
        self.loss = make_loss(shape, block)
        generator = torch.Generator().manual_seed(seed)
        self.parameters = initial_parameters(shape, generator)
        leaves = trees.tensor_leaves(self.parameters)
        self.optimizer: Optimizer = torch.optim.AdamW(leaves, lr=_LEARNING_RATE)
        self.losses: list[float] = []
        self.times_s: list[float] = []


def run_demo(
    num_steps: int, seed: int = 0, shape: GPTShape | None = None
) -> list[DemoRow]:
    """Trains the model once under each policy and measures it, first without remat.

    The seed decides initial parameters, batches and what is dropped out, for all rows.
    """
    shape = shape or GPTShape()
    blocks = {"no remat": block, **{repr(p): remat(block, policy=p) for p in _POLICIES}}
    trainers = [_Trainer(name, b, shape, seed) for name, b in blocks.items()]
    batches = draw_batches(shape, num_steps, seed)
    key = random.key(seed)
    with progress("training each policy", num_steps, sys.stderr) as advance:
        for step, batch in enumerate(batches):
            for trainer in trainers:
                _step(trainer, batch, random.fold_in(key, step))
            advance(f"loss {trainers[0].losses[-1]:.3f}")
    batch = next(draw_batches(shape, 1, seed))
    return [_measure(trainer, batch, key) for trainer in trainers]


def draw_batches(shape: GPTShape, num_steps: int, seed: int) -> Iterator[Tensor]:
    """Yields batches of random windows of the text, int64 of shape (b, t + 1)."""
    text = torch.frombuffer(bytearray(english_text()), dtype=torch.uint8)
    windows = text.unfold(0, shape.time + 1, 1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        starts = torch.randint(
            len(windows), (shape.batch,), generator=generator, device="cpu"
        )
        yield windows[starts].long().to(torch.get_default_device())


def english_text() -> bytes:
    """Returns the help topics of `pydoc`, about 450 KiB of English, as UTF-8."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _step(trainer: _Trainer, batch: Tensor, key: Tensor) -> None:
    """Takes one step of training, and records its loss and its time."""
    start = time.perf_counter()
    grad = torch.func.grad_and_value(trainer.loss)
    gradients, loss = grad(trainer.parameters, batch, key)
    leaves = map(trees.tensor_leaves, (trainer.parameters, gradients))
    for parameter, gradient in zip(*leaves, strict=True):
        parameter.grad = gradient
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    trainer.times_s.append(time.perf_counter() - start)
    trainer.losses.append(loss.item())


def _measure(trainer: _Trainer, batch: Tensor, key: Tensor) -> DemoRow:
    """Runs one more step, without the optimizer, and counts its bytes."""

    def loss(parameters: Parameters) -> Tensor:
        return trainer.loss(parameters, batch, key)

    with LiveBytes() as forward:
        loss_and_pullback = torch.func.vjp(loss, trainer.parameters)
        held_bytes = forward.current_bytes
    del loss_and_pullback
    with LiveBytes() as step:
        torch.func.grad(loss)(trainer.parameters)
    times_s, losses = median_and_spread(trainer.times_s), tuple(trainer.losses)
    return DemoRow(trainer.name, losses, held_bytes, step.peak_bytes, *times_s)


def first_loss_difference(rows: Sequence[DemoRow]) -> str | None:
    """Says which loss, in row order, is the first that is not the first row's to the bit."""
    for row in rows[1:]:
        pairs = zip(rows[0].losses, row.losses, strict=True)
        for step, (expected, actual) in enumerate(pairs, start=1):
            if expected.hex() != actual.hex():
                return (
                    f"the loss under {row.name} differs from the one without remat at "
                    f"step {step}: {actual.hex()} in place of {expected.hex()}"
                )
    return None


def demo_table(rows: Sequence[DemoRow]) -> str:
    """Returns the rows as aligned text; the ratios are to the first row, no remat."""
    plain, difference = rows[0], first_loss_difference(rows)
    cells = [
        (
            row.name,
            f"{row.losses[-1]:.9g}",  # nine digits tell any two float32 apart
            show_size(row.held_bytes),
            show_ratio(row.held_bytes, plain.held_bytes),
            show_size(row.peak_bytes),
            show_ratio(row.peak_bytes, plain.peak_bytes),
            f"{row.step_time_s * 1000:.1f} ms",
            show_ratio(row.step_time_s, plain.step_time_s),
            f"+- {row.spread_s * 1000:.1f} ms",
        )
        for row in rows
    ]
    verdict = f"NOT EQUAL: {difference}."
    if difference is None:
        every = f"All {len(plain.losses)} losses are equal in every row to the last bit"
        verdict = f"{every}; the final one is {plain.losses[-1].hex()}."
    return "\n".join([*table(_HEADINGS, cells), _LEGEND, verdict])


def demo_json(rows: Sequence[DemoRow]) -> str:
    """Returns the rows as JSON; `loss_bits` writes the final loss without rounding."""
    shown: list[dict[str, Any]] = []
    for row in rows:
        figures = asdict(row)
        name, loss = figures.pop("name"), figures.pop("losses")[-1]
        losses = {"final_loss": loss, "loss_bits": loss.hex()}
        shown.append({"policy": name, **losses, **figures})
    is_equal = first_loss_difference(rows) is None
    return json.dumps({"losses_equal": is_equal, "rows": shown}, indent=2)
