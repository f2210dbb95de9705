"""Which values may be saved, and how: one answer for policies, plans and budgets."""

import dataclasses
import hashlib
from collections import Counter
from typing import Any, final

import torch

from remat import policies
from remat._errors import PolicyError
from remat._graph import operators
from remat._graph.meta import Meta, TensorMeta
from remat._graph.values import Ref
from remat._partition.analysis import Analysis, Decisions
from remat._partition.budgets import fixed_bytes, model_for, solve
from remat._user_lines import warn_once
from remat.policies import AbstractPolicy, Budget, Planned, Save
from remat.policies._sizes import show_size


def decide(analysis: Analysis, policy: AbstractPolicy) -> Decisions:
    """The classes that a policy lets be saved, and how; it may refuse the program."""
    return policy.decide_all(_ProgramValues(analysis))


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


@final
@dataclasses.dataclass(frozen=True)
class _ProgramValues:
    """The values of a program, for policies of any kind to decide about."""

    analysis: Analysis

    def one_by_one(self, policy: AbstractPolicy) -> Decisions:
        """A policy's answers about single values."""
        return _permitted(self.analysis.views, policy)

    def within(self, budget: Budget) -> Decisions:
        """What the default solver chooses."""
        model = model_for(self.analysis, budget)
        return model.decisions(solve(model, budget)[1].choice)

    def replayed(self, plan: Planned) -> Decisions:
        """What was planned, if it was for this program."""
        found = fingerprint(self.analysis)
        if found != plan.fingerprint and plan.inputs:
            _warn_of_new_plan(self.analysis, plan)
            # What is held in any case, a generator's state say, may be more than the share.
            share = max(plan.budget_bytes, fixed_bytes(self.analysis))
            return self.within(Budget(share))
        if found != plan.fingerprint:
            raise PolicyError.of(
                where=f"a plan with the fingerprint {plan.fingerprint}",
                what=f"got a different program, with the fingerprint {found}.",
                why="A plan says for each value of one program whether it is saved. "
                "Other shapes, dtypes or strides, switches such as autocast, and "
                "other tensors that require grad give a different program.",
                do="Plan this call: `plan(fun, budget=...)(*args)`, with arguments "
                "like these.",
            )
        number = {self.analysis.ranks[each]: each for each in self.analysis.views}
        return {number[place]: Save(storage) for place, storage in plan.saved}


def _warn_of_new_plan(analysis: Analysis, plan: Planned) -> None:
    joint = analysis.joint
    operands = joint.graph.values[: joint.num_operands]
    now, then = Counter(str(each.meta) for each in operands), Counter(plan.inputs)
    more, less = (now - then).elements(), (then - now).elements()
    taken = f"takes {', '.join(more) or 'no other'} in place of {', '.join(less) or 'nothing'}"
    how = "runs other operators on the same inputs" if now == then else taken
    warn_once(
        ("another program", plan.fingerprint, plan.inputs),
        where=f"a block with a plan for {show_size(plan.budget_bytes)}",
        what=f"has another program than was planned: it {how}; it is planned again. Others "
        "will be, too, without a word.",
        why="A plan says for each value of one program whether it is saved. Other shapes, "
        "dtypes or strides, masks, train() instead of eval(), and switches such as autocast "
        "give another program.",
        do="Call modules.plan with arguments, modes and switches like these.",
    )


def fingerprint(analysis: Analysis) -> str:
    """A short text that tells programs apart by their forwards; devices do not count.

    So a plan that was made without numbers, on the meta device, holds for every device
    on which the same operators run.
    """
    joint = analysis.joint
    inputs = [*range(joint.num_operands), *analysis.forward]
    number = {index: k for k, index in enumerate(inputs)}
    digest = hashlib.sha256()
    for index in inputs:
        value = joint.graph.values[index]
        line = (
            operators.full_name(value.op),
            _fingerprinted((value.args, value.kwargs), number),
            _fingerprinted_meta(value.meta),
        )
        digest.update(repr(line).encode())
    return digest.hexdigest()[:16]


def _fingerprinted(tree: Any, number: dict[int, int]) -> Any:
    """Literals and places in a form that is the same in every process."""
    match tree:
        case Ref():
            return f"%{number[tree.index]}"
        case tuple() | list():
            return [_fingerprinted(each, number) for each in tree]  # pyright: ignore[reportUnknownVariableType]
        case torch.device() | torch.Generator():
            return type(tree).__name__
        case torch.Tensor():
            return str(TensorMeta.of(tree))
        case _:
            return f"{type(tree).__name__} {tree!r}"


def _fingerprinted_meta(meta: Meta) -> Any:
    if isinstance(meta, TensorMeta):
        return meta.shape, meta.stride, str(meta.dtype)
    return None if meta is None else [_fingerprinted_meta(each) for each in meta]
