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

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, final

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
        # The steps that may run: all that lead to what the backward needs.
        runs = Tally(problem, problem.nothing).running
        self.candidates = [place for place, each in enumerate(runs) if each]
        self._node: dict[int, tuple[int, int]] = {}
        self._lay_out()
        self._edges = [*self._fixed_edges()]
        # How many of the candidates make each item.
        items = (self._items[place] for place in self.candidates)
        self._shares = Counter(item for item in items if item is not None)
        self._sum = sum(problem.steps[place].cost for place in self.candidates)

    def _lay_out(self) -> None:
        """Numbers the nodes: two for a step that can be avoided, else one."""
        count = 2
        for place in self.candidates:
            first, last = count, count + (self._items[place] is not None)
            self._node[place] = first, last
            count = last + 1
        self.num_nodes = count

    def _fixed_edges(self) -> Iterator[tuple[int, int]]:
        for place in set(self.problem.wanted):
            yield _SOURCE, self._node[place][0]
        for place in self.candidates:
            for use in set(self.problem.steps[place].uses):
                yield self._node[place][1], self._node[use][0]

    def cut(self, price: Fraction) -> tuple[Choice, Choice, Fraction]:
        """The best choices at a price, in cost per byte, and a bound.

        The first choice saves most, the second least. No choice has a lower cost plus
        price times bytes than the bound, fixed bytes left out.
        """
        price_, unit = price.numerator, price.denominator
        total = max(1, self._sum * unit)
        scale = Fraction(min(total, _MOST), total)
        picked = {
            item: cheapest(self.problem.items[item], price_, unit)
            for item in self._shares
        }
        edges = [(tail, head, _UNCUTTABLE) for tail, head in self._edges]
        for place in self.candidates:
            needed, run = self._node[place]
            cost = self.problem.steps[place].cost
            edges.append((run, _SINK, _in_units(cost * unit, scale)))
            item = self._items[place]
            if item is not None:
                option = self.problem.items[item][picked[item]]
                paid = unit * option.cost + price_ * option.size_bytes
                capacity = _in_units(Fraction(paid, self._shares[item]), scale)
                edges.append((needed, run, capacity))
        flow, first, last = _minimum_cuts(edges, self.num_nodes)
        bound = Fraction(flow) / scale / unit + self.problem.base_cost
        return self._choice(first, picked), self._choice(last, picked), bound

    def _choice(self, side: Any, picked: dict[int, int]) -> Choice:
        found: list[int | None] = [None] * len(self.problem.items)
        for place, (needed, run) in self._node.items():
            item = self._items[place]
            if item is not None and side[needed] and not side[run]:
                found[item] = picked[item]
        return tuple(found)


def _in_units(capacity: int | Fraction, scale: Fraction) -> int:
    # Rounded down, so that a cut remains a bound.
    return min(int(capacity * scale), _UNCUTTABLE)


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
