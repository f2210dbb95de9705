"""A planner's problem, the steps of a recomputation and what may be saved, and its answer.

A backward needs some values. Each is either saved, or recomputed by its step, which needs the
values that it reads in turn: the *closure*. So saving a value that nothing needs any more is
useless, and recomputing a value requires its ancestors, back to saved values and inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import final

_STEPS = 16  # between the budgets of a frontier

Choice = tuple[int | None, ...]
"""For each item the number of the option in which it is saved; None to recompute it."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One way in which an item may be saved."""

    size_bytes: int  # what it counts against the budget
    cost: int = 0  # of storing it and of bringing it back


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One computation that the backward may have to run."""

    cost: int  # of running it once
    # The earlier steps whose values it reads, without inputs.
    uses: tuple[int, ...] = ()
    item: int | None = None  # what must be saved to avoid it; None if that cannot be


@final
@dataclasses.dataclass(frozen=True)
class Problem:
    """Steps in an order in which they can run, and the items that can stand for them.

    Several steps of one item make the same value: if it is saved, none of them runs; if
    not, each of them runs that something needs.

    Raises:
        ValueError: a number is negative, or a step reads one that does not come before.

    Example:
        >>> from remat.planners import Option, Problem, Step
        >>> chain = Problem(
        ...     steps=(Step(5, (), 0), Step(7, (0,), 1)),
        ...     wanted=(0, 1),
        ...     items=((Option(4),), (Option(4),)),
        ... )
        >>> chain.outcome((None, 0))
        Outcome(choice=(None, 0), saved_bytes=4, cost=5)
    """

    steps: tuple[Step, ...]
    wanted: tuple[int, ...]  # the steps whose values the backward needs in any case
    items: tuple[tuple[Option, ...], ...]  # the options in which each may be saved
    fixed_bytes: int = 0  # what is held in any case
    base_cost: int = 0  # of what runs again in any case

    def __post_init__(self) -> None:
        """Checks the numbers and the order of the steps."""
        numbers = [self.fixed_bytes, self.base_cost, *(s.cost for s in self.steps)]
        for options in self.items:
            numbers += [n for each in options for n in (each.size_bytes, each.cost)]
        if min(numbers) < 0:
            raise ValueError("a problem has no negative sizes and costs")
        for place, step in enumerate(self.steps):
            if any(not 0 <= use < place for use in step.uses):
                raise ValueError(f"step {place} reads one that does not come before it")

    @property
    def nothing(self) -> Choice:
        """The choice to save nothing."""
        return (None,) * len(self.items)

    @functools.cached_property
    def everything(self) -> Choice:
        """The choice to save all, each item in the option that costs least."""
        return tuple(
            None if not options else cheapest(options, 0, 1) for options in self.items
        )

    @property
    def num_choices(self) -> int:
        return math.prod(1 + len(options) for options in self.items)

    @functools.cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcomes of all choices, of which any budget may take one."""
        ways = [(None, *range(len(options))) for options in self.items]
        return tuple(self.outcome(choice) for choice in itertools.product(*ways))

    @property
    def budgets(self) -> tuple[int, ...]:
        """Budgets in even steps, from what is held in any case to what saving all takes."""
        low, high = self.fixed_bytes, self.outcome(self.everything).saved_bytes
        return tuple(low + (high - low) * k // _STEPS for k in range(_STEPS + 1))

    def outcome(self, choice: Sequence[int | None]) -> Outcome:
        """The outcome of a choice: the values that are read, bytes and cost."""
        return Tally(self, choice).outcome()


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """A choice without values that nothing reads, with its bytes and cost."""

    choice: Choice  # for each item that is read from what was saved, its option
    saved_bytes: int  # what is held, the fixed bytes included
    cost: int  # of what runs again, and of storing what is saved


@final
class Tally:
    """The bytes and cost of a choice, while its items are changed one by one.

    It counts for each step how many others need it, so a change takes time only in
    proportion to the part of the closure that it affects.
    """

    def __init__(self, problem: Problem, choice: Sequence[int | None]) -> None:
        self._problem = problem
        self._choice = [*choice]
        self._needs = [0] * len(problem.steps)
        self._readers = [0] * len(problem.items)
        self._steps_of: list[list[int]] = [[] for _ in problem.items]
        for place, step in enumerate(problem.steps):
            if step.item is not None:
                self._steps_of[step.item].append(place)
        self.saved_bytes, self.cost = problem.fixed_bytes, problem.base_cost
        self._move([*problem.wanted], 1)

    def settle(self, item: int, option: int | None) -> int | None:
        """Saves an item in an option, or recomputes it; returns the previous choice."""
        before = self._choice[item]
        if before == option:
            return before
        self._count(item, -1)
        self._choice[item] = option
        self._count(item, 1)
        if (before is None) != (option is None):
            sign = 1 if option is None else -1
            for place in self._steps_of[item]:
                if self._needs[place]:
                    self._move(self._run(place, sign), sign)
        return before

    def outcome(self) -> Outcome:
        """The choice without values that nothing reads, which are forgotten."""
        for item, readers in enumerate(self._readers):
            if not readers:
                self._choice[item] = None
        return Outcome(tuple(self._choice), self.saved_bytes, self.cost)

    @property
    def running(self) -> list[bool]:
        """Which steps run under the choice."""
        return [
            needs > 0 and (step.item is None or self._choice[step.item] is None)
            for needs, step in zip(self._needs, self._problem.steps, strict=True)
        ]

    def _count(self, item: int, sign: int) -> None:
        """Adds or takes away what the item's option holds and costs, if it is read."""
        option = self._choice[item]
        if option is not None and self._readers[item]:
            self.saved_bytes += sign * self._problem.items[item][option].size_bytes
            self.cost += sign * self._problem.items[item][option].cost

    def _run(self, place: int, sign: int) -> list[int]:
        step = self._problem.steps[place]
        self.cost += sign * step.cost
        return list(step.uses)

    def _move(self, places: list[int], sign: int) -> None:
        """Adds or removes one need of each of these steps, and what follows."""
        while places:
            place = places.pop()
            before = self._needs[place]
            self._needs[place] += sign
            if before and self._needs[place]:
                continue
            item = self._problem.steps[place].item
            if item is not None:
                self._count(item, -1)
                self._readers[item] += sign
                self._count(item, 1)
            if item is None or self._choice[item] is None:
                places += self._run(place, sign)


def cheapest(options: Sequence[Option], price: int, unit: int) -> int:
    """The number of the option of the least `unit * cost + price * size_bytes`."""

    def rank(k: int) -> tuple[int, int, int]:
        size_bytes, cost = options[k].size_bytes, options[k].cost
        return unit * cost + price * size_bytes, size_bytes, cost

    return min(range(len(options)), key=rank)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Solution:
    """A choice within a budget, and a bound on its distance from the optimum.

    Example:
        >>> from remat.planners import Solution
        >>> Solution(choice=(None,), saved_bytes=0, cost=50, lower_bound=49).gap
        0.02
    """

    choice: Choice
    saved_bytes: int  # what is held
    cost: int  # of what runs again, and of storing what is saved
    lower_bound: int  # no choice within the budget costs less

    @property
    def gap(self) -> float:
        """The fraction of the cost by which the optimum could be cheaper."""
        return (self.cost - self.lower_bound) / self.cost if self.cost else 0.0
