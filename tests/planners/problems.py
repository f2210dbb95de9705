"""Random problems, and their best choice by trying all: the oracle of the solvers."""

import itertools
import random

from remat.planners import Option, Problem, Step

FRACTIONS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)


def random_problem(seed: int, most_values: int = 12) -> Problem:
    """A random graph; some values cannot be saved, wait in two ways, or are made twice."""
    draw = random.Random(seed)
    steps: list[Step] = []
    items: list[tuple[Option, ...]] = []
    for place in range(draw.randint(3, most_values)):
        uses = tuple(k for k in range(place) if draw.random() < 2 / max(place, 1))
        item = None
        if draw.random() < 0.85:
            item = len(items)
            items.append(_random_options(draw))
        steps.append(Step(draw.randint(1, 100), uses, item))
    if items and draw.random() < 0.3:
        steps.append(Step(draw.randint(1, 100), (), draw.randrange(len(items))))
    wanted = {k for k in range(len(steps)) if draw.random() < 0.4} | {len(steps) - 1}
    return Problem(
        tuple(steps),
        tuple(sorted(wanted)),
        tuple(items),
        fixed_bytes=draw.choice([0, 0, 7]),
        base_cost=draw.choice([0, 11]),
    )


def _random_options(draw: random.Random) -> tuple[Option, ...]:
    keep = Option(draw.randint(1, 50))
    smaller = Option(draw.randint(1, 25), draw.randint(0, 30))
    return (keep,) if draw.random() < 0.8 else (keep, smaller)


def budgets(problem: Problem, fractions: tuple[float, ...] = FRACTIONS) -> list[int]:
    """Budgets from what is held in any case to what saving everything holds."""
    low = problem.fixed_bytes
    high = problem.outcome(problem.everything).saved_bytes
    return [low + int((high - low) * part) for part in fractions]


def least_costs(problem: Problem, limits: list[int]) -> list[int]:
    """For each budget the least cost of all choices that fit it."""
    ways = [(None, *range(len(options))) for options in problem.items]
    outcomes = [problem.outcome(choice) for choice in itertools.product(*ways)]
    return [
        min(each.cost for each in outcomes if each.saved_bytes <= limit)
        for limit in limits
    ]


def random_chain(seed: int, layers: int) -> Problem:
    """Layers that are alike: the hard case of integer programs."""
    draw = random.Random(seed)
    layer = [(draw.randint(1, 100), draw.randint(1, 50)) for _ in range(6)]
    steps: list[Step] = []
    for place in range(layers * len(layer)):
        cost, _ = layer[place % len(layer)]
        before = (place - 1,) if place else ()
        skip = (place - 3,) if place % len(layer) == 5 else ()
        steps.append(Step(cost, before + skip, place))
    items = tuple((Option(layer[k % len(layer)][1]),) for k in range(len(steps)))
    return Problem(tuple(steps), tuple(range(len(steps))), items)
