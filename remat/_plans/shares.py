"""One budget split among several calls, as often as a search for a peak needs it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

from remat._plans.plan import Plan
from remat.planners import Share, share
from remat.policies._sizes import show_size

#: A budget, in bytes, into which everything fits.
ANY_BYTES = 2**62
_TRIED = 16  # a heuristic: how many budgets are tried for a peak,
_HALVED = 4  # and how often the step between two of them is halved


@final
class Shares:
    """What some calls save within a budget for all of them; equal ones are planned once.

    Args:
        planners: for each call, from its share to its plan.
        wanted: for each call, which of its arguments have a gradient. Of equal forwards, that
            of a model's first block may have none, and another backward.
        where: what messages call the budget.
    """

    def __init__(
        self,
        planners: Sequence[Callable[[int], Plan]],
        wanted: Sequence[tuple[bool, ...]],
        where: str = "a budget",
    ) -> None:
        self._planners, self._where = planners, where
        #: The plans for saving everything. By a size, and not by the fraction 1.0: a draw's
        #: recorded state may be more than all that is saved without remat.
        self.whole = [each(ANY_BYTES) for each in planners]
        kinds: dict[Any, list[int]] = {}
        for place, key in enumerate(zip(wanted, self.whole, strict=True)):
            kinds.setdefault((key[0], key[1].fingerprint), []).append(place)
        self._kinds = list(kinds.values())

    @property
    def most_bytes(self) -> int:
        """What all calls save together if they save everything."""
        return sum(each.saved_bytes for each in self.whole)

    @functools.cached_property
    def _frontiers(self) -> list[list[tuple[int, Share]]]:
        """For each kind its budgets, with what they come to: each takes seconds."""
        return [
            [
                (point.budget_bytes, Share(point.saved_bytes, point.recompute_cost))
                for point in self.whole[places[0]].frontier()
            ]
            for places in self._kinds
        ]

    @functools.cached_property
    def _known(self) -> dict[tuple[int, int], Plan]:
        return {}

    def _plan_of_kind(self, kind: int, size: int) -> Plan:
        key = kind, size
        if key not in self._known:
            self._known[key] = self._planners[self._kinds[kind][0]](size)
        return self._known[key]

    def split(self, total: int) -> list[Plan]:
        """The plan of each call, so that the least is recomputed within so many bytes.

        Raises:
            BudgetError: more is held even if nothing is saved.
        """
        taken = share(
            [[point for _, point in points] for points in self._frontiers],
            [len(places) for places in self._kinds],
            total,
            self._where,
        )
        plans = list(self.whole)
        for kind, (places, chosen) in enumerate(zip(self._kinds, taken, strict=True)):
            for place, k in zip(places, chosen, strict=True):
                plans[place] = self._plan_of_kind(kind, self._frontiers[kind][k][0])
        return plans


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """The plans of calls within a budget for all of them, and the peak that they come to."""

    budget_bytes: int
    plans: tuple[Plan, ...]
    peak_bytes: int

    def __str__(self) -> str:
        flops = sum(each.recompute_flops for each in self.plans)
        return f"peak {show_size(self.peak_bytes)}, recomputes {flops:.3g} FLOPs"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """What a search for a peak found.

    Attributes:
        cheaper: the nearest that was tried which recomputes less, and has a higher peak.
        found: what fits; if nothing does, the lowest peak that was tried.
        dearer: the nearest that was tried which recomputes more.
        fits: whether `found` is within the limit.
    """

    cheaper: Tried | None
    found: Tried
    dearer: Tried | None
    fits: bool

    @property
    def neighbors(self) -> str:
        """A line for each of the points beside what was found."""
        beside = {"cheaper": self.cheaper, "dearer": self.dearer}
        return "\n".join(f"{name}: {each}" for name, each in beside.items() if each)


class Splits(Protocol):
    """Calls among which a budget is split."""

    @property
    def whole(self) -> Sequence[Plan]: ...
    def split(self, total: int) -> Sequence[Plan]: ...


def within(
    splits: Splits,
    most: int | None,
    limit: int,
    peak_of: Callable[[Sequence[Plan]], int],
) -> Search:
    """Looks for the largest budget of at most `most` bytes whose peak is within a limit.

    The peak does not always grow with what is saved, as recomputation takes room, too: so
    budgets are tried from the largest down, in even steps, and then between two of them.
    """

    def tried(total: int) -> Tried:
        plans = tuple(splits.split(total))
        return Tried(total, plans, peak_of(plans))

    fixed = sum(each.problem.fixed_bytes for each in splits.whole)
    saved = sum(each.saved_bytes for each in splits.whole)
    high = saved if most is None else min(most, saved)
    steps = (fixed + (high - fixed) * k // _TRIED for k in range(_TRIED, -1, -1))
    totals = iter(dict.fromkeys(steps))
    cheaper: Tried | None = None
    least = found = tried(next(totals))
    while found.peak_bytes > limit:
        cheaper, total = found, next(totals, None)
        if total is None:
            return Search(None, least, None, False)
        found = tried(total)
        least = min(least, found, key=lambda each: each.peak_bytes)
    for _ in range(_HALVED):
        if cheaper is not None:
            each = tried((cheaper.budget_bytes + found.budget_bytes) // 2)
            fits = each.peak_bytes <= limit
            cheaper, found = (cheaper, each) if fits else (each, found)
    less = next(totals, None)
    return Search(cheaper, found, None if less is None else tried(less), True)
