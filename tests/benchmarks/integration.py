"""A neural ODE of 1,000 equal steps: plain, by `scan` under schedules, and by its peers.

Here a contender wraps one step as the whole integration. Its limit is the plain integration
and once more, without gradients, each step that its schedule runs again; its bytes are the
states and records that wait when the backward begins.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from remat import scan, schedules
from remat.schedules import AbstractSchedule, Backward, Ledger, Stage, replay
from tests.benchmarks import limit
from tests.benchmarks.contenders import PLAIN, Contender
from tests.benchmarks.memory import allocated
from tests.benchmarks.work import Params, Unit, Work

SCHEDULES: dict[str, AbstractSchedule | None] = {
    "no schedule": None,
    "Sqrt()": schedules.Sqrt(),
    "Revolve(32)": schedules.Revolve(32),
}
OWN = "remat, scan, {}"
PEER = "torch.utils.checkpoint, every sqrt(N) steps"
REENTRANT = f"{PEER}, reentrant"


def contenders(num_steps: int) -> list[Contender]:
    """The plain integration, the schedules, and torch's checkpoint around segments."""
    whole = functools.partial(_in_segments, num_steps)
    found = [Contender(PLAIN, functools.partial(_loop, num_steps), "plain", "plain")]
    found += [
        Contender(
            OWN.format(name),
            functools.partial(_scanned, num_steps, schedule),
            "own",
            name,
        )
        for name, schedule in SCHEDULES.items()
    ]
    return [
        *found,
        Contender(PEER, functools.partial(whole, _checkpointed), "eager", "Sqrt()"),
        Contender(REENTRANT, functools.partial(whole, _reentrant), "eager", "Sqrt()"),
    ]


def _loop(num_steps: int, step: Unit) -> Unit:
    def integrate(p: Params, x: Tensor) -> Tensor:
        for _ in range(num_steps):
            x = step(p, x)
        return x

    return integrate


def _scanned(num_steps: int, schedule: AbstractSchedule | None, step: Unit) -> Unit:
    def integrate(p: Params, x: Tensor) -> Tensor:
        return scan(
            lambda x, _: (step(p, x), None), x, length=num_steps, schedule=schedule
        )[0]

    return integrate


def _in_segments(num_steps: int, wrap: Callable[[Unit], Unit], step: Unit) -> Unit:
    size = math.isqrt(num_steps - 1) + 1
    sizes = [min(size, num_steps - start) for start in range(0, num_steps, size)]
    segments = [wrap(_loop(each, step)) for each in sizes]

    def integrate(p: Params, x: Tensor) -> Tensor:
        for segment in segments:
            x = segment(p, x)
        return x

    return integrate


def _checkpointed(segment: Unit) -> Unit:
    return lambda p, x: checkpoint(segment, p, x, use_reentrant=False)


def _reentrant(segment: Unit) -> Unit:
    def run(p: Params, x: Tensor) -> Any:
        return checkpoint(
            lambda x, *rest: segment(dict(zip(p, rest, strict=True)), x),
            # It differentiates only where a tensor argument requires grad.
            x if x.requires_grad else x.detach().requires_grad_(),
            *p.values(),
            use_reentrant=True,
        )

    return run


def again(work: Work, keeps: str) -> Callable[[], None]:
    """The steps that a schedule runs again, and no more."""
    schedule, count = SCHEDULES[keeps], work.num_steps
    stages = [Stage()] * count
    evaluations = (
        2 * count
        if schedule is None
        else replay(schedule.actions(stages), stages).evaluations
    )
    step = limit.forward_alone(work)

    def run() -> None:
        for _ in range(evaluations - count):
            step()

    return run


def held_bytes(work: Work, keeps: str) -> int:
    """The states and records that a schedule holds when the backward begins."""
    schedule, count = SCHEDULES[keeps], work.num_steps
    around = allocated(lambda: work.forward(_last_state)).left
    if schedule is None:
        return (count - 1) * work.x.nbytes + around
    ledger = Ledger()
    for action in schedule.actions([Stage()] * count):
        if isinstance(action, Backward):
            break
        ledger.enter(action)
    # The first state is the batch, and a record has the state that its stage starts from.
    states = (ledger.kept | ledger.recorded) - {0}
    read = limit.read(work, "everything")
    hidden = sum(each.size_bytes for each in read if each.path != "x")
    return len(states) * work.x.nbytes + len(ledger.recorded) * hidden + around


def _last_state(_: Params, x: Tensor) -> Tensor:
    """What an integration leaves, for the loss to read."""
    return x.clone().requires_grad_()
