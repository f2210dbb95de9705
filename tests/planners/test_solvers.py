"""What the solvers promise, on problems without tensors.

"Budget equals brute force on random graphs of up to 12 values (`milp` with gap 0 exactly;
the core solver within 5 % in 95 % of the cases, its certified gap true in all); never
exceeds the budget; monotone: more budget never costs more." Many more of these instances
are tried by `python -m tests.planners`.
"""

import functools
import itertools
import random

import numpy as np
import pytest

from remat import BudgetError
from remat.planners import (
    Option,
    Problem,
    Solution,
    Step,
    solve_cut,
    solve_milp,
)
from remat.planners._problem import Tally
from remat.planners._shared_budget import MultipleChoice
from tests.planners.problems import (
    budgets,
    least_costs,
    random_chain,
    random_problem,
)

# Without the shortcut by which small problems are enumerated.
sweep_alone = functools.partial(solve_cut, enumerate_up_to=0)

CHAIN = Problem(
    steps=(Step(5, (), 0), Step(7, (0,), 1), Step(2, (1,), 2)),
    wanted=(0, 1, 2),
    items=((Option(4),), (Option(6),), (Option(4),)),
    fixed_bytes=3,
)


@pytest.mark.parametrize("solve", [solve_cut, solve_milp], ids=["cut", "milp"])
def test_equals_brute_force(solve):
    """Cost and bound are the least cost there is; small problems are solved exactly."""
    for seed in range(25):
        problem = random_problem(seed, most_values=9)
        limits = budgets(problem)

        solutions = [solve(problem, limit) for limit in limits]

        assert [each.cost for each in solutions] == least_costs(problem, limits)
        assert all(each.gap == 0.0 for each in solutions)


def test_the_integer_program_alone_equals_brute_force(monkeypatch):
    """So it does where the core solver leaves a gap that it has to close."""
    monkeypatch.setattr(
        "remat.planners._milp.solve_cut",
        lambda problem, budget, where: sweep_alone(problem, budget),
    )
    for seed in range(20):
        problem = random_problem(seed, most_values=10)
        limits = budgets(problem, (0.3, 0.6))

        solutions = [solve_milp(problem, limit) for limit in limits]

        assert [each.cost for each in solutions] == least_costs(problem, limits)
        assert all(each.gap == 0.0 for each in solutions)


def test_the_sweep_is_near_the_best_and_its_bound_holds():
    """Within 5 % in 95 % of the cases, without enumeration; the bound in all."""
    near = total = 0
    for seed in range(25):
        problem = random_problem(seed, most_values=9)
        limits = budgets(problem)
        for limit, least in zip(limits, least_costs(problem, limits), strict=True):
            found = sweep_alone(problem, limit)

            assert found.lower_bound <= least <= found.cost
            near += found.cost <= 1.05 * least
            total += 1

    assert near >= 0.95 * total


@pytest.mark.parametrize(
    "make",
    [lambda seed: random_problem(seed, 16), lambda seed: random_chain(seed, 5)],
    ids=["random", "layers"],
)
def test_within_the_budget_and_monotone(make):
    """The bytes never exceed the budget, and more budget never costs more."""
    for seed in range(4):
        problem = make(seed)
        limits = budgets(problem)

        solutions = [sweep_alone(problem, limit) for limit in limits]

        for found, limit in zip(solutions, limits, strict=True):
            again = problem.outcome(found.choice)
            assert (again.saved_bytes, again.cost) == (found.saved_bytes, found.cost)
            assert found.saved_bytes <= limit
        costs = [each.cost for each in solutions]
        assert costs == sorted(costs, reverse=True)


def test_equal_layers_are_split_between_the_prices():
    """At one price all equal layers are saved, or none: as many are as fit."""
    problem = random_chain(1, layers=40)

    found = sweep_alone(problem, budgets(problem, (0.5,))[0])

    assert found.gap < 0.02


def test_costs_that_need_more_than_32_bits():
    """Costs are scaled to what scipy counts in; bound and choice stay right."""
    steps = tuple(Step(10**13 + k, (k - 1,) if k else (), k) for k in range(8))
    items = ((Option(2**33),),) * 8
    problem = Problem(steps, tuple(range(8)), items)
    limit = 3 * 2**33

    found = sweep_alone(problem, limit)

    (least,) = least_costs(problem, [limit])
    assert found.cost == least
    assert 0 <= least - found.lower_bound <= 1e-6 * least


