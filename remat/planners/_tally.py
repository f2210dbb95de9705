"""A choice that is changed item by item, its bytes and cost kept up to date."""

from collections.abc import Sequence
from typing import final

from remat.planners._problem import Outcome, Problem


@final
class Tally:
    """The bytes and cost of a choice, while its items are changed one by one.

    It counts for each step how many others need it, so a change takes time only in
    proportion to the part of the closure that it affects.
    """

    def __init__(self, problem: Problem, choice: Sequence[int | None]) -> None:
        self._problem = problem
        self._choice: list[int | None] = [None] * len(problem.items)
        self._needs = [0] * len(problem.steps)
        self._readers = [0] * len(problem.items)
        self._steps_of: list[list[int]] = [[] for _ in problem.items]
        for place, step in enumerate(problem.steps):
            if step.item is not None:
                self._steps_of[step.item].append(place)
        self.saved_bytes, self.cost = problem.fixed_bytes, problem.base_cost
        self._move(list(problem.wanted), 1)
        for item, option in enumerate(choice):
            self.settle(item, option)

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
