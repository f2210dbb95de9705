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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from remat._errors import BudgetError, ScheduleError, refusal
from remat.policies._sizes import parse_size, show_size
from remat.schedules._contract import (
    AbstractSchedule,
    Action,
    Advance,
    Backward,
    Drop,
    Record,
    Restore,
    Snapshot,
    Stage,
)
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

    size: int | float | str
    # Tells 1.0 (all) from 1 (one byte), which are equal in Python.
    is_part: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_part", isinstance(self.size, float))
        if isinstance(self.size, float):
            if 0 < self.size <= 1:
                return
            raise refusal(
                ScheduleError,
                where=f"Budget({self.size!r})",
                what="the fraction is not in (0, 1].",
                why="It is a fraction of what is held without recomputation.",
                do="Pass a fraction, an int in bytes, or a string like '512MiB'.",
            )
        parse_size(self.size, f"Budget({self.size!r})")

    def bytes_for(self, stages: Sequence[Stage]) -> int:
        """The size in bytes, for these stages."""
        if isinstance(self.size, float):
            return int(self.size * _all_bytes(stages))
        return parse_size(self.size, f"Budget({self.size!r})")

    def actions(self, stages: Sequence[Stage]) -> tuple[Action, ...]:
        """See the base class."""
        if not stages:
            return ()
        limit = self.bytes_for(stages)
        if limit >= _all_bytes(stages):
            return Every(len(stages)).actions(stages)
        least = _LeastBytes(stages)
        if limit < least.needed:
            raise refusal(
                BudgetError,
                where=f"Budget({self.size!r}), which is {limit} bytes",
                what="no schedule fits.",
                why=f"The smallest feasible size is {least.needed} bytes "
                f"({show_size(least.needed)}).",
                do=f"Give at least Budget({least.needed}), or split the largest stage "
                "in two.",
            )
        candidates = [
            _Planner(stages, limit).actions(),
            least.actions(),
            *(Every(k).actions(stages) for k in range(1, len(stages) + 1)),
        ]
        return _cheapest_within(filter(None, candidates), stages, limit)


def _all_bytes(stages: Sequence[Stage]) -> int:
    """What all records and all states but the first hold."""
    return sum(stage.record_bytes + stage.output_bytes for stage in stages)


def _cheapest_within(
    candidates: Iterable[tuple[Action, ...]], stages: Sequence[Stage], limit: int
) -> tuple[Action, ...]:
    found = [(replay(actions, stages), actions) for actions in candidates]
    fitting = [
        (result.cost, place)
        for place, (result, _) in enumerate(found)
        if result.peak_bytes <= limit
    ]
    return found[min(fitting)[1]][1]


Choice = Callable[[int, int, int], int]
#: The choice for stages s .. t: record stage s, or keep the state at a later one.
_RECORD = 0


@final
@dataclass(frozen=True, slots=True)
class _Stretch:
    """Stages s .. t with `room` for all but state s; `is_kept`: a snapshot holds it."""

    start: int
    stop: int
    room: int
    is_kept: bool
    is_current: bool


def _actions_of(choice: Choice, part: _Stretch, sizes: _Sizes) -> tuple[Action, ...]:
    """The actions of the choices for each part."""
    actions: list[Action] = []
    pending: list[_Stretch | Backward] = [part]
    while pending:
        now = pending.pop()
        if isinstance(now, Backward):
            actions.append(now)
            continue
        if not now.is_current:
            actions.append(Restore(now.start))
        start, stop, room = now.start, now.stop, now.room
        middle = choice(start, stop, room)
        if middle == _RECORD:
            # The state of a recorded stage stays for the record's sake.
            actions += [Drop(start), Record(start)] if now.is_kept else [Record(start)]
            pending.append(Backward(start))
            if start < stop:
                room -= sizes.record[start] + sizes.state[start + 1]
                pending.append(_Stretch(start + 1, stop, room, False, True))
            continue
        actions += [] if now.is_kept else [Snapshot(start)]
        actions += [Advance(start, middle), Snapshot(middle)]
        pending.append(_Stretch(start, middle - 1, room, True, False))
        pending.append(_Stretch(middle, stop, room - sizes.state[middle], True, True))
    return tuple(actions)


