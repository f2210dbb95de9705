"""Interleaved timings: every contender once a round, and what is compared is the round.

A contender runs some steps in a row, of which the first is not counted: a training loop
does not change its functions from step to step either, and finds its code in the cache.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """One contender against the base, over all rounds.

    Attributes:
        time_s: its median time.
        low: the first quartile of its paired ratios.
        median: their median.
        high: their third quartile.
    """

    time_s: float
    low: float
    median: float
    high: float


def interleaved(
    steps: Mapping[str, Callable[[], object]], rounds: int, burst: int = 1
) -> dict[str, list[float]]:
    """Seconds of each step in each round, after a warm-up, the collector off.

    Args:
        steps: the contenders.
        rounds: how often each has its turn.
        burst: how many steps a turn counts, after one that it does not.
    """
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, step in steps.items():
                step()
                started = time.perf_counter()
                for _ in range(burst):
                    step()
                times[name].append((time.perf_counter() - started) / burst)
    finally:
        gc.enable()
    return times


def paired(times: Mapping[str, list[float]], base: list[float]) -> dict[str, Ratio]:
    """Each contender's time over that of `base` in the same round."""
    found: dict[str, Ratio] = {}
    for name, each in times.items():
        ratios = [one / other for one, other in zip(each, base, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        found[name] = Ratio(statistics.median(each), low, median, high)
    return found


def table(title: str, unit: str, ratios: Mapping[str, Ratio]) -> str:
    """A Markdown table of medians and quartiles."""
    lines = [
        f"\n{title}\n",
        f"| | ms | over {unit} | quartiles |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {each.time_s * 1e3:.2f} | {each.median:.2f} | "
        f"{each.low:.2f} to {each.high:.2f} |"
        for name, each in ratios.items()
    ]
    return "\n".join(lines)
