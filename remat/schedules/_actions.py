"""The actions of a schedule, imported as `do`.

A stack has the stages 0 .. n-1 and the states 0 .. n: stage i takes state i to state i+1.
The executor has one *current* state, kept states, and *records*: what the backward of a
stage reads. The sweep is over when state n is current; the backward then goes from stage
n-1 down to stage 0, and states and records are dropped on the way.
"""

from dataclasses import dataclass
from typing import final


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
