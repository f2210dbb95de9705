"""Splits one budget among the blocks of a model."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, final

from torch import nn

from remat._errors import BudgetError, require_type
from remat._graph.meta import TensorMeta
from remat._plans.plan import Plan
from remat._plans.recording import Recording
from remat._plans.shares import Loads, Search, Shares, limit_of, show_gap
from remat._plans.tiles import TilesRow, run_in, with_tiles
from remat._plans.timeline import Timeline, loads_of, over_the_limit, timeline
from remat._torch import trees
from remat._torch.tensors import memory_of
from remat.modules._apply import Where, apply, without_regions
from remat.modules._blocks import BlockCall, blocks_of, calls_of_blocks
from remat.modules._step import Step
from remat.policies import AbstractPolicy, Budget
from remat.policies._budget import Size, as_budget
from remat.policies._sizes import show_size


@final
@dataclasses.dataclass(frozen=True)
class ModulePlanRow:
    """The share of one call of a block.

    Attributes:
        name: the block's qualified name.
        plan: what the call saves, and what that costs.
        input_bytes: what its inputs hold, those of calls before it and parameters aside:
            of a slice all of the memory, of several views of one memory once.
        gradient_bytes: what the gradients of the block's parameters take, which its last
            call makes first.
    """

    name: str
    plan: Plan
    input_bytes: int
    gradient_bytes: int


@final
@dataclasses.dataclass(frozen=True)
class ModulePlan:
    """What `modules.plan` chose and applied to the model.

    Laws: `saved_bytes <= budget_bytes`.

    Attributes:
        rows: the calls of blocks, in order.
        budget_bytes: the most that all blocks may hold together.
        timeline: what lives in the whole step, where `step` was given.
        beside: the points beside this one, which recompute less and more, where there was
            a limit of the peak.
        tiles: the functions that run in more tiles than before, likewise.
        gap: the fraction of what is recomputed, in the unit of `costs`, by which the best of
            the budgets that the blocks may have in these tiles could be cheaper, likewise.
    """

    rows: tuple[ModulePlanRow, ...]
    budget_bytes: int
    timeline: Timeline | None = None
    beside: str = ""
    tiles: tuple[TilesRow, ...] = ()
    gap: float | None = None

    @property
    def saved_bytes(self) -> int:
        """What one call of the model holds by the plan, without inputs of blocks."""
        return sum(row.plan.saved_bytes for row in self.rows)

    @property
    def held_bytes(self) -> int:
        """What the blocks hold in all from forward to backward: with their inputs."""
        return self.saved_bytes + sum(row.input_bytes for row in self.rows)

    @property
    def predicted_peak_bytes(self) -> int:
        """The most that lives at once in a step, all of it where `step` was given.

        Else what blocks hold and make, the gradients of parameters included: what is around
        the blocks (the logits, say) is not counted, nor are parameters.
        """
        if self.timeline is not None:
            return self.timeline.peak.size_bytes
        return _loads_of(self.rows).peak([row.plan for row in self.rows])

    @property
    def recompute_flops(self) -> int:
        """FLOPs that one backward runs again, by torch's formulas."""
        return sum(row.plan.recompute_flops for row in self.rows)

    def __str__(self) -> str:
        """A line for each block and each number of tiles, and the totals."""
        lines = [
            f"{row.name}: saves {show_size(row.plan.saved_bytes)} "
            f"({_saved_in_block(row.plan)}), recomputes "
            f"{row.plan.recompute_flops:.3g} FLOPs"
            for row in self.rows
        ]
        saved = f"{show_size(self.saved_bytes)} of {show_size(self.budget_bytes)}"
        held = f"{show_size(self.held_bytes)} with the inputs of blocks"
        peak = f"predicted peak {show_size(self.predicted_peak_bytes)}"
        total = f"all: {saved}, {self.recompute_flops:.3g} FLOPs"
        lines += [*map(str, self.tiles), total, f"held: {held}, {peak}"]
        moments = [] if self.timeline is None else [str(self.timeline)]
        gap = "" if self.gap is None else show_gap(self.gap)
        return "\n".join([*lines, *moments, *filter(None, [gap, self.beside])])


def _saved_in_block(found: Plan) -> str:
    """What the plan of a block saves: names, or operators."""
    saved = Counter(row.name or row.op for row in found.rows if row.storage is not None)
    shown = [what if n == 1 else f"{n} x {what}" for what, n in saved.items()]
    return ", ".join(shown) or "nothing"


