"""The answer of a planner."""

from __future__ import annotations

import dataclasses
from typing import final

from remat.planners._problem import Choice


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Solution:
    """A choice within a budget, and a bound on its distance from the optimum.

    Attributes:
        choice: for each item the option in which it is saved, None to recompute it.
        saved_bytes: what is held.
        cost: of what runs again, and of storing what is saved.
        lower_bound: no choice within the budget costs less.

    Example:
        >>> from remat.planners import Solution
        >>> Solution(choice=(None,), saved_bytes=0, cost=50, lower_bound=49).gap
        0.02
    """

    choice: Choice
    saved_bytes: int
    cost: int
    lower_bound: int

    @property
    def gap(self) -> float:
        """The fraction of the cost by which the optimum could be cheaper."""
        return (self.cost - self.lower_bound) / self.cost if self.cost else 0.0
