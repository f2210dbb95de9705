"""The contract of schedules: a rule from described stages to a list of actions.

A schedule is an immutable object whose `repr` rebuilds it. It sees no tensor: a stage
is described by its cost and its bytes. `replay` checks that actions are legal.

A stack has the stages 0 .. n-1 and the states 0 .. n: stage i takes state i to state i+1.
The executor has one *current* state, kept states, and *records*: what the backward of a
stage reads. The sweep is over when state n is current; the backward then goes from stage
n-1 down to stage 0, and states and records are dropped on the way.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from remat._errors import ScheduleError, refusal


@final
@dataclass(frozen=True, slots=True)
class Advance:
    """Runs the stages `start` .. `stop` - 1 and keeps nothing; `start` is current.

    Example:
        >>> from remat import schedules
        >>> schedules.Advance(0, 3)
        Advance(start=0, stop=3)
    """

    start: int
    stop: int


@final
@dataclass(frozen=True, slots=True)
class Record:
    """Runs a stage and keeps what its backward reads; state `stage` is current."""

    stage: int


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """Keeps the current state, which is `state`."""

    state: int


@final
@dataclass(frozen=True, slots=True)
class Restore:
    """Makes a kept state the current one; it stays kept."""

    state: int


@final
@dataclass(frozen=True, slots=True)
class Drop:
    """Frees a kept state."""

    state: int


@final
@dataclass(frozen=True, slots=True)
class Backward:
    """Runs the backward of a recorded stage, the last one that is still to be done.

    Its record is dropped, and no state is current afterwards.
    """

    stage: int


Action = Advance | Record | Snapshot | Restore | Drop | Backward


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """What a schedule knows of a stage.

    Attributes:
        cost: of running it forward, in any unit that all stages share.
        state_bytes: of the state that it takes.
        output_bytes: of the state that it makes.
        record_bytes: of what its backward reads beyond these two.
    """

    cost: int = 1
    state_bytes: int = 1
    output_bytes: int = 1
    record_bytes: int = 1


class AbstractSchedule(abc.ABC):
    """A rule for which states a stack of stages keeps and what it recomputes.

    Laws: `actions` is a pure function, its result passes `replay`, and it runs the
    backward of each stage once.
    """

    @abc.abstractmethod
    def actions(self, stages: Sequence[Stage]) -> tuple[Action, ...]:
        """The whole run: the sweep to the last state, then the backward to the first."""


def require_schedule(schedule: object, where: str) -> None:
    """Refuses what is neither a schedule nor None."""
    if schedule is None or isinstance(schedule, AbstractSchedule):
        return
    raise refusal(
        ScheduleError,
        where=where,
        what=f"got schedule={schedule!r}.",
        why="A schedule is a value of a class of `schedules`.",
        do="Pass None, or one such as schedules.Every(3).",
    )


def require_count(value: object, where: str) -> None:
    """Refuses a number of steps or snapshots that is not a positive int."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return
    raise refusal(
        ScheduleError,
        where=where,
        what=f"got {value!r}.",
        why="It is a count, of at least one.",
        do="Pass a positive int.",
    )
