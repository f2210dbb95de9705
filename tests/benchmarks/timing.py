"""Interleaved timings: every contender has its turns in a round, and rounds are compared.

A turn is a step that counts, after one that does not: a training loop does not change its
functions from step to step either, and finds its code in the cache. Where steps are short a
round is many turns of each, one contender after the other, and what a contender took in it
is the median of its turns: what else a shared machine does for seconds, it does to all of
them, and what it does for a moment is left out.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

MIN_ROUNDS, MAX_ROUNDS = 7, 61
MAX_TURNS = 16
SHORT_S = 0.05
ROW_S = 24.0


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

    @property
    def spread(self) -> float:
        """Half of what the quartiles are apart, as a fraction of the median."""
        return (self.high - self.low) / 2 / self.median


@dataclass(frozen=True)
class Elapsed:
    """What a step gives that another process has taken and timed.

    Attributes:
        seconds: by the clock of that process.
    """

    seconds: float


@dataclass(frozen=True)
class Pace:
    """How often a row's contenders have their turn.

    Attributes:
        rounds: how many are compared.
        turns: of each contender in a round.
        lead: the steps of a turn before the one that counts.
    """

    rounds: int
    turns: int
    lead: int

    @classmethod
    def quick(cls) -> "Pace":
        """As little as can be compared."""
        return cls(rounds=2, turns=1, lead=0)

    @classmethod
    def of(cls, steps: Mapping[str, Callable[[], object]]) -> "Pace":
        """7 rounds, of as many turns as a row has time for; more where steps are short."""
        started = time.perf_counter()
        for step in steps.values():
            step()
        total_s = time.perf_counter() - started
        mean_s = total_s / len(steps)
        lead = int(mean_s < SHORT_S)
        num_turns = int(ROW_S / (total_s * (1 + lead)))
        turns = max(1, min(MAX_TURNS, num_turns // MIN_ROUNDS))
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, num_turns // turns))
        return cls(rounds, turns, lead)

    def longer(self, times: int) -> "Pace":
        """As many rounds, of that many times the turns."""
        return replace(self, turns=self.turns * times)


def clock() -> Callable[[], float]:
    """Seconds; on one thread the processor's, which are those of a machine of one's own."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def interleaved(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    turns: int = 1,
    lead: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each step in each round, after a warm-up, the collector off.

    Args:
        steps: the contenders.
        rounds: how many are compared.
        turns: how often each has its turn in a round; what it took is their median.
        lead: how many steps of a turn do not count, before the one that does.
        clock: seconds; those of the processor where others share the machine.
    """
    for step in steps.values():
        for _ in range(1 + 2 * lead):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            taken: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(turns):
                for name, step in steps.items():
                    for _ in range(lead):
                        step()
                    taken[name].append(_timed(step, clock))
            for name, seconds in taken.items():
                times[name].append(statistics.median(seconds))
    finally:
        gc.enable()
    return times


def _timed(step: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    found = step()
    return found.seconds if isinstance(found, Elapsed) else clock() - started


def summed(one: list[float], other: list[float]) -> list[float]:
    """What the two take together in each round."""
    return [a + b for a, b in zip(one, other, strict=True)]


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
