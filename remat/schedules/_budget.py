"""The cheapest schedule of different stages within a budget of bytes.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory", 2019,
https://arxiv.org/abs/1911.13214 ("rotor"). Let a(i) be the bytes of state i, r(i) those of
the record of stage i, and f(i) its cost. C(s, t, m), the least cost of pulling back the
stages s .. t from state s, which is there, with m bytes for all else, is the lesser of

    f(s) + C(s+1, t, m - r(s) - a(s+1))                                    (s is recorded)
    f(s) + .. + f(k-1) + C(k, t, m - a(k)) + C(s, k-1, m)      (state k is kept, s < k <= t)

if the stages that run fit in m with their states (their Theorem 1, for schedules that keep
a state until it is used, which the authors call memory persistent). Gradients and the
temporaries within a stage are not counted here.

Bytes are counted in slots: exactly if their greatest common divisor allows it;
otherwise each size is rounded up and the budget down, so that the budget is kept in any
case. Rounding may exclude a schedule that just fits. So equal segments (`Every`), and
the schedule that holds least, are also tried in exact bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np

from remat._errors import BudgetError, ScheduleError
from remat.policies._sizes import parse_budget, show_size
from remat.schedules import _actions as do
from remat.schedules._contract import AbstractSchedule, Stage, require_stages
from remat.schedules._every import Every
from remat.schedules._replay import replay

_SLOTS = 1000  # a heuristic: a chain of 100 stages is planned in a few seconds


@final
@dataclass(frozen=True, slots=True)
class Budget(AbstractSchedule):
    """The least recomputation that keeps states and records within a size.

    Laws: `replay(...).peak_bytes` is at most the size; no `Every(k)` that fits costs
    less; if bytes need no rounding, no schedule that keeps each state until it is used
    costs less.

    Args:
        size: an int in bytes, a string like `"512MiB"`, or a float in (0, 1], a fraction of
            what is held without recomputation: all records, and all states but the first.

    Raises:
        ScheduleError: a float is not in (0, 1].
        ValueError: the size is negative, or a string that cannot be read.
        PolicyError: the size is neither a number nor a string.
        BudgetError: at planning: no schedule fits; it names the smallest size that does.

    Example:
        >>> from remat import schedules
        >>> stages = [schedules.Stage(cost=c, record_bytes=2) for c in (9, 1, 1, 5)]
        >>> for size in (12, 6):
        ...     actions = schedules.Budget(size).actions(stages)
        ...     print(schedules.replay(actions, stages).cost)
        16
        27

    References:
        Beaumont et al., 2019, https://arxiv.org/abs/1911.13214.
    """

    may_keep_all: ClassVar[bool] = True

    size: int | float | str
    # Tells 1.0 (all) from 1 (one byte), which are equal in Python.
    is_part: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_part", isinstance(self.size, float))
        parse_budget(self.size, f"Budget({self.size!r})", ScheduleError)

    def actions(self, stages: Sequence[Stage]) -> tuple[do.Action, ...]:
        require_stages(stages)
        if not stages:
            return ()
        # All records, and all states but the first.
        whole = sum(stage.record_bytes + stage.output_bytes for stage in stages)
        size = parse_budget(self.size, f"Budget({self.size!r})", ScheduleError)
        limit = int(size * whole) if isinstance(size, float) else size
        if limit >= whole:
            return Every(len(stages)).actions(stages)
        needed, smallest = _least_bytes(stages)
        if limit < needed:
            raise BudgetError.of(
                where=f"Budget({self.size!r}), which is {limit} bytes",
                what="no schedule fits.",
                why=f"The smallest feasible size is {needed} bytes ({show_size(needed)}).",
                do=f"Give at least Budget({needed}), or split the largest stage in two.",
            )
        candidates = [
            *_within_slots(stages, limit),
            smallest,
            *(Every(k).actions(stages) for k in range(1, len(stages) + 1)),
        ]
        replays = [(actions, replay(actions, stages)) for actions in candidates]
        fitting = [pair for pair in replays if pair[1].peak_bytes <= limit]
        return min(fitting, key=lambda pair: pair[1].cost)[0]


#: For the stages s .. t and a room: whether to record stage s, or which later state to keep.
Choice = Callable[[int, int, int], int]
_RECORD = 0


def _actions_of(choice: Choice, sizes: _Sizes, room: int) -> tuple[do.Action, ...]:
    def run(
        start: int, stop: int, room: int, *, is_kept: bool = False
    ) -> Iterator[do.Action]:
        # Stages start .. stop with `room` for all but state `start`; `is_kept`: a snapshot holds it.
        if start > stop:
            return
        middle = choice(start, stop, room)
        if middle == _RECORD:
            # The state of a recorded stage stays for the record's sake.
            yield from [do.Drop(start)] if is_kept else []
            yield do.Record(start)
            yield from run(start + 1, stop, room - sizes.recorded(start))
            yield do.Backward(start)
            return
        yield from [] if is_kept else [do.Snapshot(start)]
        yield from (do.Advance(start, middle), do.Snapshot(middle))
        yield from run(middle, stop, room - sizes.state[middle], is_kept=True)
        yield do.Restore(start)
        yield from run(start, middle - 1, room, is_kept=True)

    return tuple(run(0, len(sizes.record) - 1, room))


@final
class _Sizes:
    """Bytes, or slots, of each state and record; the first state is the caller's."""

    def __init__(self, stages: Sequence[Stage], unit: int = 1) -> None:
        self.state = [0, *(-(-stage.output_bytes // unit) for stage in stages)]
        self.record = [-(-stage.record_bytes // unit) for stage in stages]

    def recorded(self, stage: int) -> int:
        """What a recorded stage takes: its record, and the state that it makes."""
        return self.record[stage] + self.state[stage + 1]


def _stretches(count: int) -> Iterator[tuple[int, int]]:
    """The first and the last stage of each part of a stack, short parts first."""
    for length in range(count):
        for start in range(count - length):
            yield start, start + length


def _least_bytes(stages: Sequence[Stage]) -> tuple[int, tuple[do.Action, ...]]:
    """The least bytes that some schedule holds, exactly, and this schedule."""
    sizes = _Sizes(stages)
    # Of each part: the bytes, and the choice that takes no more.
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for start, stop in _stretches(len(stages)):
        rest = found[start + 1, stop][0] if start < stop else 0
        options = [(sizes.recorded(start) + rest, _RECORD)]
        for middle in range(start + 1, stop + 1):
            # A backward over stages holds at least what a run through them does.
            late = sizes.state[middle] + found[middle, stop][0]
            options.append((max(late, found[start, middle - 1][0]), middle))
        found[start, stop] = min(options)
    least, _ = found[0, len(stages) - 1]
    return least, _actions_of(lambda s, t, _: found[s, t][1], sizes, least)


def _within_slots(
    stages: Sequence[Stage], limit: int
) -> Iterator[tuple[do.Action, ...]]:
    """The cheapest schedule, by a dynamic program over slots, if one fits them."""
    unit = math.gcd(*(n for s in stages for n in (s.output_bytes, s.record_bytes))) or 1
    if limit // unit > _SLOTS:
        unit = -(-limit // _SLOTS)
    slots, sizes = limit // unit, _Sizes(stages, unit)
    sums: Any = np.cumsum([0, *(stage.cost for stage in stages)]).astype(float)

    def shifted(costs: Any, taken: int) -> Any:
        found = np.full(slots + 1, np.inf)
        if taken <= slots:
            found[taken:] = costs[: slots + 1 - taken]
        return found

    costs: dict[tuple[int, int], Any] = {}
    choices: dict[tuple[int, int], Any] = {}
    for start, stop in _stretches(len(stages)):
        rest = costs[start + 1, stop] if start < stop else np.zeros(slots + 1)
        best: Any = shifted(rest, sizes.recorded(start))
        best += sums[start + 1] - sums[start]
        choice: Any = np.full(slots + 1, _RECORD, dtype=np.int16)
        for middle in range(start + 1, stop + 1):
            cost = shifted(costs[middle, stop], sizes.state[middle])
            cost += costs[start, middle - 1]
            cost += sums[middle] - sums[start]
            choice[cost < best] = middle
            best = np.minimum(best, cost)
        costs[start, stop], choices[start, stop] = best, choice
    if np.isfinite(costs[0, len(stages) - 1][slots]):
        yield _actions_of(lambda s, t, room: int(choices[s, t][room]), sizes, slots)
