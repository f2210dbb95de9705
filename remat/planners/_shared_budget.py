"""One budget for several programs: which point of its frontier each program takes.

A multiple-choice knapsack, solved as an integer program. Equal programs share variables
that count them, because symmetry is what makes such a problem hard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from remat._errors import BudgetError, refusal
from remat.planners._scipy import optimize


@final
@dataclass(frozen=True, slots=True)
class Share:
    """A point of a program's frontier."""

    saved_bytes: int  # what it holds
    cost: int  # what it recomputes


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
        raise refusal(
            BudgetError,
            where=where,
            what=f"the {budget} bytes are too few.",
            why=f"{least} bytes are held even if nothing is saved.",
            do=f"Give at least {least} bytes.",
        )
    most = budget
    while True:
        taken = _solve_knapsack(frontiers, counts, most)
        held = sum(
            frontiers[kind][point].saved_bytes
            for kind, points in enumerate(taken)
            for point in points
        )
        if held <= budget:
            return taken
        # HiGHS counts in floating point, and can be over by a part in a million.
        most = max(least, most - (held - budget))


def _solve_knapsack(
    frontiers: Sequence[Sequence[Share]], counts: Sequence[int], budget: int
) -> list[list[int]]:
    columns = [(k, p) for k, points in enumerate(frontiers) for p in range(len(points))]
    points = [frontiers[kind][point] for kind, point in columns]
    unit = max(1, max(each.saved_bytes for each in points)) / 1e3
    sizes = np.array([each.saved_bytes / unit for each in points])
    costs = np.array([float(each.cost) for each in points])
    kinds = np.array([kind for kind, _ in columns])
    whole: Any = kinds == np.arange(len(frontiers))[:, None]
    result: Any = optimize.milp(
        costs / max(1.0, costs.max()),
        integrality=np.ones(len(columns)),
        bounds=optimize.Bounds(0, np.array([counts[kind] for kind, _ in columns])),
        constraints=[
            optimize.LinearConstraint(whole, counts, counts),
            optimize.LinearConstraint(sizes, ub=budget / unit),
        ],
    )
    assert result.x is not None, result.message
    found: list[list[int]] = [[] for _ in frontiers]
    for (kind, point), number in zip(columns, np.rint(result.x), strict=True):
        found[kind] += [point] * int(number)
    return [
        sorted(each, key=lambda p, k=k: frontiers[k][p].saved_bytes)
        for k, each in enumerate(found)
    ]
