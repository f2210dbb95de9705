"""Stated bounds, and how a measured row stands to them. A bound is never loosened here."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from tests.benchmarks.timing import Ratio, paired

MAX_SPREAD = 0.05
#: What is unsteady is looked at this many times as long.
LONGER = 3
FAILING = ("missed", "unsteady")


class Measure(Protocol):
    """Times contenders."""

    def __call__(self, names: Collection[str], longer: int) -> dict[str, list[float]]:
        """Seconds of each of them by round, from that many times the usual turns."""
        ...


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
    measure: Measure,
    names: Collection[str],
    bounds: list[Bound],
    peaks: Mapping[str, int],
) -> tuple[dict[str, list[float]], list[Verdict]]:
    """The times, and how the bounds stand; what is unsteady is measured a second time.

    The two sides of an unsteady bound then take turns with nobody between them, which keeps
    what a shared machine does for a while from falling on one of them alone.

    Args:
        measure: times of contenders by round.
        names: whom the row compares.
        bounds: what is stated.
        peaks: bytes of each contender.
    """
    times = measure(names, 1)
    return times, [
        _again(measure, each) if each.spread > MAX_SPREAD else each
        for each in verdicts(bounds, times, peaks)
    ]


def _again(measure: Measure, unsteady: Verdict) -> Verdict:
    bound = unsteady.bound
    times = measure((bound.contender, bound.beside), LONGER)
    (found,) = verdicts([bound], times, {})
    return found


def ratio_of(times: Mapping[str, list[float]], one: str, other: str) -> Ratio:
    """The paired ratio of two contenders."""
    return paired({one: times[one]}, times[other])[one]
