"""What a policy permits: asked of one value after the other."""

from __future__ import annotations

from remat import policies
from remat._partition.analysis import Analysis
from remat.policies import AbstractPolicy, Save

Decisions = dict[int, Save]


def decide(analysis: Analysis, policy: AbstractPolicy) -> Decisions:
    """The classes that a policy permits to be saved, and how."""
    return _permitted(analysis.views, policy)


def decide_of_operands(analysis: Analysis, policy: AbstractPolicy) -> Decisions:
    """How the policy saves named operands, by index; an operand is held in any case."""
    if policy.is_whole:
        return {}
    return _permitted(analysis.named_operands, policy)


def _permitted(
    values: dict[int, policies.Value], policy: AbstractPolicy
) -> dict[int, Save]:
    answers = {key: policies.decide(policy, value) for key, value in values.items()}
    return {key: answer for key, answer in answers.items() if isinstance(answer, Save)}