@pytest.mark.parametrize("solve", [solve_cut, sweep_alone, solve_milp])
def test_nothing_to_decide(solve):
    """A problem without steps costs its base, and one that fits whole nothing more."""
    empty = Problem((), (), (), fixed_bytes=2, base_cost=9)

    assert solve(empty, 2) == Solution((), 2, 9, 9)
    assert solve(CHAIN, 17).cost == 0


@pytest.mark.parametrize("solve", [solve_cut, solve_milp])
def test_infeasible(solve):
    """Below what is held in any case the error names the least budget."""
    with pytest.raises(
        BudgetError, match="Allow at least 3 bytes, the smallest budget"
    ):
        solve(CHAIN, 2, "budget(2)")

    assert solve(CHAIN, 3).saved_bytes == 3


def test_what_nothing_reads_is_not_saved():
    """A value behind a saved one spares nothing: the closure is counted."""
    line = Problem(CHAIN.steps, (2,), CHAIN.items)

    assert line.outcome((0, 0, 0)).choice == (None, None, 0)
    assert line.outcome((0, None, None)).cost == 7 + 2
    assert solve_cut(line, 8).choice == (None, None, 0)


def test_a_choice_between_two_ways_to_wait():
    """The smaller form is taken where the budget asks for it, at its cost."""
    problem = Problem((Step(100, (), 0),), (0,), ((Option(8), Option(2, 5)),))

    assert [solve_cut(problem, limit).cost for limit in (0, 2, 8)] == [100, 5, 0]
    assert [sweep_alone(problem, limit).cost for limit in (0, 2, 8)] == [100, 5, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": (Step(-1),)},
        {"steps": (Step(1, (0,)),)},
        {"items": ((Option(-1),),)},
        {"fixed_bytes": -1},
    ],
)
def test_what_is_no_problem(wrong):
    """Negative numbers and steps that read later ones are refused."""
    with pytest.raises(ValueError, match=r"negative|before"):
        Problem(**{"steps": (), "wanted": (), "items": (), **wrong})


def test_a_tally_is_the_outcome_of_its_choice():
    """After any changes, item by item and back, it says what `outcome` counts afresh."""
    draw = random.Random(0)
    for seed in range(60):
        problem = random_problem(seed)
        tally = Tally(problem, problem.everything)
        choice = list(problem.everything)
        for _ in range(20):
            item = draw.randrange(len(choice)) if choice else None
            if item is None:
                break
            option = draw.choice([None, *range(len(problem.items[item]))])
            assert tally.settle(item, option) == choice[item]
            choice[item] = option
            expected = problem.outcome(choice)
            assert (tally.saved_bytes, tally.cost) == (
                expected.saved_bytes,
                expected.cost,
            )
        assert tally.outcome() == problem.outcome(choice)


def test_points_under_several_bounds_equal_brute_force():
    """The least cost within all of them, and the least excess where bounds may be exceeded."""
    chance = random.Random(0)
    for _ in range(40):
        sizes = [chance.randint(1, 4) for _ in range(chance.randint(1, 4))]
        count = sum(sizes)
        kinds = np.repeat(np.arange(len(sizes)), sizes)
        costs = np.array([chance.randint(0, 30) for _ in range(count)])
        loads = np.array([[chance.randint(0, 30) for _ in range(count)] for _ in "abc"])
        program = MultipleChoice(kinds, np.ones(len(sizes), int), costs, loads)
        limits = [chance.randint(5, 60) for _ in "abc"]
        choices = [
            list(each)
            for each in itertools.product(range(count), repeat=len(sizes))
            if [kinds[point] for point in each] == [*range(len(sizes))]
        ]
        sums = [loads[:, each].sum(axis=1) - limits for each in choices]
        within = [
            costs[c].sum()
            for c, over in zip(choices, sums, strict=True)
            if max(over) <= 0
        ]
        first = [max(over[1:]) for over in sums if over[0] <= 0]

        taken, lowest = program.take(limits), program.take(limits, soft=1)

        least = min(within, default=None)
        assert (None if taken is None else costs @ taken.counts) == least
        if taken is not None:
            assert 0 <= costs @ taken.counts - taken.lower_bound <= 1
        excess = None if lowest is None else max((loads @ lowest.counts - limits)[1:])
        assert excess == min(first, default=None)
