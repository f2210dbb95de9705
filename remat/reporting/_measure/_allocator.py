"""Reads the peak of CUDA's caching allocator, beside what the watcher counts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterable
from typing import final

import torch


@final
@dataclasses.dataclass
class AllocatorPeak:
    """A peak that is known once the step is over.

    Attributes:
        peak_bytes: the most that was allocated beyond what was there before, on all CUDA
            devices together; None where there is none.
    """

    peak_bytes: int | None = None


@contextlib.contextmanager
def allocator_peaks(devices: Iterable[torch.device]) -> Generator[AllocatorPeak]:
    """Measures, around a step, the peak of what it adds to the memory of CUDA devices.

    The allocator keeps one peak per device, which is reset here: what
    `torch.cuda.max_memory_allocated` recorded of earlier steps is lost.

    Args:
        devices: where the step's tensors are, each once.
    """
    found = AllocatorPeak()
    cuda = [device for device in devices if device.type == "cuda"]
    before = {device: torch.cuda.memory_allocated(device) for device in cuda}
    for device in cuda:
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    if before:
        found.peak_bytes = sum(
            torch.cuda.max_memory_allocated(device) - base
            for device, base in before.items()
        )
