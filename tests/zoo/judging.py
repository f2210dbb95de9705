"""How a model is judged: trained as it is, with regions, and by torch's own checkpoint.

Each time it has the same weights, batches and draws, and its dropout is on. Compared are the
outputs, the gradients, the buffers and the next number of the generator, over two steps of
gradient descent: the second is served by what the first has traced, and sees other weights.
"""

import math
import random
import signal
import textwrap
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from remat import RematWarning, policies
from tests.support import LiveBytes, random_cotangent, tensors_in
from tests.zoo.members import Member
from tests.zoo.rows import PEER, PLAIN, POLICIES, Outcome, Row

#: Seconds of processor time for one model in one way.
TIME_LIMIT_S = 120
STEPS = 2
#: Of the model's largest gradient: where one is less, it is compared with this.
LEAST_GRADIENT = 1e-3
#: What `engine="auto"` says when the trace of a layer is refused.
_FALLS_BACK = "Its trace is refused: "

Way = Callable[[nn.Module], object]
Numbers = dict[str, Tensor | None]


class Trained(NamedTuple):
    """What some steps of a model gave.

    Attributes:
        numbers: what is compared, by name.
        held_bytes: what waits between forward and backward.
        refusals: why layers were not traced.
    """

    numbers: Numbers
    held_bytes: int
    refusals: list[str]


def judge(member: Member, engine: str = "auto") -> Row:
    """Trains a model in every way, and compares."""
    plain = attempt(member, lambda model: None)
    if isinstance(plain, Exception):
        return Row(member.name, {PLAIN: Outcome(error=describe(plain))})
    outcomes = {PLAIN: outcome_of(plain, plain)}
    for name in POLICIES:
        options = {"policy": getattr(policies, name), "engine": engine}
        found = attempt(member, lambda model: member.recompute(model, options))  # noqa: B023 - called at once
        outcomes[name] = outcome_of(found, plain)
    outcomes[PEER] = outcome_of(attempt(member, member.recompute_by_torch), plain)
    return Row(member.name, outcomes)


def attempt(member: Member, way: Way) -> Trained | Exception:
    """The numbers of a model, or the exception that it raises."""
    try:
        with time_limit(TIME_LIMIT_S):
            return trained(member, way)
    except Exception as error:  # noqa: BLE001 - whatever is raised is the outcome
        return error


def trained(member: Member, way: Way) -> Trained:
    """The numbers of the first steps of a model whose layers recompute in some way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RematWarning)
        seed_all(0)
        model = member.build()
        way(model)
        numbers = numbers_of_steps(model, member)
        held_bytes = held_by(model, member)
    said = [str(each.message) for each in caught]
    refusals = [each.partition(_FALLS_BACK)[2] for each in said if _FALLS_BACK in each]
    return Trained(numbers, held_bytes, refusals)


def numbers_of_steps(model: nn.Module, member: Member) -> Numbers:
    """What is compared, after each step of gradient descent."""
    numbers: Numbers = {}
    descent = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        outputs = outputs_of(model, member, step)
        loss_of(outputs).backward()
        found = named_numbers(outputs, model).items()
        numbers |= {f"{name}, step {step}": copied(each) for name, each in found}
        descent.step()
        descent.zero_grad()
    return numbers


def held_by(model: nn.Module, member: Member) -> int:
    """Bytes that wait between forward and backward, outputs included."""
    with LiveBytes() as memory:
        outputs = outputs_of(model, member, STEPS)
        held = memory.live
    del outputs
    return held


def outputs_of(model: nn.Module, member: Member, seed: int) -> list[Tensor]:
    """The outputs that have a gradient, of a batch and draws of their own."""
    seed_all(seed)
    found = tensors_in(model(**member.batch(model)))
    return [each for each in found if each.requires_grad]


def loss_of(outputs: list[Tensor]) -> Tensor:
    """The sum of the outputs' means, weighted by random numbers."""
    return torch.stack(
        [
            (each * random_cotangent(each, seed)).mean().double()
            for seed, each in enumerate(outputs)
        ]
    ).sum()


def named_numbers(outputs: list[Tensor], model: nn.Module) -> Numbers:
    """What is compared after one step."""
    found: Numbers = {f"output {place}": each for place, each in enumerate(outputs)}
    parameters, buffers = model.named_parameters(), model.named_buffers()
    found |= {f"gradient of {name}": each.grad for name, each in parameters}
    found |= {f"buffer {name}": each for name, each in buffers}
    return found | {"the next draw": torch.rand(4)}


def copied(number: Tensor | None) -> Tensor | None:
    """A number as it is now."""
    return None if number is None else number.detach().clone()


def seed_all(seed: int) -> None:
    """Puts the generators that models draw from to one state."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def outcome_of(found: Trained | Exception, plain: Trained) -> Outcome:
    """The outcome of one way, beside the plain model."""
    if isinstance(found, Exception):
        return Outcome(error=describe(found))
    gaps = gaps_of(found.numbers, plain.numbers)
    worst = max(gaps, key=lambda name: gaps[name])
    return Outcome(
        difference=gaps[worst],
        worst=worst if gaps[worst] else "",
        held_bytes=found.held_bytes,
        refusals=tuple(dict.fromkeys(on_one_line(each) for each in found.refusals)),
    )


def gaps_of(
    found: Mapping[str, Tensor | None], plain: Mapping[str, Tensor | None]
) -> dict[str, float]:
    """The largest difference of each tensor, over its largest number.

    Gradients that are zero but for rounding, as that of a bias of keys is, are as noisy as
    others are large: they count over a part of the largest gradient.
    """
    gradients = [
        each for name, each in plain.items() if each is not None and _is_gradient(name)
    ]
    least = LEAST_GRADIENT * max((largest(each) for each in gradients), default=0.0)
    return {
        name: gap(
            found.get(name), plain.get(name), least if _is_gradient(name) else 0.0
        )
        for name in sorted(found.keys() | plain.keys())
    }


def _is_gradient(name: str) -> bool:
    return name.startswith("gradient")


def gap(found: Tensor | None, plain: Tensor | None, least: float = 0.0) -> float:
    """The largest difference of two tensors over the second's largest number, or `least`.

    Infinite where one is missing or has another form.
    """
    if found is None or plain is None:
        return 0.0 if found is plain else float("inf")
    if (found.shape, found.dtype) != (plain.shape, plain.dtype):
        return float("inf")
    if found.equal(plain):
        return 0.0
    wide = torch.complex128 if plain.is_complex() else torch.float64
    difference = largest(found.to(wide) - plain.to(wide))
    scale = max(largest(plain.to(wide)), least)
    return difference / scale if scale and math.isfinite(difference) else math.inf


def largest(tensor: Tensor) -> float:
    """The largest number of a tensor, by its size."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def describe(error: Exception) -> str:
    """An exception on one line."""
    return on_one_line(f"{type(error).__name__}: {error}")


def on_one_line(text: str) -> str:
    """A text that fits into a cell."""
    return textwrap.shorten(text, 200, placeholder=" ...")


@contextmanager
def time_limit(seconds: int) -> Generator[None]:
    """Raises `TimeoutError` where a block takes longer than so much processor time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
