"""Steps under a limit, run and timed: `python -m tests.benchmarks fit-times`.

The steps of the models of `fit` are planned for each of its limits by `costs="measured"`. Then fifty
random configurations within the limit are applied in turn, and run. The fastest three of them are
run again, longer and in rounds with the planned one: of fifty times the least is small by chance. A
step's time is processor time, the least of many. The command fails where a planned step takes a
tenth longer than the fastest.
"""

import gc
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch

from remat import Plan
from remat._plans.shares import Search, Shares
from tests.benchmarks.fit import Case
from tests.benchmarks.fit_models import MODELS
from tests.benchmarks.tables import heading

MOST_SLOWER = 0.1
AGAIN, ROUNDS = 3, 4
ONCE_S, AGAIN_S = 0.05, 0.3  # how long a configuration runs, at least


@dataclass(frozen=True)
class Line:
    """The seconds of a planned step, and of the fastest of those that were drawn."""

    model: str
    limit: int
    planned_s: float
    drawn_s: float
    num_drawn: int

    @property
    def slower(self) -> float:
        """How much longer the planned step takes than the fastest that was drawn."""
        return self.planned_s / self.drawn_s - 1


def _seconds(step: Callable[[], None], least_s: float) -> float:
    """The least that a step takes of several, once it is traced."""
    step()
    gc.collect()
    gc.disable()
    taken: list[float] = []
    while len(taken) < 5 or sum(taken) < least_s:
        started = time.process_time()
        step()
        taken.append(time.process_time() - started)
    gc.enable()
    return min(taken)


def timed(name: str) -> Iterator[Line]:
    """A model under its limits."""
    case = Case.of(name, "measured")
    for limit in case.limits:

        def seconds(plans: Sequence[Plan], least_s: float, limit: int = limit) -> float:
            # The regions are given these plans, as if they had been found.
            with mock.patch.object(
                Shares, "within", return_value=Search(plans, limit, limit)
            ):
                case.plan(limit)
            return _seconds(case.step, least_s)

        drawn = case.drawn(limit)
        times = [seconds(plans, ONCE_S) for plans in drawn]
        fastest = sorted(range(len(drawn)), key=times.__getitem__)[:AGAIN]
        racers = [
            case.shares.within(limit, case.loads).found,
            *(drawn[place] for place in fastest),
        ]
        rounds = [[seconds(plans, AGAIN_S) for plans in racers] for _ in range(ROUNDS)]
        planned, *others = [min(each) for each in zip(*rounds, strict=True)]
        yield Line(name, limit, planned, min(others, default=planned), len(drawn))


def main(threads: int) -> int:
    """Prints the table; how many planned steps are slower than they may be."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    print(heading())
    print(
        "| model | limit MiB | planned ms | fastest drawn ms | of | planned, slower |\n"
        "|---|--:|--:|--:|--:|--:|",
        flush=True,
    )
    lines: list[Line] = []
    for line in itertools.chain(*map(timed, MODELS)):
        lines.append(line)
        times = (line.planned_s, line.drawn_s)
        cells = [line.model, f"{line.limit / 2**20:.3f}"]
        cells += [*(f"{1e3 * each:.2f}" for each in times), str(line.num_drawn)]
        print(f"| {' | '.join(cells)} | {line.slower:+.1%} |", flush=True)
    return sum(line.slower > MOST_SLOWER for line in lines)