@final
class _Sizes:
    """Bytes, or slots, of each state and record; the first state is the caller's."""

    def __init__(self, stages: Sequence[Stage], unit: int = 1) -> None:
        self.state = [0, *(-(-stage.output_bytes // unit) for stage in stages)]
        self.record = [-(-stage.record_bytes // unit) for stage in stages]


@final
class _LeastBytes:
    """The schedule that holds least, in exact bytes, and how many it needs."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._count = len(stages)
        self._sizes = _Sizes(stages)
        self._choices: dict[tuple[int, int], int] = {}
        self._least: dict[tuple[int, int], int] = {}
        for length in range(self._count):
            for start in range(self._count - length):
                self._solve(start, start + length)
        self.needed = self._least[0, self._count - 1]

    def _solve(self, start: int, stop: int) -> None:
        sizes = self._sizes
        best = sizes.record[start] + sizes.state[start + 1]
        if start < stop:
            best += self._least[start + 1, stop]
        choice = _RECORD
        for middle in range(start + 1, stop + 1):
            # A backward over stages holds at least what a run through them does.
            needed = max(
                sizes.state[middle] + self._least[middle, stop],
                self._least[start, middle - 1],
            )
            if needed < best:
                best, choice = needed, middle
        self._least[start, stop] = best
        self._choices[start, stop] = choice

    def actions(self) -> tuple[Action, ...]:
        """The actions of this schedule."""
        part = _Stretch(0, self._count - 1, self.needed, False, True)
        return _actions_of(lambda s, t, _: self._choices[s, t], part, self._sizes)


@final
class _Planner:
    """The dynamic program over stages and slots."""

    def __init__(self, stages: Sequence[Stage], limit: int) -> None:
        sizes = [each for s in stages for each in (s.output_bytes, s.record_bytes)]
        unit = math.gcd(*sizes) or 1
        if limit // unit > _SLOTS:
            unit = -(-limit // _SLOTS)
        self._count = len(stages)
        self._slots = limit // unit
        self._sizes = _Sizes(stages, unit)
        self._sums: Any = np.cumsum([0, *(stage.cost for stage in stages)]).astype(
            float
        )
        self._costs: dict[tuple[int, int], Any] = {}
        self._choices: dict[tuple[int, int], Any] = {}
        for length in range(self._count):
            for start in range(self._count - length):
                self._solve(start, start + length)

    def _solve(self, start: int, stop: int) -> None:
        sizes, sums = self._sizes, self._sums
        kept = sizes.record[start] + sizes.state[start + 1]
        rest = self._costs[start + 1, stop] if start < stop else None
        best: Any = self._shifted(rest, kept) + (sums[start + 1] - sums[start])
        choice: Any = np.zeros(self._slots + 1, dtype=np.int16)
        for middle in range(start + 1, stop + 1):
            cost = self._shifted(self._costs[middle, stop], sizes.state[middle])
            cost += self._costs[start, middle - 1]
            cost += sums[middle] - sums[start]
            choice[cost < best] = middle
            best = np.minimum(best, cost)
        self._costs[start, stop], self._choices[start, stop] = best, choice

    def _shifted(self, costs: Any, taken: int) -> Any:
        """Costs by slots where some slots are taken; None costs nothing."""
        found = np.full(self._slots + 1, np.inf)
        if taken <= self._slots:
            left = self._slots + 1 - taken
            found[taken:] = 0.0 if costs is None else costs[:left]
        return found

    def actions(self) -> tuple[Action, ...] | None:
        """The cheapest schedule, None if none fits the slots."""
        last = self._count - 1
        if not np.isfinite(self._costs[0, last][self._slots]):
            return None
        part = _Stretch(0, last, self._slots, False, True)
        return _actions_of(
            lambda s, t, room: int(self._choices[s, t][room]), part, self._sizes
        )
