"""What schedules hold, at what peak, and how often a step really runs."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import chain, scan
from remat.policies import everything_saveable
from remat.schedules import (
    AbstractSchedule,
    Budget,
    Every,
    Revolve,
    Sqrt,
    Stage,
    replay,
)
from remat.storage import Cast
from tests.layers.stacks import weight
from tests.support import LiveBytes, count_operators, seeded, swept

pytestmark = pytest.mark.contract

WIDTH, BATCH = 4, 64
STATE_BYTES = BATCH * WIDTH * 8


def step(w: Tensor, h: Tensor) -> Tensor:
    """Three hidden values, and one sine to count."""
    h = torch.tanh(torch.tanh(h @ w) @ w)
    return torch.sin(h @ w)


def loss(w: Tensor, length: int, schedule: AbstractSchedule | None) -> Tensor:
    """The sum of the last state."""
    first = seeded(BATCH, WIDTH)
    carry, _ = scan(
        lambda h, _: (step(w, h), None), first, length=length, schedule=schedule
    )
    return carry.sum()


def wide() -> Tensor:
    return seeded(WIDTH, WIDTH, seed=3) / 2


def warmed(schedule: AbstractSchedule | None) -> None:
    """Traces what will be measured."""
    loss(wide().requires_grad_(), 5, schedule).backward()
    torch.func.grad(loss)(wide(), 5, schedule)


@functools.cache
def measured(length: int, schedule: AbstractSchedule | None) -> tuple[int, int, int]:
    """States held before the backward, at its peak, and at that of `torch.func.grad`."""
    warmed(schedule)
    w = wide().requires_grad_()
    with LiveBytes() as memory:
        value = loss(w, length, schedule)
        held = memory.live
        memory.reset_peak()
        value.backward()
        peak = memory.peak
    with LiveBytes() as memory:
        torch.func.grad(loss)(wide(), length, schedule)
        peak_of_grad = memory.peak
    sizes = (held, peak, peak_of_grad)
    return tuple(math.ceil(each / STATE_BYTES) for each in sizes)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("snapshots", [*swept([2]), 5])
def test_revolve_does_not_grow(snapshots: int):
    """Bytes held, and both peaks, are the same at every length, to the byte."""
    lengths = (32, 64, 256)
    held, peak, of_grad = zip(
        *(measured(n, Revolve(snapshots)) for n in lengths), strict=True
    )

    for sizes in (held, peak, of_grad):
        assert len(set(sizes)) == 1
        assert sizes[0] <= snapshots + 9


def test_sqrt_grows_as_a_square_root():
    """Four times the steps, twice the bytes; never more than 5 sqrt(N) states."""
    for place, sizes in enumerate(zip(*(measured(n, Sqrt()) for n in (16, 64, 256, 1024)), strict=True)):  # fmt: skip
        for n, size in zip((16, 64, 256, 1024), sizes, strict=True):
            assert size <= 5 * math.isqrt(n) + 6, place
        for one, other in itertools.pairwise(sizes):
            assert other <= 2.2 * one


def test_without_a_schedule_one_carry_a_step_is_held():
    """No hidden value waits."""
    held, peak, _ = measured(64, None)

    assert held <= 65
    assert peak <= 64 + 8


def test_what_is_held_is_within_a_tight_budget():
    """To the byte: what holds a place for the states has no bytes of its own."""
    stages = [torch.tanh] * 4
    size = 4 * STATE_BYTES
    chained = chain(stages, schedule=Budget(size))
    x = seeded(BATCH, WIDTH).requires_grad_()
    chained(x).sum().backward()

    with LiveBytes() as memory:
        y = chained(x)
        assert memory.live == size
    y.sum().backward()


def sines(run: Any, *args: Any) -> int:
    """How often the step has run."""
    return count_operators(run, *args)["aten.sin"]


CASES = [(2, 1), (5, 1), (6, 2), (10, 2), (10, 3), (17, 2), (25, 4), (30, 8), (33, 3),
         (40, 5), (50, 3), (60, 8)]  # fmt: skip


@pytest.mark.parametrize(("length", "snapshots"), CASES)
def test_revolve_runs_as_often_as_planned(length: int, snapshots: int):
    """Steps counted in real runs are l + t(l, s)."""
    schedule = Revolve(snapshots)
    r = next(r for r in range(99) if math.comb(snapshots + r, r) >= length)
    theory = length + r * length - math.comb(snapshots + r, snapshots + 1)
    warmed(schedule)

    w = wide().requires_grad_()
    assert sines(lambda: loss(w, length, schedule).backward()) == theory
    assert sines(torch.func.grad(loss), wide(), length, schedule) == theory


@pytest.mark.parametrize("schedule", [Every(1), Every(4), Sqrt()], ids=repr)
def test_segments_run_at_most_twice(schedule: AbstractSchedule):
    """As often as replayed, which is at most one forward more."""
    warmed(schedule)
    stages = [Stage()] * 30
    planned = replay(schedule.actions(stages), stages).evaluations

    w = wide().requires_grad_()
    assert sines(lambda: loss(w, 30, schedule).backward()) == planned <= 60


def test_a_second_backward_runs_the_sweep_again():
    """What was held is gone; the numbers are the same."""
    w = weight().requires_grad_()
    value = scan(
        lambda h, x: (torch.tanh(h @ w + x), None),
        seeded(3), seeded(9, 3, seed=1), schedule=Revolve(2),
    )[0].sum()  # fmt: skip

    first = torch.autograd.grad(value, w, retain_graph=True)
    second = torch.autograd.grad(value, w)
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("schedule", [None, Sqrt(), Revolve(30)], ids=repr)
def test_ten_thousand_steps(schedule: AbstractSchedule | None):
    """Neither Python's stack nor a trace a step."""
    w = torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
    carry, _ = scan(
        lambda h, _: (torch.sin(h * w), None),
        torch.ones(2, dtype=torch.float64), length=10_000, schedule=schedule,
    )  # fmt: skip

    carry.sum().backward()
    assert w.grad is not None


