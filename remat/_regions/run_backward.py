"""What the backward of a region reads, runs and returns, under any transform.

It refuses saved tensors that were changed, and second derivatives under `first_order`.
"""

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from remat._errors import SavedTensorModifiedError, SecondDerivativeError, refusal
from remat._graph.meta import TensorMeta, layout_of
from remat._programs.program import Program
from remat._regions import out_of_memory
from remat._regions.forwards import make_views
from remat._regions.protocol import Asked, Call, Region
from remat._regions.waiting import resumed
from remat._switches.numerics import Numerics
from remat._torch import autograd, levels, sizes, tracer


def resolved(cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Without lazy conjugation, or sizes of Dynamo's: programs are traced for what lies there."""
    found = [
        each if each is None else each.resolve_conj().resolve_neg()
        for each in cotangents
    ]
    if tracer.is_in_compiler():
        found = [each if each is None else sizes.settled(each) for each in found]
    return tuple(found)


def pulled_back(ctx: Any, cotangents: Sequence[Tensor | None]) -> Region:
    """The region of the gradients that are wanted for these cotangents."""
    call: Call = ctx.call
    if call.is_last:
        raise _second_derivative(call)
    layouts = tuple([None if each is None else layout_of(each) for each in cotangents])
    ctx.wanted = wanted_of(ctx)
    switches = Numerics.current()
    asked = Asked(layouts, ctx.wanted[1:], ctx.num_states, switches, call.is_borrowing)
    return call.region.vjp(call.roots, asked)


def wanted_of(ctx: Any) -> tuple[bool, ...]:
    """The operands whose gradients are wanted, behind one for the first argument.

    Under `torch.autograd.grad(y, x)` not those by weights, although these require grad. In a
    trace all: it serves later backwards, too.
    """
    needed: tuple[bool, ...] = ctx.needs_input_grad
    if not autograd.is_plain_autograd():
        return needed
    nodes: list[Any] = [node for node, _ in ctx.next_functions]
    if autograd.are_asked_for([node for node in nodes if node is not None]):
        return needed
    asked = (False, *map(autograd.is_asked_for, nodes))
    wanted = tuple([need and ask for need, ask in zip(needed, asked, strict=True)])
    return wanted if any(wanted) else needed


def read_saved(ctx: Any) -> tuple[Tensor, ...]:
    """What the forward kept, in the order of the backward; refuses it if some was changed."""
    try:
        found: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        explain_failure(error, ctx)
        raise
    before: tuple[int, ...] = ctx.versions
    if before:
        now = levels.versions_below(found[: len(before)])
        changed = [place for place, each in enumerate(before) if now[place] != each]
        if changed:
            raise _modified(ctx, [(place, found[place]) for place in changed])
    return found


def run_freeing(
    derived: Region, program: Program, ctx: Any, cotangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Computes the gradients by a region's program, which frees what was saved as it goes."""
    try:
        read = [*resumed(read_saved(ctx)), *cotangents]
        # A gradient may be a cotangent, or a view of one, or none.
        passed = {
            view.operand: read[derived.num_leading + view.operand]
            for view in derived.views or ()
            if view.operand is not None
        }
        # Unless the graph is kept, each is freed after its last use, not at the end.
        ctx.maybe_clear_saved_tensors()
        found = program.consume(read)
    except RuntimeError as error:
        explain_failure(error, ctx)
        raise
    if derived.views is not None:
        found = make_views(derived.views, found, passed)
    return by_operand(ctx.wanted, found)


def require_one_map(call: Call) -> None:
    """Refuses a region in a backward that several older vmaps map, one inside of the other."""
    if autograd.maps_twice():
        raise refusal(
            NotImplementedError,
            where=f"the backward of the region {out_of_memory.name_of(call.roots[0])}",
            what="is mapped by is_grads_batched=True inside of another one.",
            why="torch.func maps a region in place of torch's older vmap, at one level.",
            do="Map both by torch.func.vmap over torch.func.vjp, or loop over one.",
        )


def let_go(ctx: Any) -> None:
    """Where autograd frees what was saved, frees the call, too, with all that its function holds."""
    if not autograd.keeps_graph():
        ctx.call = None


def refuse_freed(ctx: Any) -> NoReturn:
    """Raises torch's error for a second backward through a graph that was freed, with its call."""
    raise AssertionError(f"{ctx.saved_tensors} are left, and no call")


def explain_failure(error: RuntimeError, ctx: Any) -> None:
    """Explains an error of reading what was saved, or of a run that found no memory."""
    if autograd.is_of_a_change(error):
        raise _modified(ctx, autograd.changed_since_saved(ctx)) from error
    out_of_memory.note(error, "backward", ctx.call, [ctx])


def by_operand(
    wanted: Sequence[bool], found: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients at the places of their operands, behind None for the first argument."""
    if False not in wanted[1:]:
        return (None, *found)
    rest = iter(found)
    return (None, *[next(rest) if each else None for each in wanted[1:]])


def connected_below(ctx: Any, kept: Sequence[Tensor]) -> int:
    """Below which level of torch.func what a node saved has gradients of its own.

    The node was recorded at a level, 0 without a transform, which wraps what it kept until it ends.
    """
    level, call = ctx.level, ctx.call
    if level == 0:
        is_recorded = torch.is_grad_enabled() and autograd.is_plain_autograd()
        is_open = is_recorded and call.region.note_recorded(call.roots)
        return sys.maxsize if is_open else 0
    if all(levels.level_of(each) != level for each in kept):
        return sys.maxsize
    running = levels.current_interpreter()
    return level if running and running[1].level() == level else 0


def _second_derivative(call: Call) -> SecondDerivativeError:
    """The error of differentiating a gradient that was taken under `first_order()`."""
    labels = ", ".join(call.labels) or "none"
    return SecondDerivativeError.of(
        where=f"the gradient of a region with the operands {labels}",
        what="is differentiated in reverse mode.",
        why="The region was called under first_order(), which keeps nothing that a "
        "second derivative reads.",
        do="Call it outside first_order(), or use forward mode over the gradient.",
    )


def _modified(
    ctx: Any, changed: Sequence[tuple[int, Tensor]]
) -> SavedTensorModifiedError:
    call: Call = ctx.call
    others = (
        f", like {len(changed) - 1} more of its tensors" if len(changed) > 1 else ""
    )
    return SavedTensorModifiedError.of(
        where=f"{_named(ctx, changed)}, which waits for the backward of the region "
        f"{out_of_memory.name_of(call.roots[0])}",
        what=f"was changed in place since the forward{others}.",
        why="The recomputation would start from other numbers.",
        do="Change a copy (x = x + 1 instead of x += 1), or do it after "
        "backward(), as an optimizer's step does.",
    )


def _named(ctx: Any, changed: Sequence[tuple[int, Tensor]]) -> str:
    """The first of the saved tensors that were changed, as users know it."""
    if not changed:  # autograd reads what the region returned in another way
        return "an output"
    place, tensor = changed[0]
    labels = out_of_memory.labels_of(ctx.call)
    fast_path = ctx.call.fast_path
    num_states = ctx.num_states if fast_path is None else fast_path.num_states
    if len(labels) + num_states != autograd.num_saved(ctx):
        labels = []  # a derivative of the region, whose operands have no names
    label = labels[place][0] if place < len(labels) else ""
    return f"{label or 'a tensor'} ({TensorMeta.of(tensor)})"