def plan(
    model: nn.Module,
    *,
    budget: Size | AbstractPolicy | None = None,
    peak: Size | None = None,
    where: Where | None = None,
    step: Step | None = None,
    costs: str = "flops",
) -> Callable[..., ModulePlan]:
    """Makes the blocks of a model recompute within one budget for the model, in place.

    The model is called once, to see the inputs of each block, with stand-ins for the
    blocks, which compute nothing; a model on the meta device is called on fake tensors.
    No parameter, buffer or generator changes. Then each block's frontier of bytes and
    cost is computed (once for equal blocks), and the budget is split so that the total
    recomputation is least. Within a `peak`, functions of `layers.tiled` get more tiles
    where these let it fit, or clearly less be recomputed. If equal blocks get unequal
    shares, the later ones get more. Each call of a block that is called several times
    has an equal share.

    Laws: what all blocks together hold from forward to backward, without their inputs,
    stays within the budget; a larger budget never costs more. A block that is later called
    otherwise (with a mask, say) is planned again within its share, with a warning.

    Args:
        model: the model; regions that `apply` put in its blocks are replaced.
        budget: the most that the blocks save in one call of the model, as
            `policies.budget` takes it, or such a policy, with its `allow`; a float in (0, 1]
            is a fraction of what the blocks hold without remat. None means as much as `peak`
            lets.
        peak: the most that the blocks may hold and make at once in a step, with their inputs
            and the gradients of their parameters: `predicted_peak_bytes`. As
            `policies.budget` takes it.
        step: the rest of the training step. `peak` then bounds all that lives in it:
            parameters, their gradients, the optimizer's state and step, buffers, the
            arguments, blocks, and what runs around them, the loss above all. It is counted
            on tensors without data, by torch's own autograd.
        where: the blocks, as `apply` takes them; they must not nest. None means the
            children of the `nn.ModuleList` or `nn.Sequential` with the most parameters.
        costs: what as little as possible is recomputed of, as `policies.budget` takes it.

    Returns:
        A callable that takes the arguments of a call of the model, and returns what was
        chosen.

    Raises:
        ValueError: there are no blocks, they nest, a call of the model does not reach one of
            them, or `budget` is not a size.
        PolicyError: `budget` or `peak` is not a size, or there is neither.
        BudgetError: the blocks hold more even if they save nothing, or the peak is lower than
            any that was found; of a step, the message says which single change would help most.
        TraceError: the step needs numbers around its blocks, or takes a gradient of them
            with `create_graph=True`; or the model calls a block inside a region, a stack, a
            drop-in checkpoint, torch.cond or a transform of torch.func, or differentiates it.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from remat import modules
        >>> layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(4)]
        >>> model = nn.Sequential(*layers)
        >>> chosen = modules.plan(model, budget=0.5)(torch.ones(3, 1, 8))
        >>> chosen.saved_bytes <= chosen.budget_bytes, [row.name for row in chosen.rows]
        (True, ['0', '1', '2', '3'])
        >>> _ = modules.remove(model)

    References:
        Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019,
        https://arxiv.org/abs/1911.13214, decides for chains by whole blocks; here each
        block decides by values.
    """
    wanted = "modules.Step(loss, optimizer)"
    require_type("modules.plan(step=...)", step, (Step, NoneType), wanted=wanted)
    bound = as_budget(budget, peak, "modules.plan(budget=...)", costs)

    def planned(*args: Any, **kwargs: Any) -> ModulePlan:
        named = blocks_of(model, where)

        def attempt(is_rough: bool, limit: int | None) -> _Attempt:
            calls = calls_of_blocks(model, named, args, kwargs)
            recording = step and step.recorded(model, calls, args, kwargs, bound.costs)
            search, chosen = _search(calls, bound, limit, recording, is_rough)
            return search, (calls, chosen)

        with without_regions(module for _, module in named):
            (search, (calls, chosen)), tiles = (
                (attempt(False, None), ())
                if bound.peak is None
                else with_tiles(attempt)
            )
            if not search.fits:
                raise _over(search.limit, chosen)
            with run_in(tiles):
                _apply_plans(model, calls, chosen, bound)
            for row in tiles:
                row.apply()
        return dataclasses.replace(chosen, tiles=tiles)

    return planned


_Attempt = tuple[Search, tuple[list[BlockCall], ModulePlan]]
"""A search, the calls of blocks, and their plans."""


