"""The blocks of a model: which they are, and how one call of the model calls them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from remat._api import remat
from remat._calls.decorated import DecoratedFunction
from remat._errors import TraceError, refusal
from remat._generators import device_states
from remat._generators.python_and_numpy import drawing_from, states
from remat._plans.plan import Plan, Planner
from remat._torch import dynamo, fakes, levels, tracer, trees
from remat._torch.attributes import attributes_as
from remat._torch.modules import called_with
from remat._tracing.side_effects import undone
from remat._user_lines import line_of, user_line
from remat.modules._apply import Where, matching
from remat.policies import AbstractPolicy, Budget
from remat.policies._budget import planning_again

_OTHERWISE = "Name blocks that have such calls inside, or use modules.apply."


@final
@dataclasses.dataclass(frozen=True)
class BlockCall:
    """A block and the arguments of a call of it."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @functools.cached_property
    def _region(self) -> DecoratedFunction[..., Any]:
        return remat(self.module.forward, rng="preserve")

    def planner(self, bound: Budget) -> Planner:
        """Its plans, within any budget."""
        return Planner(self._region, self.args, self.kwargs, bound)

    def policy(self, found: Plan) -> AbstractPolicy:
        """Its plan as a policy that plans again for other arguments."""
        operands = self._region.entry_of(self.args, self.kwargs)[0].region.operands
        return planning_again(found.policy, tuple(map(str, operands)))


@contextlib.contextmanager
def called_instead(
    model: nn.Module, modules: Iterable[nn.Module], stand_in: Callable[..., Any]
) -> Generator[None]:
    """Inside, a call of a module is `stand_in(module, its forward, *args, **kwargs)`.

    What a run of the model leaves in attributes is undone: tensors in a cache may have no data.
    Python and numpy draw inside what they draw again after it, as runs of a model are to agree.
    """
    with undone((model,)), drawing_from(states()), contextlib.ExitStack() as stack:
        for module in modules:
            instead = functools.partial(stand_in, module, module.forward)
            stack.enter_context(attributes_as(module, forward=instead))
        yield


def blocks_of(model: nn.Module, where: Where | None) -> list[tuple[str, nn.Module]]:
    found = _largest_stack(model) if where is None else matching(model, where)
    names = [name for name, _ in found]
    nested = [
        f"`{inner}` is a part of `{outer}`."
        for outer in names
        for inner in names
        if inner != outer and (not outer or inner.startswith(f"{outer}."))
    ]
    if found and not nested:
        return found
    raise refusal(
        ValueError,
        where=f"modules.plan(where={where!r})",
        what=[*nested, "found no blocks."][0],
        why="A budget is split among blocks that do not contain each other.",
        do='Name the blocks, as in where="layers.*".',
    )


def _largest_stack(model: nn.Module) -> list[tuple[str, nn.Module]]:
    lists = matching(model, (nn.ModuleList, nn.Sequential))
    stacks = [(name, each) for name, each in lists if len([*each.children()]) > 1]
    if not stacks:
        return []
    sizes = [sum(p.numel() for p in each.parameters()) for _, each in stacks]
    name, stack = stacks[sizes.index(max(sizes))]
    prefix = f"{name}." if name else ""
    return [(f"{prefix}{key}", child) for key, child in stack.named_children()]


def _require_plain(call: BlockCall) -> None:
    """Refuses a call inside what is traced or transformed: no stand-in can stand there."""
    if tracer.proxy_is_active():
        raise _inside(
            call.name, "what is traced whole: a region, a stack or a drop-in checkpoint"
        )
    if levels.current_interpreter() is not None:
        raise _inside(call.name, "a transform of torch.func")


def _place_of(name: str) -> str:
    """A block and where it is called; a backward on an accelerator has no line."""
    line, block = user_line(), f"modules.plan: the block `{name}`"
    return f"{block}, at {line}" if line else block


def _inside(name: str, what: str) -> TraceError:
    return TraceError.of(
        where=_place_of(name),
        what=f"is called inside {what}.",
        why="What is around it decides what is recomputed and when, not the block's own plan.",
        do=_OTHERWISE,
    )


@contextlib.contextmanager
def _captured_whole() -> Generator[None]:
    """Refuses calls of blocks inside an operator that takes functions, which Dynamo traces."""
    try:
        yield
    except RuntimeError as error:
        if not dynamo.cannot_follow(error):
            raise
        raise TraceError.of(
            where=f"modules.plan, at {line_of(error)}",
            what="a block is called inside an operator that takes functions, as torch.cond.",
            why="Dynamo traces that whole, and does not follow what stands for a block.",
            do=_OTHERWISE,
        ) from error


def _without_gradients(call: BlockCall, results: Any) -> Any:
    """What a block returned, whose gradients are refused; no leaf, it may be changed in place."""
    operands = trees.tensor_leaves((call.args, call.kwargs))
    # The last one for blocks that capture what requires grad.
    operands += (*call.module.parameters(), torch.zeros((), requires_grad=True))
    stand_in: Callable[..., Tensor] = _WithoutGradient.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def made(result: Tensor) -> Tensor:
        if not result.requires_grad:
            return result
        with torch.enable_grad():
            return stand_in(call.name, [result.detach()], *operands)

    return trees.map_tensors(made, results)


@final
class _WithoutGradient(torch.autograd.Function):
    """Gives what stands for a result of a block, and refuses its gradients."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        ctx.name, (result,), *_ = args
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise TraceError.of(
            where=_place_of(ctx.name),
            what="is differentiated inside the model.",
            why="What such a gradient makes and holds is not planned.",
            do=_OTHERWISE,
        )


def calls_of_blocks(
    model: nn.Module,
    named: Sequence[tuple[str, nn.Module]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[BlockCall]:
    """The calls of blocks in one call of the model, in order.

    What is around the blocks runs, so that it decides as at run time (whether a mask is
    passed, say); for a block stands what gives zeros. Models without data run on fakes.
    """
    calls: list[BlockCall] = []
    names = {module: name for name, module in named}
    given = trees.tensor_leaves((args, kwargs))
    tensors = [*model.parameters(), *model.buffers(), *given]
    has_data = not any(each.is_meta or fakes.is_fake(each) for each in tensors)

    @dynamo.unseen_by_dynamo
    def stand_in(module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            dynamo.end_graph("modules.plan looks at a block")
        call = BlockCall(names[module], module, args, kwargs)
        _require_plain(call)
        calls.append(call)
        if has_data:
            found = fakes.zeros_like_results(forward, args, kwargs)
        else:
            found = forward(*args, **kwargs)
        return _without_gradients(call, found)

    with _captured_whole(), called_instead(model, names, stand_in):
        if has_data:
            with device_states.put_back({each.device for each in tensors}):
                copies = {id(each): each.clone() for each in model.buffers()}
                called_with(model, copies, args, kwargs)
        else:
            own = {id(each): each for each in tensors}
            with fakes.faked((own, args, kwargs)) as (instead, args, kwargs):
                called_with(model, instead, args, kwargs)
    for name in {*names.values()}.difference(each.name for each in calls):
        raise refusal(
            ValueError,
            where=f"modules.plan: the block `{name}`",
            what="was not called in one call of the model.",
            why="A block's share of the budget is for its calls.",
            do="Name blocks that are called, or use modules.apply.",
        )
    return calls
