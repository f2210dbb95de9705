"""Snapshots where the number of stages is not known until the sweep has ended.

Wang, Moin and Iaccarino, "Minimal repetition dynamic checkpointing algorithm for unsteady
adjoint calculation", SIAM Journal on Scientific Computing 31(4), 2009, algorithm 1,
https://doi.org/10.1137/080727890; see also Stumm and Walther, "New algorithms for optimal
online checkpointing", 2010, https://doi.org/10.1137/080742439.

Each kept state has a level. The newest state is always kept. It gets level 0 if there
is room, or if an older state is *dispensable*, which means that a later state of a
higher level makes it superfluous. Otherwise the newest state replaces the one before
it, one level higher. So states of high levels stay where Revolve would put them. After
the sweep, Revolve runs the backward of each gap between kept states, with the snapshots
that are free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from remat.schedules._actions import Action, Advance, Drop, Restore, Snapshot
from remat.schedules._contract import AbstractSchedule, Stage, require_count
from remat.schedules._revolve import reverse


@final
@dataclass(frozen=True, slots=True)
class Kept:
    """A kept state, and its level."""

    state: int
    level: float


@final
@dataclass(frozen=True, slots=True)
class Online(AbstractSchedule):
    """Keeps at most `snapshots` states, wherever the stages end.

    Laws: what it keeps at a state does not depend on later stages; at most `snapshots`
    states are kept, including the first; one stage is recorded at any time. Each stage
    runs at most once more than the most that `Revolve` would run any stage: at most r +
    2 times, where r is the least with beta(snapshots, r) at least the length.

    Args:
        snapshots: states that may be kept at one time, at least 1, the first one counted.

    Raises:
        ScheduleError: `snapshots` is not a positive int.

    Example:
        >>> from remat import schedules
        >>> stages = [schedules.Stage()] * 30
        >>> for schedule in (schedules.Revolve(5), schedules.Online(5)):
        ...     print(schedules.replay(schedule.actions(stages), stages).evaluations)
        92
        99

    References:
        Wang, Moin and Iaccarino, 2009, https://doi.org/10.1137/080727890.
    """

    snapshots: int

    def __post_init__(self) -> None:
        require_count(self.snapshots, f"Online(snapshots={self.snapshots!r})")

    def arrive(
        self, kept: tuple[Kept, ...], state: int
    ) -> tuple[tuple[Action, ...], tuple[Kept, ...]]:
        """The action at a current state that is not the last, and what is kept then.

        Args:
            kept: what is kept so far, by state; nothing at state 0.
            state: the current state.
        """
        if not kept:
            return (Snapshot(0),), (Kept(0, math.inf),)
        if self.snapshots == 1:
            return (), kept
        if len(kept) < self.snapshots:
            return (Snapshot(state),), (*kept, Kept(state, 0))
        spare = next((each for each in kept if _is_dispensable(each, kept)), None)
        level = 0 if spare is not None else kept[-1].level + 1
        dropped = spare or kept[-1]
        rest = tuple(each for each in kept if each != dropped)
        actions = (Drop(dropped.state), Snapshot(state))
        return actions, (*rest, Kept(state, level))

    def finish(self, kept: tuple[Kept, ...], count: int) -> tuple[Action, ...]:
        """The backward, once the sweep has ended after so many stages."""
        return tuple(self._finish(kept, count))

    def _finish(self, kept: tuple[Kept, ...], count: int) -> Iterator[Action]:
        ends = [*(each.state for each in kept[1:]), count]
        for place in reversed(range(len(kept))):
            start, stop = kept[place].state, ends[place]
            yield Restore(start)
            yield from reverse(start, stop, self.snapshots - place)

    def actions(self, stages: Sequence[Stage]) -> tuple[Action, ...]:
        """See the base class."""
        kept: tuple[Kept, ...] = ()
        found: list[Action] = []
        for state in range(len(stages)):
            actions, kept = self.arrive(kept, state)
            found += [*actions, Advance(state, state + 1)]
        return (*found, *self.finish(kept, len(stages)))


def _is_dispensable(one: Kept, kept: Sequence[Kept]) -> bool:
    return any(each.state > one.state and each.level > one.level for each in kept)
