"""One budget split among several calls, as often as a search for a peak needs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import final

from remat._plans.plan import Plan
from remat.planners import Share, share

#: A budget, in bytes, into which everything fits.
ANY_BYTES = 2**62
_TRIED = 16  # a heuristic: how many budgets are tried for a peak


@final
class Shares:
    """What some calls save within a budget for all of them; equal ones are planned once.

    Args:
        planners: for each call, from its share to its plan.
        where: what messages call the budget.
    """

    def __init__(
        self, planners: Sequence[Callable[[int], Plan]], where: str = "a budget"
    ) -> None:
        self._planners, self._where = planners, where
        #: The plans for saving everything. By a size, and not by the fraction 1.0: a draw's
        #: recorded state may be more than all that is saved without remat.
        self.whole = [each(ANY_BYTES) for each in planners]
        kinds: dict[str, list[int]] = {}
        for place, each in enumerate(self.whole):
            kinds.setdefault(each.fingerprint, []).append(place)
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

    def descending(self, most: int | None) -> Iterator[tuple[int, list[Plan]]]:
        """Budgets in even steps from `most` down to the least, each with its plans."""
        fixed = sum(each.problem.fixed_bytes for each in self.whole)
        high = self.most_bytes if most is None else min(most, self.most_bytes)
        steps = (fixed + (high - fixed) * k // _TRIED for k in range(_TRIED, -1, -1))
        for total in dict.fromkeys(steps):
            yield total, self.split(total)
