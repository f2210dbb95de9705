"""Steps under a limit of their peak: `python -m tests.benchmarks fit`.

The steps of twenty models are planned for limits between the lowest peak that is known and that
of a step which saves everything; `modules.plan(peak=, step=)` plans modules, `fit` functions, by
both kinds of costs. With "flops", what kernels hold inside is not known: the command fails where the
tensors of a step take more than its limit, or a tenth less than was predicted; with "measured",
where these or what the allocator counts do. It also fails where a limit below the lowest is not
refused, or where the best of fifty random configurations within the limit recomputes a tenth less.
"""

import importlib
import itertools
import operator
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from remat import BudgetError, Plan
from remat._plans.shares import Loads, Search, Shares
from tests.benchmarks.fit_models import MODELS, Model
from tests.benchmarks.memory import allocated
from tests.benchmarks.tables import heading
from tests.support import LiveBytes

PARTS = (0.0, 0.1, 0.3, 0.6, 1.0)
MOST_ABOVE = 0.1
MOST_DEARER = 0.1
DRAWN = 50
POOL = 24  # budgets of each region, of which configurations are drawn


@dataclass(frozen=True)
class Line:
    """A model under a limit: bytes, and what is recomputed, in the unit of its costs."""

    model: str
    costs: str
    limit: int
    predicted: int
    tensors: int
    allocated: int
    cost: int
    gap: float  # by how much of it the best of the budgets could be cheaper
    drawn: int | None  # the least of random configurations, None where none fits

    @property
    def measured(self) -> int:
        """What was to be predicted.

        The allocator can count less than the tensors: where nobody watches single operators,
        programs write over what they are the last to read.
        """
        return max(self.tensors, self.allocated * (self.costs == "measured"))

    @property
    def above(self) -> float:
        """How much more was predicted, as a part of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def dearer(self) -> float:
        """How much more is recomputed than by the best that was drawn, as a part of it."""
        if self.drawn is None or self.cost == self.drawn:
            return 0.0
        return self.cost / max(1, self.drawn) - 1

    @property
    def is_right(self) -> bool:
        """Whether the step keeps to its limit, and what was predicted and chosen is good."""
        return (
            max(self.measured, self.predicted) <= self.limit
            and self.above <= MOST_ABOVE
            and self.dearer <= MOST_DEARER
        )


@contextmanager
def _searches() -> Iterator[list[tuple[Shares, Loads]]]:
    """The searches for a peak inside: which calls, and what lives in their step."""
    seen: list[tuple[Shares, Loads]] = []
    within = Shares.within

    def noted(
        shares: Shares, limit: int, loads: Loads, most: float | None = None
    ) -> Search:
        seen.append((shares, loads))
        return within(shares, limit, loads, most)

    with mock.patch.object(Shares, "within", noted):
        yield seen


@dataclass(frozen=True)
class Case:
    """A model and its limits, from its lowest peak to that of a step that saves everything.

    Attributes:
        costs: what as little as possible is recomputed of.
        drawn: the plans of the calls in random configurations within a limit.
        shares: the calls of regions.
        loads: what lives in a step.
    """

    model: Model
    costs: str
    optimizer: torch.optim.Optimizer
    limits: Sequence[int]
    drawn: Callable[[int], list[list[Plan]]]
    shares: Shares
    loads: Loads

    @classmethod
    def of(cls, name: str, costs: str = "flops") -> "Case":
        """By the name of the model.

        Raises:
            AssertionError: a limit below the lowest peak is not refused with that peak.
        """
        torch.manual_seed(0)
        model = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters)
        low = _lowest(model, optimizer, costs)
        with _searches() as seen:
            high = model.plan(1 << 40, optimizer, costs)[0]
        limits = sorted({int(low + part * (high - low)) for part in PARTS})
        drawn = _Drawn(*seen[0]).within
        return cls(model, costs, optimizer, limits, drawn, *seen[0])

    def plan(self, limit: int) -> tuple[int, int, float]:
        """Keeps the step to a limit; its predicted peak, what is recomputed, and the gap."""
        return self.model.plan(limit, self.optimizer, self.costs)

    def step(self) -> None:
        """A training step."""
        self.model.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measured(name: str, costs: str) -> Iterator[Line]:
    """A model under its limits."""
    found = Case.of(name, costs)
    for limit in found.limits:
        predicted, cost, gap = found.plan(limit)
        sizes = _bytes_of_step(found)
        drawn = [sum(p.recompute_cost for p in each) for each in found.drawn(limit)]
        least = min(drawn, default=None)
        yield Line(name, costs, limit, predicted, *sizes, cost, gap, least)


def _lowest(model: Model, optimizer: torch.optim.Optimizer, costs: str) -> int:
    """The lowest peak that can be kept, as it is said where nothing fits."""
    try:
        model.plan(1, optimizer, costs)
    except BudgetError as error:
        found = re.findall(r"Pass peak=(\d+)\.", str(error))
        return int(found[0])
    raise AssertionError("a step in one byte is not refused")


class _Drawn:
    """Budgets that are drawn for each region, and what they come to."""

    def __init__(self, shares: Shares, loads: Loads) -> None:
        chance, self._fixed = random.Random(0), np.array(loads.fixed)
        self._places = [place for unit in shares.units for place in unit]
        self._plans: list[list[list[Plan]]] = []
        self._added: list[list[Any]] = []
        for unit in shares.units:
            whole = [shares.whole[place] for place in unit]
            least = max(each.problem.fixed_bytes for each in whole)
            most = max(least, *(each.saved_bytes for each in whole))
            between = sorted(chance.randint(least, most) for _ in range(POOL))
            sizes = [least, *between, most]
            plans = [[shares.plan(place, size) for place in unit] for size in sizes]
            self._plans.append(plans)
            self._added.append(
                [
                    sum(
                        np.array(loads.added(*each))
                        for each in zip(unit, own, strict=True)
                    )
                    for own in plans
                ]
            )

    def within(self, limit: int) -> list[list[Plan]]:
        """The plans of the calls in a number of configurations, of those within a limit."""
        chance = random.Random(1)
        drawn = [self._one(limit, chance) for _ in range(DRAWN)]
        return [self._in_order(chosen) for chosen in drawn if chosen is not None]

    def _in_order(self, chosen: list[int]) -> list[Plan]:
        taken = [own[k] for own, k in zip(self._plans, chosen, strict=True)]
        pairs = zip(self._places, itertools.chain(*taken), strict=True)
        return [plan for _, plan in sorted(pairs, key=operator.itemgetter(0))]

    def _one(self, limit: int, chance: random.Random) -> list[int] | None:
        """One, of which budgets fall until the peak is within the limit."""
        chosen = [chance.randrange(len(each)) for each in self._plans]
        while True:
            added = [own[k] for own, k in zip(self._added, chosen, strict=True)]
            if (self._fixed + sum(added)).max() <= limit:
                return chosen
            left = [place for place, k in enumerate(chosen) if k]
            if not left:
                return None
            place = chance.choice(left)
            chosen[place] = chance.randrange(chosen[place])


def _bytes_of_step(case: Case) -> tuple[int, int]:
    """The most that lives in a step once the optimizer has its state: tensors, and all."""
    case.step()
    states = [
        each for state in case.optimizer.state.values() for each in state.values()
    ]
    # Token ids may be the labels, too.
    resident = [*case.model.others, *states]
    storages = {each.data_ptr(): each.untyped_storage().nbytes() for each in resident}
    before = sum(storages.values())
    with LiveBytes() as memory:
        case.step()
    return before + memory.peak, before + allocated(case.step).peak


TABLE = (
    "| model | costs | limit MiB | predicted MiB | tensors MiB | allocator MiB | above | cost | gap | "
    "of the best drawn |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def _shown(line: Line) -> str:
    sizes = (line.limit, line.predicted, line.tensors, line.allocated)
    cells = [line.model, line.costs, *(f"{size / 2**20:.3f}" for size in sizes)]
    drawn = (
        "none fits" if line.drawn is None else f"{line.drawn:.4g}, {line.dearer:+.1%}"
    )
    cells += [f"{line.above:+.1%}", f"{line.cost:.4g}", f"{line.gap:.2%}", drawn]
    return f"| {' | '.join(cells)} |"


def main(threads: int) -> int:
    """Prints the table; how many steps are over their limits, predicted or chosen wrong."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    print(heading())
    print(
        f"transformers {importlib.import_module('transformers').__version__}. Costs are "
        "predicted, in FLOPs and bytes moved, or nanoseconds of single operators.\n"
    )
    print(TABLE, flush=True)
    lines: list[Line] = []
    for name, costs in itertools.product(MODELS, ("flops", "measured")):
        for line in measured(name, costs):
            lines.append(line)
            print(_shown(line), flush=True)
    over = sum(line.measured > line.limit for line in lines)
    above, dearer = (
        sorted(getattr(line, name) for line in lines) for name in ("above", "dearer")
    )
    print(
        f"\n{over} of {len(lines)} steps over their limits; predictions {above[0]:+.1%} to "
        f"{above[-1]:+.1%} above; {dearer[0]:+.1%} to {dearer[-1]:+.1%} recomputed beside "
        f"the best of {DRAWN} drawn configurations; gaps of at most "
        f"{max(line.gap for line in lines):.2%}."
    )
    return sum(not line.is_right for line in lines)
