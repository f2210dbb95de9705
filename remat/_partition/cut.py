"""Where forward and backward part.

Walk back from the wanted gradients; stop at an operand or at a value that the policy permits;
recompute everything else. What the walk stops at is saved, nothing more (law 2), and the backward
runs only what the walk met (law 3). Views are never saved: the walk goes on to what they view.
"""

import dataclasses
from collections.abc import Sequence
from typing import final

import torch

from remat._graph.values import Ref, Value
from remat._partition.analysis import Analysis, Decisions

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


@final
@dataclasses.dataclass(frozen=True)
class Cut:
    """What is saved between forward and backward, and what the backward runs."""

    saved: tuple[int, ...]  # the forward values that wait, in order
    steps: tuple[int, ...]  # what the backward runs, in order
    #: For a value that the backward would compute, the saved one it equals.
    stand_ins: dict[int, int]
    operands: frozenset[int]  # the operands that the backward reads
    #: For each step that computes what the forward computed, the rank of that value:
    #: recomputation, that of inner regions included.
    repeats: dict[int, int]


def product_of(values: Sequence[Value], member: int) -> int:
    """What a cut saves for a value: of a view of a product the product, else the value itself.

    matmul of more dimensions than two ends with `_unsafe_view`: a view in all but name.
    """
    while values[member].op is _UNSAFE_VIEW:
        member = values[member].args[0].index
    return member


def permitted_members(analysis: Analysis, permitted: Decisions) -> frozenset[int]:
    """The forward values that may be saved, given the permitted classes."""
    values = analysis.joint.graph.values
    found: set[int] = set()
    for member in analysis.members.values():
        root = product_of(values, member)
        is_own = analysis.roots[root] == root
        if is_own and analysis.numbers[root] in permitted:
            found.add(member)
    return frozenset(index for index in found if analysis.is_saveable(index))


def cut(
    analysis: Analysis, members: frozenset[int], wanted: Sequence[Ref | None]
) -> Cut:
    """Walks back from the wanted gradients and stops at `members` (law 2).

    Generator states are not a choice, because a draw without its recorded state cannot be
    repeated. They are operands of the backward, like the inputs.
    """
    joint = analysis.joint
    given = {state.index for state in joint.states}
    stand_ins: dict[int, int] = {}
    steps: set[int] = set()
    operands: set[int] = set()
    seen: set[int] = set()
    pending = starts(analysis, wanted)
    while pending:
        index = pending.pop()
        if index in seen or index in given:
            continue
        seen.add(index)
        member = analysis.members.get(analysis.numbers[index])
        if index < joint.graph.num_inputs:
            operands.update({index} if index < joint.num_operands else ())
        elif member in members:
            assert member is not None
            stand_ins[index] = member
        else:
            steps.add(index)
            pending.extend(analysis.uses[index])
    saved = tuple(sorted(set(stand_ins.values())))
    ranks = analysis.ranks
    repeats = {
        index: ranks[analysis.numbers[index]]
        for index in steps
        if analysis.numbers[index] in ranks
    }
    return Cut(saved, tuple(sorted(steps)), stand_ins, frozenset(operands), repeats)


def starts(analysis: Analysis, wanted: Sequence[Ref | None]) -> list[int]:
    """Where the walk starts: the wanted gradients, and checks that raise."""
    found = [ref.index for ref in wanted if ref is not None]
    return [*found, *analysis.checks] if found else []
