"""Revolve: the fewest evaluations of equal stages for a given number of snapshots.

Griewank and Walther, "Algorithm 799: Revolve", ACM Transactions on Mathematical Software
26(1), 2000, https://doi.org/10.1145/347837.347846. To pull back l stages with s snapshots,
the first state among them, takes

    t(l, s) = r l - beta(s + 1, r - 1),    beta(s, r) = (s + r)! / (s! r!),

evaluations beyond the l that are recorded, where r is the least with beta(s, r) >= l: no
stage is advanced over more than r times (their Theorem 1 and Proposition 1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from remat.schedules import _actions as do
from remat.schedules._contract import (
    AbstractSchedule,
    Stage,
    require_count,
    require_stages,
)


@final
@dataclass(frozen=True, slots=True)
class Revolve(AbstractSchedule):
    """Keeps at most `snapshots` states, and recomputes as little as that permits.

    Laws: l stages run l + t(l, s) times in all, which is the minimum; at most
    `snapshots` states are kept, including the first, and one stage is recorded at any
    time, so memory does not depend on l. The last stage is recorded in the sweep.

    Args:
        snapshots: states that may be kept at one time, at least 1, the first one counted.

    Raises:
        ScheduleError: `snapshots` is not a positive int.

    Example:
        >>> from remat import schedules
        >>> stages = [schedules.Stage()] * 60
        >>> for s in (1, 2, 4, 8):
        ...     print(s, schedules.replay(schedules.Revolve(s).actions(stages), stages).evaluations)
        1 1830
        2 440
        4 244
        8 185

    References:
        Griewank and Walther, 2000, https://doi.org/10.1145/347837.347846.
    """

    snapshots: int

    def __post_init__(self) -> None:
        require_count(self.snapshots, f"Revolve(snapshots={self.snapshots!r})")

    def actions(self, stages: Sequence[Stage]) -> tuple[do.Action, ...]:
        require_stages(stages)
        if not stages:
            return ()
        found: list[do.Action] = [do.Snapshot(0)]
        current: int | None = 0
        # Some stages with the snapshots that they may have, their first state kept. A list in
        # place of recursion, whose depth would be the number of snapshots.
        pending = [(0, len(stages), self.snapshots)]
        while pending:
            first, last, spare = pending.pop()
            if current != first:
                found.append(do.Restore(first))
            current = None
            if last - first == 1:
                found += [do.Drop(first), do.Record(first), do.Backward(first)]
            elif spare == 1:
                found.append(do.Advance(first, last - 1))
                found += [do.Record(last - 1), do.Backward(last - 1)]
                pending.append((first, last - 1, 1))
            else:
                current = first + _advance_before_snapshot(last - first, spare)
                found += [do.Advance(first, current), do.Snapshot(current)]
                pending += [(first, current, spare), (current, last, spare - 1)]
        return tuple(found)


def _advance_before_snapshot(count: int, snapshots: int) -> int:
    """How far to advance before the next snapshot, where stages and snapshots are several.

    With r as above, any m is optimal for which the first m stages need no more than r - 1
    more repeats and the others, with a snapshot less, no more than r and no less than
    r - 1: beta(s, r-2) <= m <= beta(s, r-1), and the same for the rest.
    """

    def beta(snapshots: int, repeats: int) -> int:
        return math.comb(snapshots + repeats, repeats)

    repeats = 0
    while beta(snapshots, repeats) < count:
        repeats += 1
    most = count - beta(snapshots - 1, repeats - 1)
    return min(beta(snapshots, repeats - 1), most)
