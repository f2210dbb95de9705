"""The core solver: minimum cuts at swept prices, then what still fits.

For each price per byte, a minimum cut is the best choice for the bytes that it takes,
and gives a lower bound for every other budget (Everett, Generalized Lagrange multiplier
method, Operations Research 11, 1963). The sweep narrows in on the budget from both
sides until no price is left in between. The two choices at its end differ in
independent parts, such as one for each of several equal layers. As many of these are
exchanged as fit, and the rest of the budget is filled value by value.

A larger budget never costs more: the two choices, their parts and the filling are the
same for all budgets in between, and the cheapest result that fits is taken.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from remat._errors import BudgetError
from remat.planners._network import Network
from remat.planners._problem import Choice, Option, Outcome, Problem, Solution, Tally
from remat.planners._scipy import scipy

_MOST_CUTS = 64
_STATES_AROUND = 4  # states from which the budget is filled, on each side
_MOST_SIZES = 12  # of values, which are left out in turn
_SMALL = 1024  # steps times items of networks that are cut again for each item

_Move = tuple[int, int | None]
"""An item, and how it is settled anew."""


def solve_cut(
    problem: Problem, budget: int, where: str = "a budget", enumerate_up_to: int = 4096
) -> Solution:
    """Saves what fits a budget so that little is recomputed; not always the optimum.

    Laws: the bytes never exceed the budget; the bound holds; a larger budget never costs
    more.

    Args:
        problem: the steps and items.
        budget: the most bytes that may be held.
        where: what messages call the budget.
        enumerate_up_to: the number of choices up to which all of them are tried.

    Returns:
        The choice, and a bound on its distance from the optimum.

    Raises:
        BudgetError: more bytes are held even if nothing is saved.

    Example:
        >>> from remat.planners import Option, Problem, Step, solve_cut
        >>> chain = Problem(
        ...     steps=(Step(5, (), 0), Step(7, (0,), 1)),
        ...     wanted=(0, 1),
        ...     items=((Option(4),), (Option(4),)),
        ... )
        >>> solve_cut(chain, 4)
        Solution(choice=(None, 0), saved_bytes=4, cost=5, lower_bound=5)
    """
    if budget < problem.fixed_bytes:
        raise BudgetError.of(
            where=where,
            what=f"no choice of saved values fits {budget} bytes.",
            why=f"{problem.fixed_bytes} bytes are held even if nothing is saved: "
            "generator states from which the backward draws again, and copies of "
            "what the function changes.",
            do=f"Allow at least {problem.fixed_bytes} bytes, the smallest budget that "
            "can be met.",
        )
    if problem.num_choices <= enumerate_up_to:
        outcomes, bound = problem.outcomes, None  # the best of all is the optimum
    else:
        left, right, bound = _bracket(problem, budget)
        outcomes = [left]
        if right is not None:
            states = [*_exchanges(problem, left, right)]
            outcomes += states
            outcomes += _filled(problem, states, budget)
            outcomes += _branched(problem, budget, left, right)
    fitting = [each for each in outcomes if each.saved_bytes <= budget]
    best = min(fitting, key=lambda each: (each.cost, each.saved_bytes))
    least = best.cost if bound is None else min(bound, best.cost)
    return Solution(best.choice, best.saved_bytes, best.cost, least)


def _bracket(problem: Problem, budget: int) -> tuple[Outcome, Outcome | None, int]:
    """The best choices for their bytes next to the budget, and a bound on the cost.

    The first is within the budget and the second beyond it, None if the cheapest of all
    choices is within; no choice within the budget costs less than the bound.
    """
    network = Network.of(problem)
    free = budget - problem.fixed_bytes
    choice, _, least_cost = network.cut(Fraction(0))
    left, right = problem.outcome(problem.nothing), problem.outcome(choice)
    bound = math.ceil(least_cost)
    if right.saved_bytes <= budget:
        return min(left, right, key=lambda each: each.cost), None, bound
    for _ in range(_MOST_CUTS):
        if left.cost <= right.cost:
            break
        price = Fraction(left.cost - right.cost, right.saved_bytes - left.saved_bytes)
        *choices, least_cost = network.cut(price)
        bound = max(bound, math.ceil(least_cost - price * free))
        most, least = map(problem.outcome, choices)
        line = _cost_at_price(price, left)
        if min(_cost_at_price(price, most), _cost_at_price(price, least)) >= line:
            if _cost_at_price(price, most) == _cost_at_price(price, least) == line:
                # The same ends, whatever budget in between has led here.
                left = least if least.saved_bytes <= budget else left
                right = most if most.saved_bytes > budget else right
            break
        for each in (most, least):
            if _cost_at_price(price, each) < line:
                left, right = (
                    (each, right) if each.saved_bytes <= budget else (left, each)
                )
    return left, right, bound


def _cost_at_price(price: Fraction, outcome: Outcome) -> Fraction:
    return outcome.cost + price * outcome.saved_bytes


def _exchanges(problem: Problem, left: Outcome, right: Outcome) -> Iterator[Outcome]:
    """From one choice to another, one part in which they differ after the other."""
    choice = list(left.choice)
    yield left
    for part in _differing_parts(problem, left.choice, right.choice):
        for item in part:
            choice[item] = right.choice[item]
        yield problem.outcome(choice)


def _differing_parts(problem: Problem, left: Choice, right: Choice) -> list[list[int]]:
    """The items in which two choices differ, grouped by the steps that tie them."""
    runs = Tally(problem, left).running, Tally(problem, right).running
    differs = [
        runs[0][place] != runs[1][place]
        or (step.item is not None and left[step.item] != right[step.item])
        for place, step in enumerate(problem.steps)
    ]
    first: dict[int, int] = {}
    ties: list[tuple[int, int]] = []
    for place, step in enumerate(problem.steps):
        if differs[place]:
            ties += [(place, use) for use in step.uses if differs[use]]
            if step.item is not None:
                ties.append((place, first.setdefault(step.item, place)))
    heads, tails = np.array(ties, dtype=np.int64).reshape(-1, 2).T
    ones: Any = np.ones(len(ties), dtype=np.int8)
    count = len(problem.steps)
    graph = scipy.sparse.coo_array((ones, (heads, tails)), shape=(count, count))
    part_of = scipy.sparse.csgraph.connected_components(graph, directed=False)[1]
    parts: dict[int, list[int]] = {}
    for item, place in first.items():
        if left[item] != right[item]:
            parts.setdefault(int(part_of[place]), []).append(item)
    return list(parts.values())


def _branched(
    problem: Problem, budget: int, left: Outcome, right: Outcome
) -> Iterator[Outcome]:
    """The search repeated with one value forced out, or in; for small problems only."""
    pairs = enumerate(zip(left.choice, right.choice, strict=True))
    differing = [item for item, (one, other) in pairs if one != other]
    if len(problem.steps) * len(differing) > _SMALL:
        return
    for item in differing:
        options, items = problem.items[item], [*problem.items]
        for option in (None, *range(len(options))):
            held = problem.fixed_bytes
            held += 0 if option is None else options[option].size_bytes
            if held > budget:
                continue
            items[item] = () if option is None else (Option(0),)
            branch = dataclasses.replace(problem, items=tuple(items), fixed_bytes=held)
            found = [*_bracket(branch, budget)[0].choice]
            found[item] = option
            yield problem.outcome(found)


def _filled(problem: Problem, states: list[Outcome], budget: int) -> Iterator[Outcome]:
    """Fills a budget from the two states around it: adds or drops values one by one.

    Also from a few states before and behind: what one part takes may be better used for
    other values.
    """
    below = max(k for k, each in enumerate(states) if each.saved_bytes <= budget)
    if below + 1 == len(states):
        return
    low, high = states[below].saved_bytes, states[below + 1].saved_bytes
    every = range(len(problem.items))
    others = [k for k in every if states[0].choice[k] == states[-1].choice[k]]
    for distance in range(_STATES_AROUND):
        items = others if distance else every
        if distance <= below:
            start = states[below - distance]
            for some in _without_one_size(problem, items):
                yield from _fill_one_by_one(problem, start, high, some, adds=True)
        if below + 1 + distance < len(states):
            start = states[below + 1 + distance]
            yield from _fill_one_by_one(problem, start, low, items, adds=False)


def _without_one_size(
    problem: Problem, items: Sequence[int]
) -> Iterator[Sequence[int]]:
    """All items, and all but those of one size: the best ones may fit badly."""
    yield items
    sizes = Counter(problem.items[item] for item in items)
    for size, count in sizes.most_common(_MOST_SIZES):
        if count < len(items):
            yield [item for item in items if problem.items[item] != size]


def _fill_one_by_one(
    problem: Problem, start: Outcome, limit: int, items: Sequence[int], *, adds: bool
) -> Iterator[Outcome]:
    """Adds the values that spare most a byte, or drops those that spare least."""
    tally, room = Tally(problem, start.choice), limit - start.saved_bytes
    moves: list[_Move] = [
        (item, option)
        for item in items
        for option, way in enumerate(problem.items[item])
        if way.size_bytes < room
    ]
    if not adds:
        moves = [(item, None) for item in items if start.choice[item] is not None]
    rank = dict.fromkeys(moves, math.inf)
    while moves:
        best: tuple[float, _Move] | None = None
        # One move seldom makes another worth more: most need no second look.
        for move in sorted(moves, key=lambda each: -rank[each]):
            if best is not None and rank[move] <= best[0]:
                break
            rank[move] = _cost_saved_a_byte(tally, move, limit, adds=adds)
            if rank[move] > -math.inf and (best is None or rank[move] > best[0]):
                best = rank[move], move
        if best is None:
            return
        tally.settle(*best[1])
        yield tally.outcome()
        moves = [each for each in moves if rank[each] > -math.inf]


def _cost_saved_a_byte(tally: Tally, move: _Move, limit: int, *, adds: bool) -> float:
    """Cost saved per added byte; -inf for a move that saves nothing or does not fit."""
    size_bytes, cost = tally.saved_bytes, tally.cost
    before = tally.settle(*move)
    reached = tally.saved_bytes
    spared, more = cost - tally.cost, reached - size_bytes
    tally.settle(move[0], before)
    if adds:
        if spared <= 0 or reached >= limit:
            return -math.inf
        return math.inf if more <= 0 else spared / more
    if more >= 0 or reached <= limit:
        return -math.inf
    return spared / -more
