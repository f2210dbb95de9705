"""Splits one budget among the blocks of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, final

import torch
from torch import nn

from remat._api import remat
from remat._errors import BudgetError, refusal
from remat._generators import device_states
from remat._graph.meta import TensorMeta
from remat._partition.budgets import peak_limit
from remat._plans.plan import Plan, plan as plan_of
from remat._plans.shares import Shares
from remat._torch import fakes, trees
from remat.modules._apply import Where, apply, matching, remove
from remat.policies import AbstractPolicy, Budget
from remat.policies._budget import Peak, Size, as_budget
from remat.policies._planned import planning_again
from remat.policies._sizes import show_size


@final
@dataclasses.dataclass(frozen=True)
class ModulePlanRow:
    """The share of one block of a model.

    Attributes:
        name: its qualified name.
        plan: what it saves, and what that costs.
        input_bytes: what its inputs hold, those of blocks before it and parameters aside.
        gradient_bytes: what the gradients of its parameters take.
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
        rows: the blocks, in the model's order.
        budget_bytes: the most that all blocks may hold together.
    """

    rows: tuple[ModulePlanRow, ...]
    budget_bytes: int

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
        """The most that blocks hold and make in a step, the gradients of parameters included.

        What is around the blocks (the logits, say) is not counted, nor are parameters.
        """
        held = peak = 0
        gradients = sum(row.gradient_bytes for row in self.rows)
        for row in self.rows:
            gradients -= row.gradient_bytes
            held += row.input_bytes
            peak = max(peak, held + row.plan.predicted_peak_bytes + gradients)
            held += row.plan.saved_bytes
        return peak

    @property
    def recompute_flops(self) -> int:
        """FLOPs that one backward runs again, by torch's formulas."""
        return sum(row.plan.recompute_flops for row in self.rows)

    def __str__(self) -> str:
        """A line for each block, and the totals."""
        lines = [
            f"{row.name}: saves {show_size(row.plan.saved_bytes)} "
            f"({', '.join(_saved_in_block(row.plan)) or 'nothing'}), recomputes "
            f"{row.plan.recompute_flops:.3g} FLOPs"
            for row in self.rows
        ]
        saved = f"{show_size(self.saved_bytes)} of {show_size(self.budget_bytes)}"
        held = f"{show_size(self.held_bytes)} with the inputs of blocks"
        peak = f"predicted peak {show_size(self.predicted_peak_bytes)}"
        total = f"all: {saved}, {self.recompute_flops:.3g} FLOPs"
        return "\n".join([*lines, total, f"held: {held}, {peak}"])


def _saved_in_block(found: Plan) -> list[str]:
    """What the plan of a block saves: names, or operators."""
    saved = [row.name or row.op for row in found.rows if row.storage is not None]
    counts = Counter(saved).items()
    return [what if count == 1 else f"{count} x {what}" for what, count in counts]


@final
@dataclasses.dataclass(frozen=True)
class _BlockCall:
    """A block and the arguments of its call."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def plan(self, budget: int | float) -> Plan:
        region = remat(self.module.forward, rng="preserve")
        return plan_of(region, budget=budget)(*self.args, **self.kwargs)

    def policy(self, found: Plan) -> AbstractPolicy:
        """Its plan as a policy that plans again for other arguments."""
        region = remat(self.module.forward, rng="preserve")
        operands = region.entry_of(self.args, self.kwargs)[0].region.operands
        return planning_again(found.policy, tuple(map(str, operands)))


def plan(
    model: nn.Module,
    *,
    budget: Size | None = None,
    peak: Peak | None = None,
    where: Where | None = None,
) -> Callable[..., ModulePlan]:
    """Makes the blocks of a model recompute within one budget for the model, in place.

    The model is called once, to see the inputs of each block, with stand-ins for the
    blocks, which compute nothing; a model on the meta device is called on fake tensors. No
    parameter, buffer or generator changes. Then each block's frontier of bytes and
    cost is computed (once for equal blocks), and the budget is split so that the total
    recomputation is least. If equal blocks get unequal shares, the later ones get more.

    Laws: what all blocks together hold from forward to backward, without their inputs,
    stays within the budget; a larger budget never costs more. A block that is later called
    otherwise (with a mask, say) is planned again within its share, with a warning.

    Args:
        model: the model; regions that `apply` put in its blocks are replaced.
        budget: the most that the blocks save in one call of the model, as
            `policies.budget` takes it; a float in (0, 1] is a fraction of what the blocks
            hold without remat. None means as much as `peak` lets.
        peak: the most that the blocks may hold and make at once in a step, with their inputs
            and the gradients of their parameters: `predicted_peak_bytes`. As
            `policies.budget` takes it.
        where: the blocks, as `apply` takes them; they must not nest. None means the
            children of the `nn.ModuleList` or `nn.Sequential` with the most parameters.

    Returns:
        A callable that takes the arguments of a call of the model, and returns what was
        chosen.

    Raises:
        ValueError: there are no blocks, they nest, a call of the model does not reach them
            exactly once each, or `budget` is not a size.
        PolicyError: `budget` or `peak` is not a size, or there is neither.
        BudgetError: the blocks hold more even if they save nothing, or the peak is lower than
            any that was found.

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
    bound = as_budget(budget, peak, "modules.plan(budget=...)")

    def planned(*args: Any, **kwargs: Any) -> ModulePlan:
        for _, module in (named := _blocks(model, where)):
            remove(module)
        calls = _called(model, named, args, kwargs)
        chosen = _within(calls, bound)
        policies = [
            call.policy(row.plan) for call, row in zip(calls, chosen.rows, strict=True)
        ]
        for (wanted, _), policy in zip(named, policies, strict=True):
            apply(model, lambda name, _, wanted=wanted: name == wanted, policy=policy)
        return chosen

    return planned


