"""`Budget`: the cheapest schedule of unlike stages that fits, against exhaustive search."""

import heapq
import random
from collections.abc import Iterator

import pytest

from remat import BudgetError, schedules
from remat._errors import PolicyError, ScheduleError
from remat.schedules import Budget, Every, Stage, replay
from tests.support import swept

#: current state, kept states and recorded stages as bits, stages that remain.
Node = tuple[int, int, int, int]


def random_stages(rng: random.Random, count: int, scale: int = 1) -> list[Stage]:
    """Stages with random costs and bytes."""
    sizes = [rng.randint(0, 20 * scale) for _ in range(count + 1)]
    return [
        Stage(rng.randint(1, 50), sizes[k], sizes[k + 1], rng.randint(0, 60 * scale))
        for k in range(count)
    ]


def all_bytes(stages: list[Stage]) -> int:
    """What is held if everything is recorded."""
    return sum(stage.output_bytes + stage.record_bytes for stage in stages)


class Search:
    """Every legal schedule: the shortest way through all that can be held."""

    def __init__(self, stages: list[Stage], limit: int) -> None:
        self.count, self.limit = len(stages), limit
        self.cost = [stage.cost for stage in stages]
        self.states = [0, *(stage.output_bytes for stage in stages)]
        self.records = [stage.record_bytes for stage in stages]

    def fits(self, kept: int, recorded: int, stage: int) -> bool:
        """Whether a stage can run beside what is held."""
        live = kept | recorded | 1 << stage | 1 << (stage + 1)
        held = sum(size for k, size in enumerate(self.states) if live >> k & 1)
        held += sum(size for k, size in enumerate(self.records) if recorded >> k & 1)
        return held <= self.limit

    def steps(self, node: Node) -> Iterator[tuple[int, Node]]:
        """What can be done next, and what it costs."""
        current, kept, recorded, remaining = node
        last = remaining - 1
        is_swept = remaining < self.count or current == self.count
        if is_swept and recorded >> last & 1:
            yield 0, (-1, kept, recorded & ~(1 << last), last)
        for state in range(remaining):
            if kept >> state & 1:
                yield 0, (state, kept, recorded, remaining)
                yield 0, (current, kept & ~(1 << state), recorded, remaining)
        if not 0 <= current < remaining:
            return
        yield 0, (current, kept | 1 << current, recorded, remaining)
        cost, after = self.cost[current], current + 1
        if self.fits(kept, recorded, current):
            yield cost, (after, kept, recorded, remaining)
        with_it = recorded | 1 << current
        if with_it != recorded and self.fits(kept, with_it, current):
            yield cost, (after, kept, with_it, remaining)

    def least_cost(self) -> int | None:
        """Of all schedules that fit; None if none does."""
        start: Node = (0, 1, 0, self.count)
        best: dict[Node, int] = {start: 0}
        heap: list[tuple[int, Node]] = [(0, start)]
        while heap:
            cost, node = heapq.heappop(heap)
            if node[3] == 0:
                return cost
            for more, after in self.steps(node):
                if cost + more < best.get(after, cost + more + 1):
                    best[after] = cost + more
                    heapq.heappush(heap, (cost + more, after))
        return None


def planned(stages: list[Stage], limit: int) -> int | None:
    """The cost of what `Budget` plans, which must fit; None if it finds nothing."""
    try:
        found = replay(Budget(limit).actions(stages), stages)
    except BudgetError:
        return None
    assert found.peak_bytes <= limit
    return found.cost


@pytest.mark.parametrize("seed", [*range(8), *swept(range(8, 20))])
def test_equals_exhaustive_search(seed: int):
    """Four random chains a seed, of up to six stages, at random budgets."""
    rng = random.Random(seed)
    for _ in range(4):
        stages = random_stages(rng, rng.randint(1, 6))
        whole = all_bytes(stages)
        limit = rng.randint(whole // 4, whole)

        assert planned(stages, limit) == Search(stages, limit).least_cost()


@pytest.mark.parametrize("seed", [*range(6), *swept(range(6, 16))])
def test_is_never_worse_than_equal_segments(seed: int):
    """On chains of 50 stages whose bytes must be rounded, whatever the segments."""
    rng = random.Random(seed)
    stages = random_stages(rng, 50, scale=10**6)
    for k in rng.sample(range(1, 51), 1):
        every = replay(Every(k).actions(stages), stages)

        cost = planned(stages, every.peak_bytes)
        assert cost is not None
        assert cost <= every.cost


@pytest.mark.parametrize("scale", [1, 10**6])
@pytest.mark.parametrize("seed", range(10))
def test_names_the_smallest_feasible_size(seed: int, scale: int):
    """That size is feasible, and a byte less is not."""
    rng = random.Random(seed)
    stages = random_stages(rng, 8, scale)

    with pytest.raises(BudgetError, match="smallest feasible size is") as caught:
        Budget(0).actions(stages)
    least = int(str(caught.value).split("size is ")[1].split(" bytes")[0])
    assert planned(stages, least) is not None
    assert planned(stages, least - 1) is None


def test_more_room_never_costs_more():
    """The cost falls with the budget, to one run of each stage."""
    rng = random.Random(3)
    stages = random_stages(rng, 12)
    costs = [planned(stages, limit) for limit in range(0, all_bytes(stages) + 1, 9)]
    feasible = [cost for cost in costs if cost is not None]

    assert feasible == sorted(feasible, reverse=True)
    whole = planned(stages, all_bytes(stages))
    assert whole == sum(stage.cost for stage in stages)


def test_plans_a_hundred_stages():
    """A hundred stages, their bytes rounded, within the budget."""
    stages = random_stages(random.Random(0), 100, scale=10**6)
    found = replay(Budget(0.3).actions(stages), stages)

    assert found.peak_bytes <= 0.3 * all_bytes(stages)
    assert found.cost < 2 * sum(stage.cost for stage in stages)


def test_sizes_mean_the_same():
    """An int in bytes, a text, a fraction of what is held without recomputation."""
    stages = [Stage(output_bytes=1024, record_bytes=3072)] * 8

    sizes = (16384, "16KiB", 0.5)
    assert len({Budget(size).actions(stages) for size in sizes}) == 1
    assert eval(repr(Budget("16KiB")), dict(vars(schedules))) == Budget("16KiB")


@pytest.mark.parametrize("size", [0.0, 1.5, -0.5])
def test_fractions_are_checked(size: float):
    """A float is a fraction."""
    with pytest.raises(ScheduleError, match=r"not in \(0, 1\]"):
        Budget(size)


@pytest.mark.parametrize(
    ("size", "error"), [("many", ValueError), (-1, ValueError), (None, PolicyError)]
)
def test_sizes_are_checked(size: object, error: type[Exception]):
    """Other sizes are read as everywhere."""
    with pytest.raises(error):
        Budget(size)  # pyright: ignore[reportArgumentType]
