"""Stated bounds, and how a measured row stands to them. A bound is never loosened here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.benchmarks.timing import Ratio, paired

MAX_SPREAD = 0.05
#: What is unsteady is looked at this many times as long.
LONGER = 3
FAILING = ("missed", "unsteady")


@dataclass(frozen=True)
class Bound:
    """A contender is at most `at_most` times another.

    Attributes:
        contender: whose figure is bounded.
        quantity: "time" or "peak bytes".
        beside: the contender, or the limit, that it is held against.
        at_most: the greatest ratio that meets the bound.
    """

    contender: str
    quantity: str
    beside: str
    at_most: float

    def __str__(self) -> str:
        return f"{self.contender}: {self.quantity} at most {self.at_most:g} of {self.beside}"


@dataclass(frozen=True)
class Verdict:
    """How a bound was met.

    Attributes:
        bound: which.
        ratio: what was measured.
        spread: of the ratio, as a fraction of it; 0 for what is counted.
        standing: "met"; "within spread", no further behind than the spread; "missed";
            "unsteady", with a spread above `MAX_SPREAD`.
    """

    bound: Bound
    ratio: float
    spread: float
    standing: str

    @property
    def fails(self) -> bool:
        """Whether the command ends with an error because of it."""
        return self.standing in FAILING


def judged(bound: Bound, ratio: float, spread: float = 0.0) -> Verdict:
    """The verdict on one figure."""
    if ratio * (1 - spread) > bound.at_most:
        standing = "missed"
    elif spread > MAX_SPREAD:
        standing = "unsteady"
    else:
        standing = "met" if ratio <= bound.at_most else "within spread"
    return Verdict(bound, ratio, spread, standing)


def verdicts(
    bounds: list[Bound],
    times: Mapping[str, list[float]],
    peaks: Mapping[str, int],
) -> list[Verdict]:
    """One for each bound whose both sides ran."""
    found: list[Verdict] = []
    for bound in bounds:
        if bound.quantity == "time":
            if bound.contender in times and bound.beside in times:
                ratio = ratio_of(times, bound.contender, bound.beside)
                found.append(judged(bound, ratio.median, ratio.spread))
        elif bound.contender in peaks and bound.beside in peaks:
            found.append(judged(bound, peaks[bound.contender] / peaks[bound.beside]))
    return found


def steady(
    measure: Callable[[int], dict[str, list[float]]],
    bounds: list[Bound],
    peaks: Mapping[str, int],
) -> tuple[dict[str, list[float]], list[Verdict]]:
    """The times, and how the bounds stand; what is unsteady is measured a second time.

    Args:
        measure: times of each contender by round, from that many times the usual turns.
        bounds: what is stated.
        peaks: bytes of each contender.
    """
    times = measure(1)
    found = verdicts(bounds, times, peaks)
    if any(each.spread > MAX_SPREAD for each in found):
        times = measure(LONGER)
        found = verdicts(bounds, times, peaks)
    return times, found


def ratio_of(times: Mapping[str, list[float]], one: str, other: str) -> Ratio:
    """The paired ratio of two contenders."""
    return paired({one: times[one]}, times[other])[one]
