"""Replays a list of actions without tensors: checks them, and adds up their costs.

The executor of `remat.layers` asks the same ledger before each action, so that a list
that replays is a list that runs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast, final

from remat._errors import ScheduleError, require_type
from remat.schedules import _actions as do
from remat.schedules._contract import Stage, require_stages


@final
class Ledger:
    """The state of a schedule's run; refuses an action that is not legal.

    Attributes:
        current: the current state, None after a backward.
        kept: the states that snapshots keep.
        recorded: the stages that are recorded.
        remaining: how many stages have not been pulled back; the last comes first.
    """

    def __init__(self) -> None:
        self.current: int | None = 0
        self.kept: set[int] = set()
        self.recorded: set[int] = set()
        self.remaining: int | None = None

    def enter(self, action: do.Action) -> None:
        """Notes an action that is about to be done.

        Raises:
            ScheduleError: it cannot be done here.
        """
        at = f"the current state is {self.current}"
        match action:
            case do.Advance(start, stop):
                _require(start < stop, action, "it goes nowhere")
                _require(self.current == start, action, at)
                self.current = stop
            case do.Record(stage):
                _require(self.current == stage, action, at)
                is_new = stage not in self.recorded
                _require(is_new, action, f"stage {stage} is recorded already")
                self.recorded.add(stage)
                self.current = stage + 1
            case do.Snapshot(state):
                _require(self.current == state, action, at)
                _require(state not in self.kept, action, "it is kept already")
                self.kept.add(state)
            case do.Restore(state):
                _require(state in self.kept, action, "it is not kept")
                self.current = state
            case do.Drop(state):
                _require(state in self.kept, action, "it is not kept")
                self.kept.remove(state)
            case do.Backward(stage):
                # The first backward is that of the last stage.
                left = self.current if self.remaining is None else self.remaining
                _require(
                    left == stage + 1, action, f"{left} stages remain to be pulled"
                )
                is_recorded = stage in self.recorded
                _require(is_recorded, action, f"stage {stage} is not recorded")
                self.recorded.remove(stage)
                self.remaining, self.current = stage, None
            case _:  # pyright: ignore[reportUnnecessaryComparison]
                _require(False, action, "it is of no class of actions")  # pyright: ignore[reportUnreachable]


def _require(holds: bool, action: do.Action | None, why: str) -> None:
    """Refuses an action, or the end of the list, unless this holds; else `why` is true."""
    if holds:
        return
    raise ScheduleError.of(
        where=f"the action {action}" if action else "the end of the list",
        what="cannot be done." if action else "comes too early.",
        why=f"At this point, {why}.",
        do="Run the sweep to the last state, then pull back each stage once, from states "
        "that are kept.",
    )


def require_legal(actions: object, count: int) -> tuple[do.Action, ...]:
    """Refuses what a schedule answered if it is no list of legal actions for so many stages."""
    wanted = "a sequence of actions of `schedules`, as `replay` takes it"
    require_type(
        "what a schedule's `actions` returned", actions, Sequence, wanted=wanted
    )
    listed = cast("Sequence[do.Action]", actions)
    return tuple(action for action, _ in _checked(listed, count))


def _checked(
    actions: Iterable[do.Action], count: int
) -> Iterator[tuple[do.Action, Ledger]]:
    """The actions, each with the ledger after it; refuses those that are not legal."""
    ledger = Ledger()
    for action in actions:
        if isinstance(action, do.Backward) and ledger.remaining is None:
            at = f"the current state is {ledger.current} of {count}"
            _require(ledger.current == count, action, at)
        ledger.enter(action)
        yield action, ledger
    left = count if ledger.remaining is None else ledger.remaining
    _require(left == 0, None, f"{left} stages remain to be pulled back")


@final
@dataclass(frozen=True, slots=True)
class Replay:
    """The totals of a list of actions.

    Attributes:
        evaluations: runs of a stage, the recording ones included.
        cost: of these, in the unit of the stages.
        most_snapshots: the most states that snapshots kept at one time.
        peak_bytes: the most bytes of states and records at one time, the first state left
            out: it is the caller's. While a stage runs, the state that it takes and the
            one that it makes are there; its own temporaries, and gradients, are not
            counted.
        held_bytes: the bytes that are held between the sweep and the backward, the last
            state left out too.
    """

    evaluations: int
    cost: int
    most_snapshots: int
    peak_bytes: int
    held_bytes: int


def replay(actions: Iterable[do.Action], stages: Sequence[Stage]) -> Replay:
    """Checks a list of actions and says what it costs.

    Args:
        actions: what a schedule answered.
        stages: what it was asked about.

    Returns:
        Evaluations, cost, snapshots and bytes.

    Raises:
        ScheduleError: an action cannot be done where it stands, or some stage is never
            pulled back.

    Example:
        >>> from remat import schedules
        >>> stages = [schedules.Stage()] * 10
        >>> found = schedules.replay(schedules.Revolve(3).actions(stages), stages)
        >>> found.evaluations, found.most_snapshots
        (25, 3)
    """
    require_stages(stages)
    require_type("replay(actions)", actions, Iterable, wanted="what `actions` returned")
    evaluations = cost = most_snapshots = peak_bytes = held_bytes = 0

    def live_bytes(ledger: Ledger, *others: int) -> int:
        """Bytes of what is kept and recorded, and of some more states."""
        states = {*ledger.kept, *ledger.recorded, *others} - {0}
        records = sum(stages[stage].record_bytes for stage in ledger.recorded)
        return records + sum(stages[state - 1].output_bytes for state in states)

    for action, ledger in _checked(actions, len(stages)):
        if ledger.remaining is None:
            held_bytes = live_bytes(ledger)
        most_snapshots = max(most_snapshots, len(ledger.kept))
        match action:
            case do.Advance(start, stop):
                ran = range(start, stop)
            case do.Record(stage):
                ran = (stage,)
            case _:
                ran = ()
        for stage in ran:
            evaluations += 1
            cost += stages[stage].cost
            peak_bytes = max(peak_bytes, live_bytes(ledger, stage, stage + 1))
    return Replay(evaluations, cost, most_snapshots, peak_bytes, held_bytes)
