"""Runs rows: every contender in turn, checked, counted, timed, and held against its bounds."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks import jax_peer
from tests.benchmarks.bounds import Verdict, ratio_of, steady
from tests.benchmarks.contenders import PLAIN, Contender, is_installed
from tests.benchmarks.memory import allocated
from tests.benchmarks.rows import LIMIT, Row
from tests.benchmarks.timing import Pace, Ratio, clock, interleaved, paired, summed
from tests.benchmarks.work import Work

AGAIN = "again, {}"
#: What a peer raises where it does not support what it is asked for.
REFUSALS = (RuntimeError, TypeError, ValueError, NotImplementedError)


@dataclass(frozen=True)
class Line:
    """One contender in one row.

    Attributes:
        name: of the contender, or of a limit.
        time: its time over no remat's; None where it did not run.
        of_limit: its time over its own limit's.
        held_bytes: what waits between forward and backward; None under torch.func, where
            the two are not apart.
        peak_bytes: the most that a step had allocated at one time.
        missing: why it did not run, or "".
    """

    name: str
    time: Ratio | None = None
    of_limit: Ratio | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None
    missing: str = ""


@dataclass(frozen=True)
class Result:
    """One row, measured."""

    name: str
    title: str
    transform: str
    rounds: int
    lines: list[Line]
    verdicts: list[Verdict]


@dataclass
class _Runner:
    """The contenders of one row that run, ready to be measured."""

    work: Work
    steps: dict[str, Callable[[], Any]] = field(default_factory=dict)
    keeps: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)

    def admit(self, contender: Contender, right: list[Tensor] | None) -> None:
        """Runs a contender a first time, checks its gradients, counts its bytes."""
        if contender.name == "torch_remat" and not is_installed("torch_remat"):
            self.missing[contender.name] = "not installed"
            return
        refusals = () if contender.name.startswith(("no remat", "remat")) else REFUSALS
        try:
            unit = contender.wrap(self.work.unit)
            with contender.settings():
                found = self.work.step(unit)
        except refusals as error:
            self.missing[contender.name] = f"raises {type(error).__name__}"
            return
        if right is not None:
            torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)
        self._count(contender, unit)

    def _count(self, contender: Contender, unit: Any) -> None:
        name, work = contender.name, self.work
        self.steps[name] = lambda: work.step(unit)
        self.keeps[name] = contender.keeps
        self.steps[name]()
        self.peaks[name] = allocated(self.steps[name]).peak
        if work.transform == "backward":
            self.held[name] = allocated(lambda: work.forward(unit)).left


def measured(row: Row, quick: bool = False) -> Result:
    """One row; what is unsteady is measured a second time."""
    work = row.make_quick() if quick else row.make()
    runner, rivals = _Runner(work), row.rivals(work, quick)
    right = work.step(rivals[0].wrap(work.unit))
    for contender in rivals:
        runner.admit(contender, right)
    with jax_peer.admitted(runner.steps, runner.peaks, runner.missing, work):
        return _compared(row, runner, rivals, quick)


def _compared(
    row: Row, runner: _Runner, rivals: list[Contender], quick: bool
) -> Result:
    """Those that run, against each other and their limits."""
    work = runner.work
    used = {
        keeps
        for name, keeps in runner.keeps.items()
        if name in runner.steps and name.startswith("remat")
    }
    again = {keeps: row.limits.again(work, keeps) for keeps in sorted(used)}
    bounds = row.bounds(rivals)
    measure = _Interleaved(runner.steps, again, quick)
    names = [*runner.steps, *map(LIMIT.format, again)]
    times, found = steady(measure, names, bounds, runner.peaks)
    lines = _lines(runner, times, _held(row, work, used))
    num_rounds = len(times[PLAIN])
    return Result(row.name, work.title, work.transform, num_rounds, lines, found)


@dataclass(frozen=True)
class _Interleaved:
    """Times contenders and limits in turn.

    Attributes:
        steps: of the contenders.
        again: what each policy computes again, which its limit adds to no remat.
        quick: whether to look at as little as can be compared.
    """

    steps: dict[str, Callable[[], Any]]
    again: dict[str, Callable[[], None]]
    quick: bool

    def __call__(self, names: Collection[str], longer: int) -> dict[str, list[float]]:
        limits = [keeps for keeps in self.again if LIMIT.format(keeps) in names]
        run = {*names, PLAIN} if limits else {*names}
        steps = {name: step for name, step in self.steps.items() if name in run}
        steps |= {AGAIN.format(keeps): self.again[keeps] for keeps in limits}
        pace = Pace.quick() if self.quick else Pace.of(steps).longer(longer)
        times = interleaved(steps, pace.rounds, pace.turns, pace.lead, clock())
        for keeps in limits:
            repeated = times.pop(AGAIN.format(keeps))
            times[LIMIT.format(keeps)] = summed(times[PLAIN], repeated)
        return times


def _held(row: Row, work: Work, used: set[str]) -> dict[str, int | None]:
    """The bytes of each limit; None where forward and backward are not apart."""
    is_apart = work.transform == "backward"
    return {
        keeps: row.limits.held_bytes(work, keeps) if is_apart else None
        for keeps in sorted(used)
    }


def _lines(
    runner: _Runner, times: dict[str, list[float]], held_bytes: dict[str, int | None]
) -> list[Line]:
    over = paired(times, times[PLAIN])
    limits = {LIMIT.format(keeps): held for keeps, held in held_bytes.items()}
    lines = [Line(name, over[name], held_bytes=held) for name, held in limits.items()]
    for name in runner.steps:
        keeps = runner.keeps.get(name)
        limit = LIMIT.format(keeps)
        of_limit = ratio_of(times, name, limit) if limit in times else None
        held, peak = runner.held.get(name), runner.peaks.get(name)
        lines.append(Line(name, over[name], of_limit, held, peak))
    missing = [Line(name, missing=why) for name, why in runner.missing.items()]
    return [*lines, *missing]
