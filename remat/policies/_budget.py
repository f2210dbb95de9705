"""The policies of a whole program: a number of bytes, and a plan's decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast, final

from remat._errors import PolicyError, require_choice
from remat.policies._as_policy import as_policy
from remat.policies._contract import (
    AbstractPolicy,
    AnyValues,
    Save,
    Value,
    WholeProgram,
    decide,
)
from remat.policies._sizes import parse_budget
from remat.storage import AbstractStorage, Keep

if TYPE_CHECKING:
    import torch

Memory = Callable[["torch.device"], int]
"""From a device to the bytes that are free there."""

Size = int | float | str | Memory
"""Bytes, a string, a fraction of what is without remat, "auto", or a `Memory`."""

_COSTS = ("flops", "measured")


@final
@dataclass(frozen=True, slots=True, repr=False)
class Budget(WholeProgram):
    """What `budget` makes; `is_part` tells 1.0 (all) from 1 (one byte) where they compare.

    It does so for the size and for the peak.
    """

    size: int | float | None
    allow: AbstractPolicy | None = None
    peak: Size | None = None
    costs: str = "flops"
    is_part: tuple[bool, bool] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parts = isinstance(self.size, float), isinstance(self.peak, float)
        object.__setattr__(self, "is_part", parts)

    @property
    def globs(self) -> tuple[str, ...]:
        return () if self.allow is None else self.allow.globs

    def storages(self, value: Value) -> tuple[AbstractStorage, ...]:
        """The ways in which a value may wait; none if it may not be saved.

        Raises:
            PolicyError: `allow` gave an answer that has no meaning.
        """
        if self.allow is None:
            return (Keep(),)
        answer: Any = self.allow(value)
        several: tuple[Any, ...] = (answer,)
        if isinstance(answer, (tuple, list)):
            several = cast("tuple[Any, ...]", tuple(answer))  # pyright: ignore[reportUnknownArgumentType]
        if several and all(isinstance(each, AbstractStorage) for each in several):
            return several
        decision = decide(self.allow, value)
        return (decision.storage,) if isinstance(decision, Save) else ()

    def decide_all(self, values: AnyValues) -> dict[int, Save]:
        """What a planner chooses."""
        return values.within(self)

    def __repr__(self) -> str:
        options = {"allow": self.allow, "peak": self.peak, "costs": self.costs}
        defaults = (None, "flops")
        given = [f"{k}={each!r}" for k, each in options.items() if each not in defaults]
        size = [] if self.size is None else [repr(self.size)]
        return f"budget({', '.join([*size, *given])})"


def budget(
    size: Size | None = None,
    allow: object = None,
    *,
    peak: Size | None = None,
    costs: str = "flops",
) -> AbstractPolicy:
    """Saves the values that avoid the most recomputation within a number of bytes.

    What counts is what a call of the region holds from its forward to its backward
    because of the policy: the saved values, as `saved_residuals` lists them, in the
    form in which they are stored. Generator states and copies of what a call changes count
    too; they are held whatever is saved. Arguments do not count: they belong to the
    caller, and are held under every policy.

    The choice is made once for each trace, over the whole program, with the default
    solver of `plan`, which shows the choice and has other options. It is within a certified
    gap of the optimum, but not always optimal.

    Laws: the bytes held never exceed the budget, nor the predicted peak `peak`; a larger
    budget never costs more.

    Args:
        size: bytes, as an int or as in `"512MiB"` or `"8GB"`; a float in (0, 1] for a
            fraction of what is saved without remat; or what `peak` takes beside these.
            None means as many as `peak` lets. The size applies to one call of the region.
        allow: what may be saved, and how: a policy, or a function of a value that may
            also return a storage, or a tuple of storages to choose from. None means
            anything, with `Keep()`.
        peak: the most bytes that a call and its backward may have made and not yet freed at
            once, gradients and outputs included, arguments not; a float in (0, 1] for a
            fraction of that peak without remat; or "auto" for the free
            memory of the device, or of the process on a CPU, minus a tenth in reserve; or
            a function from the device to its free bytes, which "auto" then uses.
        costs: what as little as possible is recomputed of, as `plan` takes it. By "measured"
            operators run to be timed, once in a process, and choices differ with what they
            take: processes that must choose alike count "flops". A peak then has in it what
            kernels hold inside.

    Returns:
        The policy. It combines with no other one: `allow` says what it may save.

    Raises:
        PolicyError: `size` or `peak` is not a size, there is neither, or `allow` is not a
            policy.
        ValueError: `size` is negative, a float outside (0, 1], or cannot be read; `costs` is
            no such word.
        BudgetError: at the first call, if more bytes are held even when nothing is
            saved, or no choice keeps to the peak.

    Example:
        >>> from remat import policies
        >>> policies.budget("512MiB", allow=policies.save_matmul_outputs)
        budget(536870912, allow=save_matmul_outputs)

    References:
        Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4.3,
        https://arxiv.org/abs/1604.06174; Jain et al., "Checkmate", 2020,
        https://arxiv.org/abs/1910.02653. torch has `activation_memory_budget` for
        compiled functions, a fraction.
    """
    where = "budget(allow=...)"
    if isinstance(allow, WholeProgram):
        raise PolicyError.of(
            where=where,
            what=f"got {allow!r}.",
            why="It decides over the whole program, not value by value.",
            do="Pass a policy that decides about single values.",
        )
    permitted = None if allow is None else as_policy(allow, where)
    return as_budget(_budget_of_sizes(size, permitted, peak), None, where, costs)


def as_budget(budget: Any, peak: Any, where: str, costs: str = "flops") -> Budget:
    """Makes a budget of what a user passed as one: sizes, or what `budget` returned.

    Where either the budget or `costs` says "measured", it counts.
    """
    require_choice("costs", costs, _COSTS, of=where.partition("(")[0])
    if costs != "flops":
        return replace(as_budget(budget, peak, where), costs=costs)
    if isinstance(budget, Budget):
        return budget if peak is None else replace(budget, peak=_checked_peak(peak))
    if isinstance(budget, AbstractPolicy):
        raise PolicyError.of(
            where=where,
            what=f"got the policy {budget!r}.",
            why="A plan is made for a number of bytes.",
            do="Pass `policies.budget(size, allow=policy)`.",
        )
    return _budget_of_sizes(budget, None, peak)


def _budget_of_sizes(size: Any, allow: AbstractPolicy | None, peak: Any) -> Budget:
    if size is None and peak is None:
        raise PolicyError.of(
            where="budget(size, peak=...)",
            what="got no size and no peak.",
            why="A budget is a bound of what is held, or of the most that lives at once.",
            do='Pass a size such as "512MiB", or peak="8GB".',
        )
    # What is free bounds the peak.
    if peak is None and _is_free_memory(size):
        return Budget(None, allow, _checked_peak(size))
    size = None if size is None else parse_budget(size, "budget(size)")
    return Budget(size, allow, None if peak is None else _checked_peak(peak))


def _checked_peak(peak: Any) -> Size:
    if _is_free_memory(peak):
        return cast("Size", peak)
    return parse_budget(peak, "budget(peak=...)")


def _is_free_memory(size: Any) -> bool:
    """Whether it is "auto", or tells the free bytes of a device, as no policy does."""
    if isinstance(size, str):
        return size == "auto"
    return callable(size) and not isinstance(size, (type, AbstractPolicy))


@final
@dataclass(frozen=True, slots=True, repr=False)
class Planned(WholeProgram):
    """Saves certain values of one program; `plan(...)` makes it, as `Plan.policy`.

    Values are identified by their position in the program, not by name. So the policy
    is valid for the planned program only, and refuses others. Functions that a
    transform derives from the planned one (its tangents, or the mapped function if
    reverse mode is taken of that) are planned again, within the same bytes.

    Args:
        fingerprint: of the forward that was planned.
        saved: the place in the forward of each saved value, and how it waits.
        budget_bytes: the most that the plan may hold.
        inputs: what the planned program takes. If they are given, another program is planned
            again within the same bytes, with a warning that says what it takes instead.

    Example:
        >>> import torch
        >>> from remat import plan
        >>> def square_of_sine(x):
        ...     return x.sin().square().sum()
        >>> policy = plan(square_of_sine, budget=64)(torch.ones(4)).policy
        >>> policy.saved
        ((0, Keep()),)
    """

    fingerprint: str
    saved: tuple[tuple[int, AbstractStorage], ...]
    budget_bytes: int
    inputs: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """That a plan chose it: the policy's repr is as long as the program."""
        return "chosen by a plan"

    def decide_all(self, values: AnyValues) -> dict[int, Save]:
        """What was planned, if it was planned for this program."""
        return values.replayed(self)

    def __repr__(self) -> str:
        saved, budget = f"saved={self.saved!r}", f"budget_bytes={self.budget_bytes}"
        inputs = f", inputs={self.inputs!r}" if self.inputs else ""
        return f"Planned({self.fingerprint!r}, {saved}, {budget}{inputs})"


def planning_again(policy: AbstractPolicy, inputs: tuple[str, ...]) -> AbstractPolicy:
    """A plan's policy that plans again for other inputs than these."""
    assert isinstance(policy, Planned), "a plan has been made"
    return replace(policy, inputs=inputs)


def for_derived(policy: AbstractPolicy) -> AbstractPolicy:
    """The policy, in place of a plan's, for what is derived from a function under a transform."""
    return Budget(policy.budget_bytes) if isinstance(policy, Planned) else policy
