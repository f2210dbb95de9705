"""The exact solver: an integer program for HiGHS.

There is a variable for each option of each item, whether it is taken, and one for each step, how
much of it runs. The second kind need not be integers: if the first are, so are the optimal second
ones. Checkmate (Jain et al., 2020, https://arxiv.org/abs/1910.02653) plans when each value is
computed and freed, by a larger program of this kind.

HiGHS computes in floating point, and accepts a choice that exceeds the budget by one
part in a million, so each answer is counted again in integers.
"""

import dataclasses
import math
from typing import Any, final

import numpy as np

from remat.planners._cut import solve_cut
from remat.planners._problem import Outcome, Problem, Solution
from remat.planners._scipy import scipy

_TRIES = 4


def solve_milp(
    problem: Problem, budget: int, where: str = "a budget", time_limit_s: float = 60.0
) -> Solution:
    """Saves what fits a budget so that the least is recomputed.

    Laws: the bytes never exceed the budget; never worse than `solve_cut`; if the time
    suffices, the gap is 0.

    Args:
        problem: the steps and items.
        budget: the most bytes that may be held.
        where: what messages call the budget.
        time_limit_s: the seconds after which the best choice so far is taken.

    Returns:
        The choice, and a bound on its distance from the optimum.

    Raises:
        BudgetError: more bytes are held even if nothing is saved.

    Example:
        >>> from remat.planners import Option, Problem, Step, solve_milp
        >>> chain = Problem(
        ...     steps=(Step(5, (), 0), Step(7, (0,), 1)),
        ...     wanted=(0, 1),
        ...     items=((Option(4),), (Option(4),)),
        ... )
        >>> solve_milp(chain, 4)
        Solution(choice=(None, 0), saved_bytes=4, cost=5, lower_bound=5)
    """
    best = solve_cut(problem, budget, where)
    if best.gap == 0.0 or not problem.steps:
        return best
    program = _IntegerProgram(problem)
    bound, most = best.lower_bound, budget
    for _ in range(_TRIES):
        found, below = program.solve(most - problem.fixed_bytes, time_limit_s)
        if most == budget:
            bound = max(bound, below)
        if found is None:
            break
        if found.saved_bytes <= budget:
            if found.cost < best.cost:
                best = Solution(found.choice, found.saved_bytes, found.cost, 0)
            break
        most -= found.saved_bytes - budget
        if most < problem.fixed_bytes:
            break
    return dataclasses.replace(best, lower_bound=min(bound, best.cost))


@final
class _IntegerProgram:
    """The integer program of a problem: first the options, then the steps."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._options = [
            (item, k)
            for item, options in enumerate(problem.items)
            for k in range(len(options))
        ]
        count = len(self._options)
        columns_of: dict[int | None, list[int]] = {}
        for column, (item, _) in enumerate(self._options):
            columns_of.setdefault(item, []).append(column)

        def available(place: int) -> dict[int, float]:
            """The variables of which one must be 1: the step is run, or its value saved."""
            saved = columns_of.get(problem.steps[place].item, [])
            return dict.fromkeys([*saved, count + place], 1.0)

        # Rows of `matrix @ variables >= least`.
        rows = [(available(place), 1.0) for place in problem.wanted]
        for place, step in enumerate(problem.steps):
            rows += [
                (available(use) | {count + place: -1.0}, 0.0) for use in {*step.uses}
            ]
        rows += [
            (dict.fromkeys(columns, -1.0), -1.0) for columns in columns_of.values()
        ]
        entries = [
            (number, column, weight)
            for number, (row, _) in enumerate(rows)
            for column, weight in row.items()
        ]
        numbers, columns, weights = zip(*entries, strict=True)
        matrix: Any = scipy.sparse.csr_array(
            (weights, (numbers, columns)), shape=(len(rows), count + len(problem.steps))
        )
        least = [each for _, each in rows]
        self._needs = scipy.optimize.LinearConstraint(matrix, lb=least)

    def solve(self, free: int, time_limit_s: float) -> tuple[Outcome | None, int]:
        """The best choice within so many bytes, and a bound; the bytes to rounding."""
        problem, count = self.problem, len(self._options)
        taken = [problem.items[item][k] for item, k in self._options]
        costs = [each.cost for each in taken] + [step.cost for step in problem.steps]
        unit = max(1.0, max(costs) / 1e6)
        size_unit = max(1.0, max((each.size_bytes for each in taken), default=1) / 1e6)
        sizes = np.zeros(len(costs))
        sizes[:count] = [each.size_bytes / size_unit for each in taken]
        result: Any = scipy.optimize.milp(
            np.array(costs) / unit,
            integrality=[1] * count + [0] * len(problem.steps),
            bounds=scipy.optimize.Bounds(0, 1),
            constraints=[
                self._needs,
                scipy.optimize.LinearConstraint(sizes[None, :], ub=[free / size_unit]),
            ],
            options={"mip_rel_gap": 0.0, "time_limit": time_limit_s},
        )
        least = getattr(result, "mip_dual_bound", None)
        bound = 0 if least is None else _certain(least * unit) + problem.base_cost
        if result.x is None:
            return None, bound
        choice: list[int | None] = [None] * len(problem.items)
        for (item, k), value in zip(self._options, result.x[:count], strict=True):
            if value > 0.5:
                choice[item] = k
        return problem.outcome(choice), bound


def _certain(bound: float) -> int:
    """An integer bound, minus what floating point may have added to it."""
    if not math.isfinite(bound):
        return 0
    return max(0, math.ceil(bound - max(1e-6, 1e-9 * abs(bound))))
