"""The contract of schedules: a rule from described stages to a list of actions.

A schedule is an immutable object whose `repr` rebuilds it. It sees no tensor: a stage
is described by its cost and its bytes. `replay` checks that actions are legal.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from remat._errors import ScheduleError, require_type, shown
from remat.schedules._actions import Action


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """What a schedule knows of a stage.

    Attributes:
        cost: of running it forward, in any unit that all stages share.
        state_bytes: of the state that it takes.
        output_bytes: of the state that it makes, with the memory behind one that is a view.
        record_bytes: of what its backward reads beyond these two.
    """

    cost: int = 1
    state_bytes: int = 1
    output_bytes: int = 1
    record_bytes: int = 1

    def __post_init__(self) -> None:
        if min(self.cost, self.state_bytes, self.output_bytes, self.record_bytes) < 0:
            raise ScheduleError.of(
                where=f"{self!r}",
                what="has a number below 0.",
                why="Costs and bytes are added up, and the least is chosen.",
                do="Pass numbers of at least 0.",
            )


class AbstractSchedule(abc.ABC):
    """A rule for which states a stack of stages keeps and what it recomputes.

    Laws: `actions` is a pure function, its result passes `replay`, and it runs the
    backward of each stage once.
    """

    # Stacks inside of a traced function are told apart by it.
    __remat_compares_as_a_whole__: ClassVar[bool] = True
    #: Whether to run no stage again may be meant: by a budget that all fits, by a rule of n.
    may_keep_all: ClassVar[bool] = False

    @abc.abstractmethod
    def actions(self, stages: Sequence[Stage]) -> tuple[Action, ...]:
        """The whole run: the sweep to the last state, then the backward to the first."""


def require_schedule(schedule: object, where: str) -> None:
    """Refuses what is neither a schedule nor None."""
    if schedule is None or isinstance(schedule, AbstractSchedule):
        return
    raise ScheduleError.of(
        where=where,
        what=f"got schedule={shown(schedule)}.",
        why="A schedule is a value of a class of `schedules`.",
        do="Pass None, or one such as schedules.Every(3); an input goes to what `chain` "
        "returns, chain(fs)(x).",
    )


def require_stages(stages: Sequence[Stage]) -> None:
    """Refuses what is no sequence of stages, such as their number."""
    wanted = "a sequence of stages, as in [schedules.Stage()] * 5"
    require_type("a schedule's stages", stages, Sequence, wanted=wanted)
    for each in stages:
        require_type("a schedule's stages", each, Stage, wanted=wanted)


def require_count(value: object, where: str) -> None:
    """Refuses a number of steps or snapshots that is not a positive int."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return
    raise ScheduleError.of(
        where=where,
        what=f"got {shown(value)}.",
        why="It is a count, of at least one.",
        do="Pass a positive int.",
    )