WIDE = 64 * WIDTH  # columns, of which the next state has a few


def narrowed(w: Tensor, h: Tensor) -> Tensor:
    """A few columns of a wide state, whose backward reads all of them."""
    return torch.tanh(h @ w)[:, :WIDTH]


def chained(w: Tensor, x: Tensor, schedule: AbstractSchedule) -> Tensor:
    """Each stage takes the columns as they lie."""
    return chain([functools.partial(narrowed, w)] * 8, schedule=schedule)(x)


def scanned(w: Tensor, x: Tensor, schedule: AbstractSchedule) -> Tensor:
    """Each step takes a copy of them, without gaps."""
    return scan(lambda h, _: (narrowed(w, h), None), x, length=8, schedule=schedule)[0]


def rows_of(w: Tensor, x: Tensor, schedule: AbstractSchedule) -> Tensor:
    """Outputs that the backward reads are stacked in the end, in memory of their own."""
    return scan(
        lambda h, _: (torch.sin(h), torch.tanh(h @ w)), x, length=8, schedule=schedule
    )[1]


def with_memory(w: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A layer of a decoder: what it attends to passes through."""
    h, memory = state
    return torch.tanh(h @ w) + memory.mean(0), memory


def chained_with_memory(w: Tensor, state: Any, schedule: AbstractSchedule) -> Tensor:
    return chain([functools.partial(with_memory, w)] * 6, schedule=schedule)(state)[0]


def scanned_with_memory(w: Tensor, state: Any, schedule: AbstractSchedule) -> Tensor:
    step = functools.partial(with_memory, w)
    return scan(lambda s, _: (step(s), None), state, length=6, schedule=schedule)[0][0]


@pytest.mark.parametrize(
    "run", [chained_with_memory, scanned_with_memory], ids=lambda f: f.__name__
)
def test_what_passes_through_is_not_counted_again(run: Any):
    """The stack was given it: a budget for the rest records every stage."""
    w = wide().requires_grad_()
    state = seeded(BATCH, WIDTH), seeded(64 * BATCH, WIDTH, seed=1)
    schedule = Budget(2 * 6 * STATE_BYTES)
    run(w, state, schedule).sum().backward()

    value = run(w, state, schedule).sum()

    assert count_operators(value.backward)["aten.tanh"] == 0


def test_a_budget_counts_a_record_as_it_is_stored():
    """What fits in the storage's form is not recomputed."""
    w = wide().requires_grad_()
    policy = everything_saveable.stored(Cast(torch.float16))
    # Of each step a state, and three values of a quarter of their bytes each.
    schedule = Budget(8 * 3 * STATE_BYTES)

    def value() -> Tensor:
        carry, _ = scan(
            lambda h, _: (step(w, h), None),
            seeded(BATCH, WIDTH),
            length=8,
            schedule=schedule,
            policy=policy,
        )
        return carry.sum()

    value().backward()
    with LiveBytes() as memory:
        last = value()
        held_bytes = memory.live

    assert held_bytes <= 8 * 3 * STATE_BYTES
    assert count_operators(last.backward)["aten.sin"] == 0


@pytest.mark.parametrize("part", [0.4, *swept([0.7, 1.0])])
@pytest.mark.parametrize("run", [chained, scanned, rows_of], ids=lambda f: f.__name__)
def test_a_budget_counts_all_memory_that_waits(run: Any, part: float):
    """That of views, and of outputs beside the state."""
    w, x = seeded(WIDTH, WIDE).requires_grad_(), seeded(BATCH, WIDTH, seed=1)
    limit = int(part * 8 * (BATCH * (WIDE + WIDTH)) * 8)
    run(w, x, Budget(limit)).sum().backward()

    with LiveBytes() as memory:
        returned = run(w, x, Budget(limit))
        held = memory.live - returned.untyped_storage().nbytes()

    assert held <= limit
