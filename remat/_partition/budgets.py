"""A joint graph and a budget -> which of its values are saved, and how.

The joint graph becomes a `planners.Problem`, which knows no tensors: the steps that a
backward with nothing saved would run, and the values that may be saved in their place.
Its answer becomes decisions, as any policy gives them, so that what is held is what the
partition cuts there, and can be counted.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import final

import torch

from remat._errors import BudgetError
from remat._graph.flops import step_flops
from remat._graph.meta import TensorMeta, metas_in
from remat._partition import free_memory
from remat._partition.analysis import Analysis, Decisions, bytes_of
from remat._partition.costs import (
    Costs,
    Workspace,
    costs_of,
    is_free,
    known_workspace,
    workspace_of,
)
from remat._partition.cut import Cut, cut, permitted_members, product_of, starts
from remat._partition.peak import Peaks, peaks_of
from remat.planners import Option, Problem, Solution, Step, solve_cut
from remat.policies import Budget, Save, Value
from remat.policies._budget import Size
from remat.storage import AbstractStorage
from remat.storage._contract import held_in

_RESERVE = Fraction(1, 10)

Solver = Callable[[Problem, int, str], Solution]


@final
@dataclasses.dataclass(frozen=True)
class Item:
    """A value that may be saved."""

    number: int  # its class
    storages: tuple[AbstractStorage, ...]  # a way to wait for each option


@final
@dataclasses.dataclass(frozen=True)
class Model:
    """A joint graph as a planner sees it."""

    analysis: Analysis  # the joint graph
    items: tuple[Item, ...]  # those of the problem, in order
    problem: Problem  # what a planner solves
    costs: Costs  # what a step is counted as
    workspace: Workspace = known_workspace  # what kernels hold inside

    def decisions(self, choice: Sequence[int | None]) -> Decisions:
        """A planner's choice as a policy's answers."""
        return {
            item.number: Save(item.storages[option])
            for item, option in zip(self.items, choice, strict=True)
            if option is not None
        }

    def cut(self, choice: Sequence[int | None]) -> Cut:
        """Where forward and backward part under a choice."""
        members = permitted_members(self.analysis, self.decisions(choice))
        return cut(self.analysis, members, self.analysis.joint.gradients)

    def recompute_flops(self, choice: Sequence[int | None]) -> int:
        """FLOPs, by torch's formulas, of the forward steps that the backward runs."""
        graph = self.analysis.joint.graph
        return sum(
            step_flops(graph, graph.values[index])
            for index in self.cut(choice).steps
            if is_recomputed(self.analysis, index)
        )

    @functools.cached_property
    def peaks(self) -> Callable[[tuple[int | None, ...]], Peaks]:
        """From a choice to the most that lives at one time in the forward, and the backward."""
        return functools.cache(self._peaks)  # many budgets come to one choice

    def _peaks(self, choice: tuple[int | None, ...]) -> Peaks:
        outcome = self.problem.outcome(choice)
        taken = [
            (item, options[option])
            for item, options, option in zip(
                self.items, self.problem.items, outcome.choice, strict=True
            )
            if option is not None
        ]
        # What a storage has changed, and so has a cost.
        changed = [(item, option.size_bytes) for item, option in taken if option.cost]
        views = self.analysis.views
        return peaks_of(
            self.analysis.joint,
            self.cut(choice),
            outcome.saved_bytes,
            sum(size for _, size in changed),
            sum(views[item.number].size_bytes for item, _ in changed),
            self.workspace,
        )


def model_for(analysis: Analysis, budget: Budget) -> Model:
    """The planner's problem, with the ways to wait and the costs of a budget."""
    values = analysis.joint.graph.values[: analysis.joint.num_operands]
    metas = itertools.chain.from_iterable(metas_in(value.meta) for value in values)
    model = model_of(analysis, budget.storages, costs_of(budget.costs, metas))
    return dataclasses.replace(model, workspace=workspace_of(budget.costs))


def model_without_remat(analysis: Analysis, budget: Budget) -> Model:
    """The same where all may be saved as it is, whatever the budget allows."""
    return model_for(analysis, dataclasses.replace(budget, allow=None))


def is_recomputed(analysis: Analysis, index: int) -> bool:
    """For what a budget counts: whether a backward makes a value that the forward had made."""
    value = analysis.joint.graph.values[index]
    return not is_free(value) and analysis.numbers[index] in analysis.members


