"""Planned steps on an accelerator: `python -m tests.benchmarks gpu-fit`.

Steps of a Llama of 1.2B parameters, a vision transformer and a stack of convolutions, in bfloat16
with AdamW, are planned by `modules.plan` for parts of the peak that they have without regions. Of
each it prints what was predicted, what the allocator counted, the model and its optimizer's state
included, and the time of a step. Nothing fails: what kernels hold inside and what the allocator
rounds up is not predicted. It needs an accelerator.
"""

import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from remat import BudgetError, modules
from remat.interop import transformers as interop

GIB = 2**30
PARTS = (0.9, 0.7, 0.5, 0.35)
ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """A training step.

    Attributes:
        title: of its rows.
        net: the model.
        call: its keyword arguments.
        loss: of what a call gives.
    """

    title: str
    net: nn.Module
    call: dict[str, Tensor]
    loss: Callable[[Any], Tensor]


def llama(width: int = 2048, layers: int = 16, length: int = 4096) -> Case:
    """Of whose loss and MLPs the numbers of tiles are planned, too."""
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        vocab_size=32_000,
        max_position_embeddings=length,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    net = transformers.AutoModelForCausalLM.from_config(config).train()
    interop.enable(net, tiled_loss=1, tiled_mlp=1)
    net.gradient_checkpointing_disable()
    tokens = torch.randint(0, 32_000, (2, length))
    call = {"input_ids": tokens, "labels": tokens}
    return Case(f"Llama {width} x {layers}", net, call, lambda found: found.loss)


def vision(width: int = 1024, layers: int = 24, examples: int = 64) -> Case:
    """Of images of 224 by 224, in patches of 16."""
    transformers = importlib.import_module("transformers")
    config = transformers.ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
    )
    net = transformers.ViTModel(config, add_pooling_layer=False).bfloat16().train()
    images = torch.randn(examples, 3, 224, 224, dtype=torch.bfloat16)
    return Case(
        f"ViT {width} x {layers}",
        net,
        {"pixel_values": images},
        lambda found: found.last_hidden_state.float().square().mean(),
    )


class _Convolutions(nn.Module):
    """Added to its input, (b, c, s, s)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.GroupNorm(8, channels), nn.SiLU()),
            nn.Conv2d(channels, channels, 3, padding=1),
            *(nn.GroupNorm(8, channels), nn.SiLU()),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def convolutions(channels: int = 256, layers: int = 16, size: int = 64) -> Case:
    """Residual blocks, of 16 examples."""
    net = nn.Sequential(*(_Convolutions(channels) for _ in range(layers))).bfloat16()
    x = torch.randn(16, channels, size, size, dtype=torch.bfloat16)
    return Case(
        f"convolutions {channels} x {layers}",
        net,
        {"input": x},
        lambda found: found.float().square().mean(),
    )


CASES = (llama, vision, convolutions)


@dataclass(frozen=True)
class Measured:
    """A step as it ran: the allocator's peak from before the model was made, and its time."""

    peak_bytes: int
    time_s: float


def rows_of(
    make: Callable[[], Case], device: torch.device, parts: Sequence[float] = PARTS
) -> Iterator[str]:
    """A line without regions, and one for each limit."""
    before = torch.accelerator.memory_allocated(device)
    torch.manual_seed(0)
    with device:
        case = make()
        optimizer = torch.optim.AdamW(case.net.parameters())

    def step() -> None:
        case.loss(case.net(**case.call)).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = _measured(step, device, before)
    yield _row(f"{case.title}, no regions", None, plain, plain)
    for part in parts:
        limit = int(part * plain.peak_bytes)
        title = f"{case.title}, {_shown(limit)} GiB"
        planned = modules.plan(
            case.net, peak=limit, step=modules.Step(case.loss, optimizer)
        )
        try:
            predicted = planned(**case.call).predicted_peak_bytes
        except BudgetError as error:
            lowest = str(error).partition("Pass peak=")[2].partition(".")[0]
            yield f"| {title} | refused: at least {_shown(int(lowest))} | | | | |"
        else:
            yield _row(title, predicted, _measured(step, device, before), plain)


def _measured(step: Callable[[], None], device: torch.device, before: int) -> Measured:
    """Once the optimizer has its state, and what is traced is traced."""
    for _ in range(2):
        step()
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    step()
    torch.accelerator.synchronize(device)
    peak = torch.accelerator.max_memory_allocated(device) - before
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        step()
        torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - started)
    return Measured(peak, statistics.median(times))


TABLE = (
    "| step, limit | predicted GiB | allocator GiB | more than predicted | ms | over no regions |\n"
    "|---|--:|--:|--:|--:|--:|"
)


def _row(title: str, predicted: int | None, run: Measured, plain: Measured) -> str:
    more = "" if predicted is None else f"{run.peak_bytes / predicted - 1:+.1%}"
    times = (f"{run.time_s * 1e3:.1f}", f"{run.time_s / plain.time_s:.3f}")
    foretold = "" if predicted is None else _shown(predicted)
    cells = (title, foretold, _shown(run.peak_bytes), more, *times)
    return f"| {' | '.join(cells)} |"


def _shown(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f}"


def main(threads: int, cases: Sequence[Callable[[], Case]] = CASES) -> int:
    """Prints the table; 0, as no bound is stated."""
    torch.set_num_threads(threads)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        print("gpu-fit needs an accelerator.")
        return 0
    warnings.simplefilter("ignore")
    module: Any = torch.get_device_module(device)
    name = getattr(module, "get_device_name", str)(device)
    print(f"torch {torch.__version__}, {name}, {ROUNDS} rounds.\n")
    print(TABLE, flush=True)
    for make in cases:
        for line in rows_of(make, device):
            print(line, flush=True)
        torch.accelerator.empty_cache()
    return 0
