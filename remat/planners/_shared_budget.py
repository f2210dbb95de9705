"""One budget for several programs: which point of its frontier each program takes.

A multiple-choice knapsack of one or several capacities (Kellerer, Pferschy, Pisinger, Knapsack
Problems, 2004, chapter 11), solved as an integer program. Equal programs that are bounded by
their sum alone share variables that count them, because symmetry is what makes it hard.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from remat._errors import BudgetError
from remat.planners._scipy import scipy

_LIMIT_REACHED = 1  # `status` of scipy's `milp`: as often as it may, HiGHS has branched
_TRIES = 8  # a heuristic: the last one tightens a limit by ten of its units


@final
@dataclass(frozen=True, slots=True)
class Share:
    """A point of a program's frontier."""

    saved_bytes: int  # what it holds
    cost: int  # what it recomputes


@final
@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What was taken within some limits.

    Attributes:
        counts: how often each point is.
        lower_bound: nothing within the limits costs less; 0 where costs did not decide.
    """

    counts: Any
    lower_bound: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class MultipleChoice:
    """Points of which a number is taken of each kind, while sums over what is taken are bounded.

    Attributes:
        kinds: of each point the kind of program that can take it.
        counts: how many points are taken of each kind.
        costs: of each point.
        loads: shape (bound, point): what each point adds to each sum.
    """

    kinds: Any
    counts: Any
    costs: Any
    loads: Any

    def take(
        self, limits: Sequence[float], soft: int | None = None, nodes: int | None = None
    ) -> Taken | None:
        """Takes points so that costs are least and each sum is within its limit.

        From the sum `soft` on limits may be exceeded; then the largest excess is least, and not
        the costs. `nodes` is how often HiGHS may branch. None where nothing is within the limits.
        """
        allowed = np.array(limits, dtype=float)
        # The unit in which HiGHS is told each sum.
        units = np.maximum(1.0, np.abs(self.loads).max(axis=1)) / 1e3
        lower_bound = 0
        for attempt in range(_TRIES):
            taken = self._solved(allowed, units.copy(), soft, nodes)
            if taken is None:
                return None
            if attempt == 0:  # later ones have tighter limits than were asked for
                lower_bound = taken.lower_bound
            over = np.maximum(self.loads @ taken.counts - limits, 0)
            if soft is not None:
                over[soft:] = 0
            if not over.any():
                return Taken(taken.counts, lower_bound)
            # HiGHS counts in floating point, and can be over by a part in a million.
            least = units * 10.0 ** (attempt - 6)
            allowed -= np.where(over > 0, np.maximum(over, least), 0)
        return None

    def _solved(
        self, limits: Any, unit: Any, soft: int | None, nodes: int | None
    ) -> Taken | None:
        unit_of_costs = max(1.0, self.costs.max())
        costs = np.append(self.costs / unit_of_costs, 0.0)
        # The last variable is by how much limits are exceeded.
        excess, most_excess = np.zeros(len(limits)), 0.0
        if soft is not None:
            unit[soft:] = unit[soft:].max()
            excess[soft:], most_excess = -1.0, np.inf
            costs = np.append(np.zeros(len(self.kinds)), 1.0)
        of_kind = np.arange(len(self.counts))[:, None] == self.kinds
        most = self.counts[self.kinds]
        result: Any = scipy.optimize.milp(
            costs,
            integrality=np.append(np.ones(len(most)), 0),
            bounds=scipy.optimize.Bounds(
                np.append(np.zeros(len(most)), -most_excess),
                np.append(most, most_excess),
            ),
            constraints=[
                scipy.optimize.LinearConstraint(
                    np.column_stack([of_kind, np.zeros(len(self.counts))]),
                    self.counts,
                    self.counts,
                ),
                scipy.optimize.LinearConstraint(
                    np.column_stack([self.loads / unit[:, None], excess]),
                    ub=limits / unit,
                ),
            ],
            options={} if nodes is None else {"node_limit": nodes},
        )
        if result.x is None and result.status == _LIMIT_REACHED:
            return self._solved(limits, unit, soft, None)
        if result.x is None:
            return None
        counts = np.rint(result.x[:-1]).astype(np.int64)
        least = 0.0 if soft is not None else result.mip_dual_bound * unit_of_costs
        return Taken(counts, max(0, math.floor(min(least, self.costs @ counts))))


def share(
    frontiers: Sequence[Sequence[Share]],
    counts: Sequence[int],
    budget: int,
    where: str = "a budget",
) -> list[list[int]]:
    """Splits a budget among programs so that the least is recomputed in all.

    Laws: the bytes of all programs together never exceed the budget.

    Args:
        frontiers: for each kind of program the points that it can take.
        counts: how many programs there are of each kind.
        budget: the most bytes that all may hold together.
        where: what messages call the budget.

    Returns:
        For each kind the points that its programs take, in ascending order of bytes.

    Raises:
        BudgetError: all together hold more, even at their smallest points.

    Example:
        >>> from remat.planners import Share, share
        >>> points = [Share(0, 10), Share(4, 2)]
        >>> share([points], [3], 8)
        [[0, 1, 1]]
    """
    least = sum(
        count * min(each.saved_bytes for each in points)
        for points, count in zip(frontiers, counts, strict=True)
    )
    if least > budget:
        raise BudgetError.of(
            where=where,
            what=f"the {budget} bytes are too few.",
            why=f"{least} bytes are held even if nothing is saved.",
            do=f"Give at least {least} bytes.",
        )
    points = [each for own in frontiers for each in own]
    kinds = np.repeat(np.arange(len(frontiers)), [len(own) for own in frontiers])
    costs = np.array([float(each.cost) for each in points])
    loads = np.array([[each.saved_bytes for each in points]])
    taken = MultipleChoice(kinds, np.array(counts), costs, loads).take([budget])
    assert taken is not None, "the smallest points fit"
    ends = np.cumsum([len(own) for own in frontiers])[:-1]
    return [
        sorted(
            np.repeat(np.arange(len(own)), times).tolist(),
            key=lambda p, own=own: own[p].saved_bytes,
        )
        for own, times in zip(frontiers, np.split(taken.counts, ends), strict=True)
    ]