def _apply_plans(
    model: nn.Module, calls: Sequence[BlockCall], chosen: ModulePlan, bound: Budget
) -> None:
    """Makes each block recompute by its plan, or within its share where its calls differ."""
    for block in dict.fromkeys(call.name for call in calls):
        places = [k for k, call in enumerate(calls) if call.name == block]
        plans = [chosen.rows[k].plan for k in places]
        policy = calls[places[0]].policy(plans[0])
        if any(each.policy != plans[0].policy for each in plans):
            size = plans[0].budget_bytes
            policy = dataclasses.replace(bound, size=size, peak=None)
        apply(model, lambda name, _, block=block: name == block, policy=policy)


def _search(
    blocks: Sequence[BlockCall],
    bound: Budget,
    limit: int | None,
    recording: Recording | None,
    is_rough: bool,
) -> tuple[Search, ModulePlan]:
    """Gives each block its share, so that all are within the bounds; a limit is known, or found."""
    where = "modules.plan(budget=...)"
    regions = [each.name for each in blocks]
    planners = [each.planner(bound) for each in blocks]
    shares = Shares(planners, regions, where, is_rough=is_rough)

    def planned(plans: Sequence[Plan], total: int) -> ModulePlan:
        rows = tuple(_row_of(blocks, place, found) for place, found in enumerate(plans))
        names = [each.name for each in rows]
        moments = None if recording is None else timeline(recording, names, plans)
        return ModulePlan(rows, total, moments)

    size = bound.size
    if isinstance(size, float):
        size = int(size * sum(each.saved_bytes for each in shares.without_remat))
    if bound.peak is None:
        assert size is not None, "a budget without a peak has a size"
        plans = shares.split(size)
        return Search(plans, 0, 0), planned(plans, size)
    if recording is None:
        loads, there = _loads_of(planned(shares.whole, 0).rows), 0
    else:
        loads, there = loads_of(recording), recording.parameters + recording.others
    given = trees.tensor_leaves([(each.args, each.kwargs) for each in blocks])
    if limit is None:
        limit = limit_of(bound.peak, shares, loads, given, there)
    search = shares.within(limit, loads, size)
    saved = sum(each.saved_bytes for each in search.found)
    total = saved if size is None else size
    chosen = planned(search.found, total)
    return search, dataclasses.replace(chosen, beside=search.neighbors, gap=search.gap)


def _over(limit: int, chosen: ModulePlan) -> BudgetError:
    if chosen.timeline is not None:
        return over_the_limit(
            "modules.plan(peak=..., step=...)", limit, chosen.timeline
        )
    least = chosen.predicted_peak_bytes
    return BudgetError.of(
        where="modules.plan(peak=...)",
        what=f"no plan that was tried stays within {limit} bytes at its peak.",
        why=f"The lowest predicted peak of the blocks is {least} bytes: their inputs, "
        "what one of them recomputes, and gradients need room, too.",
        do=f"Pass peak={least}, or name smaller blocks by `where`.",
    )


def _loads_of(rows: Sequence[ModulePlanRow]) -> Loads:
    """What blocks hold and make, and the gradients of their parameters, while each runs."""
    held = itertools.accumulate(row.input_bytes for row in rows)
    made = itertools.accumulate(row.gradient_bytes for row in rows)
    gradients = sum(row.gradient_bytes for row in rows)
    fixed = [inputs + gradients - own for inputs, own in zip(held, made, strict=True)]

    def added(place: int, found: Plan) -> list[int]:
        later = [found.saved_bytes] * (len(rows) - place - 1)
        return [*[0] * place, found.predicted_peak_bytes, *later]

    return Loads(fixed, added)


def _row_of(blocks: Sequence[BlockCall], place: int, found: Plan) -> ModulePlanRow:
    block = blocks[place]
    parameters = [each for each in block.module.parameters() if each.requires_grad]
    before = trees.tensor_leaves([(each.args, each.kwargs) for each in blocks[:place]])
    known = memory_of([*parameters, *before])
    inputs = memory_of(trees.tensor_leaves((block.args, block.kwargs)))
    is_last = all(each.name != block.name for each in blocks[place + 1 :])
    held = sum(size for key, size in inputs.items() if key not in known)
    gradients = sum(TensorMeta.of(each).size_bytes for each in parameters) * is_last
    return ModulePlanRow(block.name, found, held, gradients)
