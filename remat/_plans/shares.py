"""Budgets for the calls of regions: the least recomputation within bytes, or within a peak."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from remat._partition.budgets import peak_limit
from remat._plans.plan import ANY_BYTES, Plan, Planner
from remat.planners import Share, share
from remat.planners._shared_budget import MultipleChoice
from remat.policies._budget import Size
from remat.policies._sizes import show_size

_NODES = 200  # a heuristic: how often the search for a peak may branch
_APART = 0.01  # how much less the points beside what was found recompute, or hold
_ROUGHLY = 4  # of how many budgets of a frontier a rough look takes one
# A heuristic, of what could be gained: many small kernels take time, too.
_CLEARLY = 0.05


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Loads:
    """What lives at the moments of a step, as a sum over the plans of its calls."""

    fixed: Sequence[int]  # the bytes at each moment that no plan changes
    #: From the place of a call and its plan to what the plan adds at each moment.
    added: Callable[[int, Plan], Sequence[int]]

    def peak(self, plans: Sequence[Plan]) -> int:
        """The most that lives at one moment."""
        parts = [self.fixed, *(self.added(k, each) for k, each in enumerate(plans))]
        return max(map(sum, zip(*parts, strict=True)), default=0)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """What a search for a peak found."""

    #: The plans that recompute least; if nothing fits, those of the lowest peak that the
    #: solver came upon.
    found: Sequence[Plan]
    limit: int  # the most that may live at one moment
    peak: int  # the most that lives at one moment by them
    #: No budgets that were offered recompute less within the limit; 0 if nothing fits.
    lower_bound: int = 0
    #: A line for the lowest peak of plans that recompute a hundredth less, and one for the
    #: least recomputation with a peak so much lower, where there are such.
    neighbors: str = ""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.peak <= self.limit

    @property
    def cost(self) -> int:
        """What the plans recompute, in the unit of their costs."""
        return sum(each.recompute_cost for each in self.found)

    @property
    def gap(self) -> float:
        """The fraction of the cost by which the best of these budgets could be cheaper."""
        return (self.cost - self.lower_bound) / self.cost if self.cost else 0.0

    def is_better_than(self, other: Search) -> bool:
        """Whether it is clearly nearer to the limit, or within it recomputes clearly less."""
        if not other.fits:
            above = other.peak - other.limit
            return self.fits or other.peak - self.peak > _CLEARLY * above
        if not self.fits:
            return False
        steps = [step.cost for each in other.found for step in each.problem.steps]
        return other.cost - self.cost > _CLEARLY * sum(steps)


@final
class Shares:
    """Budgets for calls, of which equal ones are planned once.

    Args:
        planners: of each call.
        regions: for each call, the region that has one budget for all of its calls; None
            where each call has its own.
        where: what messages call the budget.
        is_rough: whether a look at few budgets of each region is enough.
    """

    def __init__(
        self,
        planners: Sequence[Planner],
        regions: Sequence[Hashable] | None = None,
        where: str = "a budget",
        *,
        is_rough: bool = False,
    ) -> None:
        self._planners, self._where, self._is_rough = planners, where, is_rough
        first: dict[Any, int] = {}
        # For each call the first that is equal.
        self._equal = [
            first.setdefault((p.wanted, p.devices, p.fingerprint), k)
            for k, p in enumerate(planners)
        ]
        units: dict[Hashable, list[int]] = {}
        for place in range(len(planners)):
            units.setdefault(regions[place] if regions else place, []).append(place)
        #: The places of the calls that have one budget.
        self.units = list(units.values())
        self._kinds = [tuple(self._equal[k] for k in unit) for unit in self.units]
        self._known: dict[tuple[int, int], Plan] = {}
        #: The plans for saving everything.
        self.whole = [self.plan(k, ANY_BYTES) for k in range(len(planners))]

    def plan(self, place: int, size: int) -> Plan:
        """What a call saves within so many bytes."""
        key = self._equal[place], size
        if key not in self._known:
            self._known[key] = self._planners[key[0]].within(size)
        return self._known[key]

    @functools.cached_property
    def without_remat(self) -> list[Plan]:
        """The plans for saving everything, whatever a budget allows."""
        known = {
            k: self._planners[k].without_remat() for k in dict.fromkeys(self._equal)
        }
        return [known[k] for k in self._equal]

    @functools.cached_property
    def _frontiers(self) -> dict[tuple[int, ...], list[tuple[int, Share]]]:
        """For each kind of unit the budgets that it may have, with what they come to."""
        return {kind: self._frontier(kind) for kind in dict.fromkeys(self._kinds)}

    def _frontier(self, places: tuple[int, ...]) -> list[tuple[int, Share]]:
        problems = [self.whole[place].problem for place in {*places}]
        least = max(each.fixed_bytes for each in problems)
        apart = _ROUGHLY if self._is_rough else 1
        budgets = {b for each in problems for b in each.budgets[::apart]}
        sizes = sorted(b for b in budgets if b >= least)
        if not self._is_rough:
            # Half as far apart as in a plan's frontier: a coarser choice costs a tenth more.
            sizes += [sum(pair) // 2 for pair in itertools.pairwise(sizes)]
        found: dict[int, tuple[int, Share]] = {}
        for size in sorted(sizes):
            plans = [self.plan(place, size) for place in places]
            saved = sum(each.saved_bytes for each in plans)
            cost = sum(each.recompute_cost for each in plans)
            found.setdefault(cost, (size, Share(saved, cost)))
        return [*found.values()]

    def _plans(self, sizes: Sequence[int]) -> list[Plan]:
        """The plan of each call, by the budgets of units."""
        size_of = {
            place: size
            for unit, size in zip(self.units, sizes, strict=True)
            for place in unit
        }
        return [self.plan(place, size) for place, size in sorted(size_of.items())]

    def split(self, total: int) -> list[Plan]:
        """The plan of each call, so that the least is recomputed within so many bytes.

        Raises:
            BudgetError: more is held even if nothing is saved.
        """
        counts, frontiers = Counter(self._kinds), self._frontiers
        taken = share(
            [[point for _, point in points] for points in frontiers.values()],
            [counts[kind] for kind in frontiers],
            total,
            self._where,
        )
        sizes = {
            kind: iter([points[k][0] for k in chosen])
            for (kind, points), chosen in zip(frontiers.items(), taken, strict=True)
        }
        return self._plans([next(sizes[kind]) for kind in self._kinds])

    def within(self, limit: int, loads: Loads, most: float | None = None) -> Search:
        """The plans that recompute least while the peak of these loads is within a limit.

        `most` is how many bytes may be saved in all.
        """
        points = [
            (unit, size, point)
            for unit, kind in enumerate(self._kinds)
            for size, point in self._frontiers[kind]
        ]
        rows = np.array([self._column(*each, loads) for each in points]).T
        units, counts = np.array([each[0] for each in points]), [1] * len(self.units)
        program = MultipleChoice(units, np.array(counts), rows[0], rows)
        total = np.inf if most is None else most

        def taken(
            peak: float, cost: float = np.inf, soft: int | None = None
        ) -> tuple[list[Plan], int] | None:
            limits = [cost, total, *(peak - each for each in loads.fixed)]
            found = program.take(limits, soft, _NODES)
            if found is None:
                return None
            sizes = [points[k][1] for k in np.flatnonzero(found.counts)]
            return self._plans(sizes), found.lower_bound

        best = taken(limit) or taken(limit, soft=2)
        # Where there is none the bytes in all are too few, which the split says.
        found, lower_bound = best or (self.split(int(total)), 0)
        peak = loads.peak(found)
        search = Search(found, limit, peak, lower_bound)
        if not search.fits:
            return search
        cost = search.cost
        cheaper = taken(limit, (1 - _APART) * cost, soft=2) if cost else None
        dearer = taken((1 - _APART) * peak) or taken(limit, soft=2)
        if dearer is not None and loads.peak(dearer[0]) >= peak:
            dearer = None
        beside = {"cheaper": cheaper, "dearer": dearer}
        lines = [_shown(name, each[0], loads) for name, each in beside.items() if each]
        return dataclasses.replace(search, neighbors="\n".join(lines))

    def _column(self, unit: int, size: int, point: Share, loads: Loads) -> list[int]:
        """What a budget of a unit costs, saves, and adds at each moment."""
        added = [loads.added(k, self.plan(k, size)) for k in self.units[unit]]
        return [point.cost, point.saved_bytes, *map(sum, zip(*added, strict=True))]


def limit_of(
    peak: Size, shares: Shares, loads: Loads, tensors: Sequence[Tensor], given: int
) -> int:
    """The most bytes that may live at one moment of a step.

    So many of them were `given`, and are there already. A fraction is one of the peak without
    remat.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    limit, free = peak_limit(peak, device, lambda: loads.peak(shares.without_remat))
    return limit if free is None else limit + given


def show_gap(gap: float) -> str:
    """The line that says how far a choice may be from the best."""
    return f"the best of these budgets recomputes at most {gap:.2%} less"


def _shown(name: str, plans: Sequence[Plan], loads: Loads) -> str:
    flops = sum(each.recompute_flops for each in plans)
    peak = show_size(loads.peak(plans))
    return f"{name}: peak {peak}, recomputes {flops:.3g} FLOPs"
