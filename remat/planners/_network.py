"""The best choice at a fixed price on bytes: one exact minimum cut.

Each step that can be avoided becomes two nodes, *needed* and *run*. The edge from the first to the
second is cut if the value is saved, at the price of its bytes. The edge from the second to the
sink is cut if the step runs, at the cost of the step. An edge that cannot be cut leads from each
*run* node to each value that the step needs. The nodes on the source side of a cut are the steps
that are needed and run, with their closures.

This is the project-selection network of Picard (Maximal closure of a graph, Management
Science 22, 1976), with saved values as what stops the closure. torch cuts a related network
in its min-cut partitioner, for one given set of prices.

If several steps make one value, the price of saving it is divided among them. Each cut
is then a bound on the optimum, which it need not reach.
"""

import functools
from collections import Counter
from fractions import Fraction
from typing import Any, Self, final

import numpy as np

from remat.planners._problem import Choice, Problem, Tally, cheapest
from remat.planners._scipy import scipy

# scipy counts in 32 bits: all costs together are scaled to fit.
_MOST = 2**30
_UNCUTTABLE = 2**31 - 1
_SOURCE, _SINK = 0, 1


@final
class Network:
    """The network of a problem, for any price."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        # What can be saved to avoid each step; None where nothing can.
        self._items = [
            step.item if step.item is not None and problem.items[step.item] else None
            for step in problem.steps
        ]
        # The nodes of each step that may run, as all that leads to what the backward needs:
        # two for a step that can be avoided, else one.
        self._nodes: dict[int, tuple[int, int]] = {}
        self._num_nodes = 2
        for place, runs in enumerate(Tally(problem, problem.nothing).running):
            if runs:
                last = self._num_nodes + (self._items[place] is not None)
                self._nodes[place] = self._num_nodes, last
                self._num_nodes = last + 1
        first_of = {place: needed for place, (needed, _) in self._nodes.items()}
        self._edges = [(_SOURCE, first_of[place]) for place in {*problem.wanted}]
        self._edges += [
            (run, first_of[use])
            for place, (_, run) in self._nodes.items()
            for use in {*problem.steps[place].uses}
        ]
        # How many of these steps make each item.
        items = (self._items[place] for place in self._nodes)
        self._shares = Counter(item for item in items if item is not None)
        self._sum = sum(problem.steps[place].cost for place in self._nodes)
        self._cuts: dict[Fraction, tuple[Choice, Choice, Fraction]] = {}

    @classmethod
    @functools.lru_cache(maxsize=32)
    def of(cls, problem: Problem) -> Self:
        """The network of a problem, whose budgets ask for much the same prices."""
        return cls(problem)

    def cut(self, price: Fraction) -> tuple[Choice, Choice, Fraction]:
        """The best choices at a price, in cost per byte, and a bound.

        The first choice saves most, the second least. No choice has a lower cost plus
        price times bytes than the bound, fixed bytes left out.
        """
        if price not in self._cuts:
            self._cuts[price] = self._cut(price)
        return self._cuts[price]

    def _cut(self, price: Fraction) -> tuple[Choice, Choice, Fraction]:
        problem, price_, unit = self.problem, price.numerator, price.denominator
        total = max(1, self._sum * unit)
        scaled = min(total, _MOST)

        def capacity(paid: int, share: int = 1) -> int:
            # Rounded down, so that a cut remains a bound.
            return min(paid * scaled // (share * total), _UNCUTTABLE)

        picked = {k: cheapest(problem.items[k], price_, unit) for k in self._shares}
        edges = [(tail, head, _UNCUTTABLE) for tail, head in self._edges]
        for place, (needed, run) in self._nodes.items():
            edges.append((run, _SINK, capacity(problem.steps[place].cost * unit)))
            item = self._items[place]
            if item is not None:
                option = problem.items[item][picked[item]]
                paid = unit * option.cost + price_ * option.size_bytes
                edges.append((needed, run, capacity(paid, self._shares[item])))
        flow, *sides = _minimum_cuts(edges, self._num_nodes)
        choices: list[Choice] = []
        for side in sides:
            found: list[int | None] = [None] * len(problem.items)
            for place, (needed, run) in self._nodes.items():
                item = self._items[place]
                if item is not None and side[needed] and not side[run]:
                    found[item] = picked[item]
            choices.append(tuple(found))
        least_cost = Fraction(flow * total, scaled * unit) + problem.base_cost
        return choices[0], choices[1], least_cost


def _minimum_cuts(
    edges: list[tuple[int, int, int]], num_nodes: int
) -> tuple[int, Any, Any]:
    """The flow, and the source sides of the smallest and the largest minimum cut."""
    table = np.array(edges, dtype=np.int64).reshape(-1, 3)
    network: Any = scipy.sparse.csr_array(
        (table[:, 2].astype(np.int32), (table[:, 0], table[:, 1])),
        shape=(num_nodes, num_nodes),
    )
    result: Any = scipy.sparse.csgraph.maximum_flow(network, _SOURCE, _SINK)
    left: Any = network.astype(np.int64) - result.flow.astype(np.int64)
    left.eliminate_zeros()
    first = _reachable(left, _SOURCE, num_nodes)
    last = ~_reachable(left.T.tocsr(), _SINK, num_nodes)
    return int(result.flow_value), first, last


def _reachable(network: Any, start: int, num_nodes: int) -> Any:
    order: Any = scipy.sparse.csgraph.breadth_first_order(
        network, start, return_predecessors=False
    )
    found = np.zeros(num_nodes, dtype=bool)
    found[order] = True
    return found
