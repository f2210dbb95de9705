"""Schedules of like stages: legal, as few evaluations as the theory says, no more held."""

import dataclasses
import functools
import math
from collections import Counter

import checkpoint_schedules
import pytest

from remat import schedules
from remat._errors import ScheduleError
from remat.schedules import (
    AbstractSchedule,
    Action,
    Advance,
    Backward,
    Drop,
    Every,
    Ledger,
    Record,
    Restore,
    Revolve,
    Snapshot,
    Sqrt,
    Stage,
    replay,
)

LENGTHS = range(1, 61)
SNAPSHOTS = range(1, 9)
SCHEDULES: list[AbstractSchedule] = [
    *(Every(k) for k in (1, 2, 7, 100)),
    Sqrt(),
    *(Revolve(s) for s in (1, 2, 3, 8, 70)),
]


def like(count: int) -> list[Stage]:
    """So many stages, all alike."""
    return [Stage()] * count


def repeats_of(count: int, snapshots: int) -> int:
    """The least r with C(s + r, s) >= l."""
    return next(
        r for r in range(count + 1) if math.comb(snapshots + r, snapshots) >= count
    )


def theory(count: int, snapshots: int) -> int:
    """l + t(l, s) of Griewank and Walther."""
    r = repeats_of(count, snapshots)
    beta = math.comb(snapshots + r, snapshots + 1) if r else 0
    return count + r * count - beta


@functools.cache
def least(count: int, snapshots: int) -> int:
    """The fewest evaluations, by trying each place of the first snapshot."""
    if count == 1:
        return 1
    if snapshots == 1:
        return count * (count + 1) // 2
    return min(
        m + least(count - m, snapshots - 1) + least(m, snapshots)
        for m in range(1, count)
    )


def evaluations_of_peer(schedule: checkpoint_schedules.CheckpointSchedule) -> int:
    """The evaluations of a schedule of checkpoint_schedules, one backward long."""
    count = 0
    for action in schedule:
        if isinstance(action, checkpoint_schedules.EndReverse):
            return count
        if isinstance(action, checkpoint_schedules.Forward):
            count += action.n1 - action.n0
    raise AssertionError("the peer's schedule does not end")


def runs(actions: tuple[Action, ...]) -> Counter[int]:
    """How often each stage runs."""
    found: Counter[int] = Counter()
    for action in actions:
        match action:
            case Advance(start, stop):
                found.update(range(start, stop))
            case Record(stage):
                found[stage] += 1
            case _:
                pass
    return found


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_actions_can_be_done(schedule: AbstractSchedule):
    """Each list replays, and pulls back each stage once, for every length."""
    for count in LENGTHS:
        actions = schedule.actions(like(count))

        replay(actions, like(count))
        pulled = [each.stage for each in actions if isinstance(each, Backward)]
        assert pulled == list(reversed(range(count)))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_nothing_to_do_for_no_stage(schedule: AbstractSchedule):
    """A stack without stages has no actions."""
    assert schedule.actions([]) == ()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_repr_rebuilds(schedule: AbstractSchedule):
    """A schedule is a value."""
    assert eval(repr(schedule), dict(vars(schedules))) == schedule
    assert hash(eval(repr(schedule), dict(vars(schedules)))) == hash(schedule)


@pytest.mark.parametrize("snapshots", SNAPSHOTS)
def test_revolve_is_the_theorys(snapshots: int):
    """l + t(l, s) evaluations, with s snapshots and one record."""
    for count in LENGTHS:
        found = replay(Revolve(snapshots).actions(like(count)), like(count))

        assert found.evaluations == theory(count, snapshots) == least(count, snapshots)
        assert found.most_snapshots <= snapshots


@pytest.mark.parametrize("snapshots", SNAPSHOTS)
def test_revolve_equals_the_peer(snapshots: int):
    """As many evaluations as checkpoint_schedules 1.0.4."""
    for count in LENGTHS:
        found = replay(Revolve(snapshots).actions(like(count)), like(count))

        peer = checkpoint_schedules.Revolve(count, snapshots)
        assert found.evaluations == evaluations_of_peer(peer)


def test_revolve_holds_the_same_at_every_length():
    """Two states of a run, s snapshots and a record: nothing that grows."""
    peaks = {
        replay(Revolve(3).actions(like(n)), like(n)).peak_bytes for n in (20, 200, 2000)
    }

    assert len(peaks) == 1


def test_sqrt_holds_a_square_root():
    """At most 2 sqrt(n) states and sqrt(n) records, for no stage more than twice."""
    for count in (16, 64, 256, 1024):
        actions = Sqrt().actions(like(count))

        assert replay(actions, like(count)).peak_bytes <= 3 * math.isqrt(count) + 2
        assert max(runs(actions).values()) <= 2


ILLEGAL: list[tuple[list[Action], str]] = [
    ([Restore(0)], "is not kept"),
    ([Drop(1)], "is not kept"),
    ([Snapshot(0), Snapshot(0)], "kept already"),
    ([Advance(1, 2)], "current state is 0"),
    ([Advance(0, 0)], "goes nowhere"),
    ([Record(1)], "current state is 0"),
    ([Snapshot(0), Record(0), Restore(0), Record(0)], "recorded already"),
    ([Advance(0, 2), Backward(1)], "not recorded"),
    ([Record(0), Backward(0)], "current state is 1"),
    ([Record(0), Record(1), Backward(0)], "2 stages remain"),
    ([Record(0), Record(1), Backward(1)], "comes too early"),
    ([Record(0), Record(1)], "comes too early. At this point, 2 stages remain"),
]


@pytest.mark.parametrize(("actions", "why"), ILLEGAL, ids=[why for _, why in ILLEGAL])
def test_replay_refuses(actions: list[Action], why: str):
    """An action out of place is named, with the reason."""
    with pytest.raises(ScheduleError, match=why):
        replay(actions, like(2))


def test_replay_tells_what_waits_for_the_backward():
    """Records and kept states when the sweep is over: neither the first state nor the last."""
    stages = [Stage(output_bytes=10**k, record_bytes=10 ** (k + 3)) for k in range(3)]
    whole = replay([*map(Record, range(3)), *map(Backward, (2, 1, 0))], stages)
    single = replay(Revolve(1).actions(stages), stages)

    assert (whole.held_bytes, whole.most_snapshots) == (111_011, 0)
    assert (single.held_bytes, single.most_snapshots) == (100_010, 1)


def test_ledger_starts_at_the_first_state():
    """The first state is current and the caller's; nothing is kept."""
    ledger = Ledger()

    assert (ledger.current, ledger.kept, ledger.recorded) == (0, set(), set())


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
@pytest.mark.parametrize("kind", [Every, Revolve])
def test_counts_are_checked(kind: type, value: object):
    """A count is a positive int."""
    with pytest.raises(ScheduleError, match=r"got .*positive int"):
        kind(value)


@pytest.mark.parametrize(
    "field", ["cost", "state_bytes", "output_bytes", "record_bytes"]
)
def test_what_a_stage_costs_is_no_gain(field: str):
    """A schedule that is chosen by the least cost would run such a stage without end."""
    assert Stage(**{field: 0}) == dataclasses.replace(Stage(), **{field: 0})

    with pytest.raises(ScheduleError, match=rf"{field}=-1.*below 0.*at least 0"):
        Stage(**{field: -1})
