"""The policy of a plan: a decision for each value of one program."""

from dataclasses import dataclass, replace
from typing import final

from remat.policies._budget import Budget
from remat.policies._contract import AbstractPolicy, AnyValues, Save, WholeProgram
from remat.storage import AbstractStorage


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
