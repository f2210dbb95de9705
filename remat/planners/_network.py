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

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, final

import numpy as np

from remat.planners._problem import Choice, Problem, cheapest
from remat.planners._scipy import sparse

# scipy counts in 32 bits: all costs together are scaled to fit.
_MOST = 2**30
_UNCUTTABLE = 2**31 - 1
_SOURCE, _SINK = 0, 1


@final
@dataclasses.dataclass(frozen=True, slots=True)
class NetworkCut:
    """The best choices at a price: the one that saves most, and the one that saves least.

    No choice has a lower cost plus price times bytes than `bound`, fixed bytes left out.
    """

    choices: tuple[Choice, Choice]
    bound: Fraction


@final
class Network:
    """The network of a problem, for any price."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._stops = [
            step.item is not None and bool(problem.items[step.item])
            for step in problem.steps
        ]
        certain = self._reached(problem.wanted, through_items=False)
        self.certain_cost = problem.base_cost + sum(
            problem.steps[place].cost for place in certain if not self._stops[place]
        )
        sources = {place for place in certain if self._stops[place]}
        reached = self._reached(sorted(sources), through_items=True)
        self.candidates = sorted(reached - (certain - sources))
        self._node: dict[int, tuple[int, int]] = {}
        self._lay_out()
        self._edges = [*self._fixed_edges(sources)]
        self._shares = self._members()
        self._sum = sum(problem.steps[place].cost for place in self.candidates)

    def _reached(self, places: Iterable[int], *, through_items: bool) -> set[int]:
        seen: set[int] = set()
        pending = list(places)
        while pending:
            place = pending.pop()
            if place in seen:
                continue
            seen.add(place)
            if through_items or not self._stops[place]:
                pending += self.problem.steps[place].uses
        return seen

    def _lay_out(self) -> None:
        """Numbers the nodes: two for a step that can be avoided, else one."""
        count = 2
        for place in self.candidates:
            width = 1 + self._stops[place]
            self._node[place] = count, count + width - 1
            count += width
        self.num_nodes = count

    def _fixed_edges(self, sources: set[int]) -> Iterator[tuple[int, int]]:
        for place in self.candidates:
            if place in sources:
                yield _SOURCE, self._node[place][0]
            for use in set(self.problem.steps[place].uses):
                if use in self._node:
                    yield self._node[place][1], self._node[use][0]

    def _members(self) -> dict[int, int]:
        """How many of the candidates make each item."""
        found: dict[int, int] = {}
        for place in self.candidates:
            item = self.problem.steps[place].item
            if item is not None and self._stops[place]:
                found[item] = found.get(item, 0) + 1
        return found

    def cut(self, price: Fraction) -> NetworkCut:
        """The best choices at a price, in cost per byte."""
        price_, unit = price.numerator, price.denominator
        total = max(1, self._sum * unit)
        scale = Fraction(min(total, _MOST), total)
        picked = {
            item: cheapest(self.problem.items[item], price_, unit)
            for item in self._shares
        }
        edges = [(tail, head, _UNCUTTABLE) for tail, head in self._edges]
        for place in self.candidates:
            step, (needed, run) = self.problem.steps[place], self._node[place]
            edges.append((run, _SINK, _in_units(step.cost * unit, scale)))
            if self._stops[place]:
                assert step.item is not None
                option = self.problem.items[step.item][picked[step.item]]
                paid = unit * option.cost + price_ * option.size_bytes
                capacity = _in_units(Fraction(paid, self._shares[step.item]), scale)
                edges.append((needed, run, capacity))
        flow, sides = _minimum_cuts(edges, self.num_nodes)
        choices = tuple(self._choice(side, picked) for side in sides)
        return NetworkCut(
            (choices[0], choices[1]), Fraction(flow) / scale / unit + self.certain_cost
        )

    def _choice(self, side: Any, picked: dict[int, int]) -> Choice:
        found: list[int | None] = [None] * len(self.problem.items)
        for place in self.candidates:
            needed, run = self._node[place]
            if side[needed] and not side[run]:
                item = self.problem.steps[place].item
                assert item is not None
                found[item] = picked[item]
        return tuple(found)


def _in_units(capacity: int | Fraction, scale: Fraction) -> int:
    # Rounded down, so that a cut remains a bound.
    return min(int(capacity * scale), _UNCUTTABLE)


def _minimum_cuts(
    edges: list[tuple[int, int, int]], num_nodes: int
) -> tuple[int, tuple[Any, Any]]:
    """The flow, and the source sides of the smallest and the largest minimum cut."""
    table = np.array(edges, dtype=np.int64).reshape(-1, 3)
    network: Any = sparse.csr_array(
        (table[:, 2].astype(np.int32), (table[:, 0], table[:, 1])),
        shape=(num_nodes, num_nodes),
    )
    result: Any = sparse.csgraph.maximum_flow(network, _SOURCE, _SINK)
    left: Any = network.astype(np.int64) - result.flow.astype(np.int64)
    left.eliminate_zeros()
    first = _reachable(left, _SOURCE, num_nodes)
    last = ~_reachable(left.T.tocsr(), _SINK, num_nodes)
    return int(result.flow_value), (first, last)


def _reachable(network: Any, start: int, num_nodes: int) -> Any:
    order: Any = sparse.csgraph.breadth_first_order(
        network, start, return_predecessors=False
    )
    found = np.zeros(num_nodes, dtype=bool)
    found[order] = True
    return found