def model_of(
    analysis: Analysis,
    storages: Callable[[Value], tuple[AbstractStorage, ...]],
    costs: Costs,
) -> Model:
    """The planner's problem of a joint graph; `storages` are the ways a value may wait."""
    joint, graph = analysis.joint, analysis.joint.graph
    whole = cut(analysis, frozenset(), joint.gradients).steps
    members = _members_without_budget(analysis)
    certain = set(cut(analysis, members, joint.gradients).steps)
    steps = [index for index in whole if index not in certain]
    place = {index: k for k, index in enumerate(steps)}

    def cost(index: int) -> int:
        return costs(graph, index) if is_recomputed(analysis, index) else 0

    wanted = starts(analysis, joint.gradients)
    wanted += [use for index in sorted(certain) for use in analysis.uses[index]]
    # The saved value that can replace each step.
    saved_as = {index: analysis.members.get(analysis.numbers[index]) for index in steps}
    own = {each for each in members if analysis.roots[each] == each}
    # The last view of matmul is saved instead of the product.
    waiting = {product_of(graph.values, each): each for each in sorted(members)}
    items: list[Item] = []
    options: list[tuple[Option, ...]] = []
    item_of: dict[int | None, int] = {}
    for member in dict.fromkeys(saved_as.values()):
        if member is None or member not in own:
            continue
        number, meta = analysis.numbers[member], graph.values[waiting[member]].meta
        assert isinstance(meta, TensorMeta)
        item = Item(number, storages(analysis.views[number]))
        held = [held_in(storage, meta) for storage in item.storages]
        if held:
            item_of[member] = len(items)
            items.append(item)
            options.append(
                tuple(Option(each.size_bytes, 2 * each.moved_bytes) for each in held)
            )
    problem = Problem(
        steps=tuple(
            Step(
                cost(index),
                tuple(place[use] for use in analysis.uses[index] if use in place),
                item_of.get(saved_as[index]),
            )
            for index in steps
        ),
        wanted=tuple(dict.fromkeys(place[use] for use in wanted if use in place)),
        items=tuple(options),
        fixed_bytes=fixed_bytes(analysis),
        base_cost=sum(map(cost, certain)),
    )
    return Model(analysis, tuple(items), problem, costs)


def _members_without_budget(analysis: Analysis) -> frozenset[int]:
    return permitted_members(analysis, dict.fromkeys(analysis.views, Save()))


def fixed_bytes(analysis: Analysis) -> int:
    """Bytes that any budget holds: generator states and copies of what a call writes to."""
    joint = analysis.joint
    states = [state.index for state in joint.states]
    return bytes_of(joint.graph, [*states, *joint.written])


def no_remat_bytes(analysis: Analysis) -> int:
    """Bytes of intermediate values that are saved where all may be, for their sizes alone, too."""
    graph = analysis.joint.graph
    whole = cut(analysis, _members_without_budget(analysis), analysis.joint.gradients)
    sized = {analysis.roots[k] for each in whole.sized.values() for k in each}
    return bytes_of(graph, {*whole.saved, *sized.intersection(analysis.forward)})


def solve(
    model: Model, budget: Budget, solver: Solver = solve_cut
) -> tuple[int, Solution]:
    """The bytes that a budget means for a program, and what is saved within them.

    Raises:
        BudgetError: nothing fits; the message says what would.
    """
    size = budget.size
    if isinstance(size, float):
        size = int(size * no_remat_bytes(model.analysis))
    if size is None or budget.peak is not None:
        return _solve_for_peak(model, size, budget, solver)
    return size, solver(model.problem, size, repr(budget))


def _solve_for_peak(
    model: Model, most: int | None, budget: Budget, solver: Solver
) -> tuple[int, Solution]:
    """Saves as much as leaves the predicted peak within a number, or within what is free."""
    assert budget.peak is not None, "a budget without a peak has a size"
    where, device = repr(budget), _device_of_budget(model.analysis)

    def peak_without_remat() -> int:
        plain = model_without_remat(model.analysis, budget)
        return plain.peaks(plain.problem.everything).of_step

    limit, free = peak_limit(budget.peak, device, peak_without_remat)
    sizes = [each for each in model.problem.budgets if most is None or each <= most]
    peaks: dict[int, int] = {}
    # The peak does not always grow with what is saved: recomputation takes room, too.
    for size in reversed(sizes if most is None else [*sizes, most]):
        solution = solver(model.problem, size, where)
        least = model.peaks(solution.choice).of_step
        if least <= limit:
            return size, solution
        peaks.setdefault(least, solution.saved_bytes)
    raise _peak_not_met(where, limit, peaks, None if free is None else (free, device))


def peak_limit(
    peak: Size, device: torch.device, without_remat: Callable[[], int]
) -> tuple[int, int | None]:
    """What a predicted peak may be, and what is free: of that a tenth stays in reserve."""
    if isinstance(peak, int):
        return peak, None
    if isinstance(peak, float):
        return int(peak * without_remat()), None
    memory = free_memory.free_bytes if isinstance(peak, str) else peak
    free = memory(device)
    return int(free * (1 - _RESERVE)), free


def _peak_not_met(
    where: str,
    limit: int,
    peaks: dict[int, int],
    memory: tuple[int, torch.device] | None,
) -> BudgetError:
    """The error where each predicted peak, here with what is saved for it, is above a limit."""
    least = min(peaks)
    what = f"no plan stays within {limit} bytes at its peak."
    why, do = "", f"Pass peak={least}, the least that suffices"
    if memory is not None:
        free, device = memory
        what = f"no plan fits the {free} bytes that are free on {device}."
        why = "A tenth is kept in reserve. "
        do = f"Free {-(-least // (1 - _RESERVE))} bytes, the least that suffices"
    return BudgetError.of(
        where=where,
        what=what,
        why=f"{why}The lowest predicted peak is {least} bytes, of a plan that saves "
        f"{peaks[least]}; what is recomputed, gradients and outputs take room, too.",
        do=f"{do}, or put regions into the function, around parts that then recompute less "
        "at once.",
    )


def _device_of_budget(analysis: Analysis) -> torch.device:
    metas = [value.meta for value in analysis.joint.graph.values]
    devices = [meta.device for meta in metas if isinstance(meta, TensorMeta)]
    others = [each for each in devices if each.type != "cpu"]
    return next(iter([*others, *devices, torch.device("cpu")]))
