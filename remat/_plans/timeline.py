"""The peak of a training step under plans for its regions, part by part."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import final

from remat._errors import BudgetError
from remat._plans.plan import Plan
from remat._plans.recording import Recording, Stretch
from remat._plans.shares import Loads
from remat.policies._sizes import show_size


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """What lives at one moment of a step, in bytes.

    Attributes:
        phase: "forward", "loss" (what runs after the last region's forward and before the
            first backward of one), "backward" or "optimizer".
        where: which region runs, or what runs around regions.
        parameters: the parameters.
        state: what the optimizer keeps from step to step.
        others: buffers, and what the step was given.
        gradients: the gradients of parameters that are there already.
        held: what waits: inputs of regions, what these save, what is held around them.
        working: what this part of the step makes beside these.
    """

    phase: str
    where: str
    parameters: int
    state: int
    others: int
    gradients: int
    held: int
    working: int

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """What lives, by name."""
        return (
            ("parameters", self.parameters),
            ("optimizer state", self.state),
            ("buffers and batch", self.others),
            ("gradients", self.gradients),
            ("held", self.held),
            ("working set", self.working),
        )

    def __str__(self) -> str:
        """The parts, largest first."""
        parts = sorted(self.parts, key=lambda each: -each[1])
        shown = [f"{name} {show_size(size)}" for name, size in parts if size]
        return f"{self.phase} ({self.where}): {show_size(self.size_bytes)} = " + (
            " + ".join(shown)
        )


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """The moments of a step, in order, of which one is its peak."""

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The moment at which most lives."""
        return max(self.moments, key=lambda each: each.size_bytes)

    def __str__(self) -> str:
        """The highest moment of each phase, with its parts."""
        phases: dict[str, list[Moment]] = {}
        for each in self.moments:
            phases.setdefault(each.phase, []).append(each)
        return "\n".join(str(Timeline(tuple(each)).peak) for each in phases.values())

    def advice(self) -> str:
        """Which single change would lower the peak most, and by how much."""
        left = {
            what: max(each.size_bytes - lowers(each) for each in self.moments)
            for what, lowers in _CHANGES.items()
        }
        best = min(left, key=lambda each: left[each])
        spared = self.peak.size_bytes - left[best]
        return f"{best} (without it the peak is {show_size(spared)} lower)"


#: What a user can change, and which bytes of a moment that lowers.
_CHANGES: dict[str, Callable[[Moment], int]] = {
    "a smaller optimizer state (another optimizer, lower precision, or sharded)": (
        lambda moment: moment.state
    ),
    "tiles for the loss (layers.tiled_cross_entropy)": (
        lambda moment: moment.working if moment.phase == "loss" else 0
    ),
    "tiles or smaller regions, which make less at once (layers.tiled)": (
        lambda moment: moment.working if moment.phase in ("forward", "backward") else 0
    ),
    "fewer held inputs (regions of several layers, saved_inputs=storage.Offload())": (
        lambda moment: moment.held
    ),
    "gradients that are smaller or sharded": lambda moment: moment.gradients,
    "parameters that are smaller or sharded": lambda moment: moment.parameters,
}


def timeline(
    recording: Recording, names: Sequence[str], plans: Sequence[Plan]
) -> Timeline:
    """The moments of a recorded step whose regions have these names and plans."""
    constant = recording.parameters, recording.state, recording.others
    phases = _phases(recording.stretches)
    moments = [
        Moment(phase, _where(each, phase, names), *constant, *_live(each, plans))
        for each, phase in zip(recording.stretches, phases, strict=True)
    ]
    return Timeline(
        (*moments, Moment("optimizer", "step", *constant, *recording.update))
    )


def loads_of(recording: Recording) -> Loads:
    """What lives at the moments of a recorded step, whatever the plans of its regions."""
    stretches = recording.stretches
    constant = recording.parameters + recording.state + recording.others
    live = [*(each.peak for each in stretches), sum(recording.update)]

    def added(place: int, found: Plan) -> list[int]:
        return [*(_added(each, place, found) for each in stretches), 0]

    return Loads([constant + each for each in live], added)


def _added(stretch: Stretch, place: int, found: Plan) -> int:
    """The bytes that a region's plan adds to what lives in a part of a step."""
    half = stretch.half if place == stretch.region else ""
    if half == "forward":
        return found.peaks.forward
    # What was returned and waits is one value: it is counted once.
    twice = found.peaks.shared if place in stretch.returned else 0
    if half == "backward":
        # At the most: what is freed before the peak is not known one by one.
        retained = found.saved_bytes if stretch.is_retained else 0
        return found.peaks.backward + retained - twice
    return found.saved_bytes - twice if place in stretch.waiting else 0


def _live(stretch: Stretch, plans: Sequence[Plan]) -> tuple[int, int, int]:
    """The bytes of gradients, of what waits, and of what is made beside them."""
    working = stretch.peak - stretch.before
    if stretch.half:
        own = plans[stretch.region]
        is_forward = stretch.half == "forward"
        working = (
            own.peaks.forward if is_forward else own.peaks.backward - own.saved_bytes
        )
    added = sum(_added(stretch, place, each) for place, each in enumerate(plans))
    held = stretch.peak + added - stretch.gradients - working
    return stretch.gradients, held, working


def _phases(stretches: Sequence[Stretch]) -> list[str]:
    halves = [each.half for each in stretches]
    forwards = [place + 1 for place, half in enumerate(halves) if half == "forward"]
    before_backward = [*halves, "backward"].index("backward")
    forward = min(max(forwards, default=0), before_backward)
    loss, backward = before_backward - forward, len(halves) - before_backward
    return ["forward"] * forward + ["loss"] * loss + ["backward"] * backward


def _where(stretch: Stretch, phase: str, names: Sequence[str]) -> str:
    if stretch.half:
        return names[stretch.region]
    if stretch.region < 0:
        return "before the first region"
    half = "the backward of " if phase == "backward" else ""
    return f"after {half}{names[stretch.region]}"


def over_the_limit(where: str, limit: int, found: Timeline) -> BudgetError:
    """The error of a step whose lowest peak is above a limit."""
    least = found.peak.size_bytes
    return BudgetError.of(
        where=where,
        what=f"no plan that was tried keeps the step within {limit} bytes; the lowest peak is "
        f"{show_size(least - limit)} above.",
        why=f"Its peak is in the {found.peak}.",
        do=f"Pass peak={least}. Most would help: {found.advice()}.",
    )
