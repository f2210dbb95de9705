"""The bytes of a step, as the allocator sees them.

torch's profiler notes each allocation and release, by whomever: an operator, a kernel for a
buffer of its own, compiled code that asks no dispatcher. So one tracker serves all contenders.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Bytes:
    """What a run did to the allocator.

    Attributes:
        left: what it allocated and had not released when it ended.
        peak: the most that was allocated at one time since it began.
    """

    left: int
    peak: int


def allocated(run: Callable[[], object]) -> Bytes:
    """The bytes of one run, whose result lives until they are counted."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    found = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    counted = running(size for _, size in sorted(found, key=lambda each: each[0]))
    del result
    return counted


def running(changes: Iterable[int]) -> Bytes:
    """What is left of the changes, and the most that their running sum came to."""
    now = peak = 0
    for change in changes:
        now += change
        peak = max(peak, now)
    return Bytes(now, peak)