def _within(blocks: Sequence[_BlockCall], bound: Budget) -> ModulePlan:
    """Gives each block its share of the largest budget that is within the bounds."""
    shares = Shares([each.plan for each in blocks], "modules.plan(budget=...)")
    most = bound.size
    size = int(most * shares.most_bytes) if isinstance(most, float) else most
    if bound.peak is None:
        assert size is not None, "a budget without a peak has a size"
        return _applied_to(blocks, shares.split(size), size)
    tensors = trees.tensor_leaves([(each.args, each.kwargs) for each in blocks])
    device = tensors[0].device if tensors else torch.device("cpu")
    limit, _ = peak_limit(bound.peak, device)
    peaks: list[int] = []
    for total, plans in shares.descending(size):
        found = _applied_to(blocks, plans, total)
        if found.predicted_peak_bytes <= limit:
            return found
        peaks.append(found.predicted_peak_bytes)
    raise refusal(
        BudgetError,
        where="modules.plan(peak=...)",
        what=f"no plan that was tried stays within {limit} bytes at its peak.",
        why=f"The lowest predicted peak of the blocks is {min(peaks)} bytes: their inputs, "
        "what one of them recomputes, and gradients need room, too.",
        do=f"Pass peak={min(peaks)}, or name smaller blocks by `where`.",
    )


def _applied_to(
    blocks: Sequence[_BlockCall], plans: Sequence[Plan], total: int
) -> ModulePlan:
    rows = tuple(_row_of(blocks, place, found) for place, found in enumerate(plans))
    return ModulePlan(rows, total)


def _row_of(blocks: Sequence[_BlockCall], place: int, found: Plan) -> ModulePlanRow:
    block = blocks[place]
    parameters = [each for each in block.module.parameters() if each.requires_grad]
    known = set(map(id, parameters))
    for earlier in blocks[:place]:
        known |= set(map(id, trees.tensor_leaves((earlier.args, earlier.kwargs))))
    inputs = trees.tensor_leaves((block.args, block.kwargs))
    new = {id(each): each for each in inputs if id(each) not in known}
    return ModulePlanRow(
        block.name,
        found,
        sum(TensorMeta.of(each).once.size_bytes for each in new.values()),
        sum(TensorMeta.of(each).size_bytes for each in parameters),
    )


@contextlib.contextmanager
def _called_instead(module: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    own = module.__dict__
    before = {key: own[key] for key in ("forward",) if key in own}
    own["forward"] = forward
    try:
        yield
    finally:
        del own["forward"]
        own.update(before)


def _blocks(model: nn.Module, where: Where | None) -> list[tuple[str, nn.Module]]:
    found = _largest_stack(model) if where is None else matching(model, where)
    names = [name for name, _ in found]
    nested = [
        (outer, inner)
        for outer in names
        for inner in names
        if inner != outer and (not outer or inner.startswith(f"{outer}."))
    ]
    if found and not nested:
        return found
    outer, inner = nested[0] if nested else ("", "")
    what = f"`{inner}` is a part of `{outer}`." if nested else "found no blocks."
    raise refusal(
        ValueError,
        where=f"modules.plan(where={where!r})",
        what=what,
        why="A budget is split among blocks that do not contain each other.",
        do='Name the blocks, as in where="layers.*".',
    )


def _largest_stack(model: nn.Module) -> list[tuple[str, nn.Module]]:
    stacks = [
        each
        for each in matching(model, (nn.ModuleList, nn.Sequential))
        if len(list(each[1].children())) > 1
    ]
    if not stacks:
        return []
    name, stack = max(
        stacks, key=lambda each: sum(p.numel() for p in each[1].parameters())
    )
    prefix = f"{name}." if name else ""
    return [(f"{prefix}{key}", child) for key, child in stack.named_children()]


def _called(
    model: nn.Module,
    named: Sequence[tuple[str, nn.Module]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[_BlockCall]:
    """The blocks with their arguments in one call of the model.

    What is around the blocks runs, so that it decides as at run time (whether a mask is
    passed, say); in the place of a block stands what gives zeros. A model without data runs
    on fake tensors.
    """
    calls: dict[str, list[_BlockCall]] = {name: [] for name, _ in named}
    given = trees.tensor_leaves((args, kwargs))
    tensors = [*model.parameters(), *model.buffers(), *given]
    has_data = not any(each.is_meta or fakes.is_fake(each) for each in tensors)

    def stand_in(
        name: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any
    ) -> Any:
        calls[name].append(_BlockCall(name, module, args, kwargs))
        if has_data:
            return fakes.zeros_like_results(forward, args, kwargs)
        return forward(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name, module in named:
            instead = functools.partial(stand_in, name, module, module.forward)
            stack.enter_context(_called_instead(module, instead))
        if has_data:
            devices = {each.device for each in tensors}
            stack.enter_context(device_states.put_back(devices))
            copies = {name: each.clone() for name, each in model.named_buffers()}
            torch.func.functional_call(model, copies, args, kwargs)
        else:
            fakes.call_on_fakes(model, args, kwargs)
    for name, found in calls.items():
        if len(found) != 1:
            raise refusal(
                ValueError,
                where=f"modules.plan: the block `{name}`",
                what=f"was called {len(found)} times in one call of the model.",
                why="A block's share of the budget is for one call.",
                do="Name blocks that are called once, or use modules.apply.",
            )
    return [each for found in calls.values() for each in found]
