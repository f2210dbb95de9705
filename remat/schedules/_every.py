"""Equal segments: keep a state at the start of each, and recompute the rest.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4, keep the ends of
about sqrt(n) segments; `torch.utils.checkpoint.checkpoint_sequential` leaves the number of
segments to the user. The last segment is recorded in the sweep: its backward comes first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from remat.schedules import _actions as do
from remat.schedules._contract import (
    AbstractSchedule,
    Stage,
    require_count,
    require_stages,
)


@final
@dataclass(frozen=True, slots=True)
class Every(AbstractSchedule):
    """Keeps the state at every `k`-th stage, and runs the stages between them again.

    Laws: no stage runs more than twice, those of the last segment once; between forward
    and backward ceil(n/k) states and one segment's records are held, and never more. A stack
    of k stages or fewer is one segment: it saves no memory, and warns.

    Args:
        k: stages in a segment, at least 1; the last segment may be shorter.

    Raises:
        ScheduleError: `k` is not a positive int.

    Example:
        >>> from remat import schedules
        >>> for action in schedules.Every(2).actions([schedules.Stage()] * 3):
        ...     print(action)
        Snapshot(state=0)
        Advance(start=0, stop=2)
        Record(stage=2)
        Backward(stage=2)
        Restore(state=0)
        Drop(state=0)
        Record(stage=0)
        Record(stage=1)
        Backward(stage=1)
        Backward(stage=0)

    References:
        Chen et al., 2016, https://arxiv.org/abs/1604.06174.
    """

    k: int

    def __post_init__(self) -> None:
        require_count(self.k, f"Every(k={self.k!r})")

    def actions(self, stages: Sequence[Stage]) -> tuple[do.Action, ...]:
        require_stages(stages)
        count = len(stages)
        starts = range(0, count, self.k)
        found: list[do.Action] = []
        for start in starts[:-1]:
            found += [do.Snapshot(start), do.Advance(start, start + self.k)]
        for start in reversed(starts):
            stop = min(start + self.k, count)
            if stop < count:
                found += [do.Restore(start), do.Drop(start)]
            found += map(do.Record, range(start, stop))
            found += map(do.Backward, reversed(range(start, stop)))
        return tuple(found)


@final
@dataclass(frozen=True, slots=True)
class Sqrt(AbstractSchedule):
    """`Every(k)` with k = ceil(sqrt(n)): memory grows as the square root of the stages.

    Laws: those of `Every`; at most sqrt(n) + 1 states and records are held.

    Example:
        >>> from remat import schedules
        >>> stages = [schedules.Stage()] * 100
        >>> schedules.Sqrt().actions(stages) == schedules.Every(10).actions(stages)
        True

    References:
        Chen et al., 2016, section 4.1, https://arxiv.org/abs/1604.06174.
    """

    may_keep_all: ClassVar[bool] = True

    def actions(self, stages: Sequence[Stage]) -> tuple[do.Action, ...]:
        require_stages(stages)
        return Every(math.isqrt(max(len(stages) - 1, 0)) + 1).actions(stages)
