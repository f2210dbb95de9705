"""The short way under one level of reverse mode: one program forward, one backward.

A small function under `torch.func.grad`, alone or mapped by one `vmap`, takes this way. It does
what `_regions.rules` does where only that level differentiates: the operands are unwrapped, a
program runs below all levels, its outputs are wrapped. What may differ from call to call is
checked in C, by the guards of plain autograd. A call that a check refuses takes the long way,
and what is found there is remembered for the next one.
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from torch import Tensor

from remat._graph.meta import TensorMeta
from remat._programs.program import Quiet
from remat._regions import out_of_memory
from remat._regions.forwards import FastPath, Followed, Mapped, latest, make_views
from remat._regions.functions import Batch
from remat._regions.protocol import Call
from remat._regions.rules import look_up_gradients
from remat._regions.run_backward import by_operand
from remat._torch import autograd, dynamo, guards, levels


class _Run(NamedTuple):
    """A call and the program that runs for it."""

    call: Call
    level: int  # the level of reverse mode
    quiet: Quiet  # what runs below all levels
    physical: Sequence[Tensor]  # what it takes
    #: The level of vmap, and which dimension of each result it maps; None without one.
    mapped: tuple[int, Sequence[int | None]] | None


def run_short(call: Call, operands: Sequence[Tensor]) -> Sequence[Tensor | None] | None:
    """What the region's function returns, for a call with a `fast_path`; None for the long way."""
    found = levels.short_levels()
    # A level below, or plain autograd, may want a gradient that the wrappers hide.
    if found is None or any(map(guards.requires_grad, levels.all_unwrapped(operands))):
        return None
    outputs = _run_at(call, (), operands, found)
    if outputs is None or call.fast_path is None or call.fast_path.views is None:
        return outputs
    return make_views(call.fast_path.views, outputs, operands)


def _run_at(
    call: Call,
    leading: Sequence[Tensor],
    operands: Sequence[Tensor],
    found: levels.ShortLevels,
) -> Sequence[Tensor] | None:
    """The outputs of a program, recorded at the level of reverse mode."""
    path, (level, vmap) = call.fast_path, found
    assert path is not None, "the call needs more than one program"
    wrapped = levels.all_wrapped_at(operands, level)
    below = [*leading, *map(levels.unwrap_at, wrapped, repeat(level))]
    quiet, mapped = path.quiet, None
    if vmap is not None:
        below, dims = levels.unwrap_batched(below, vmap.level())
        if dims.count(None) < len(dims):
            batch = Batch(vmap.batch_size(), vmap.randomness(), dims, ())
            program = _mapped_program(call, batch, below)
            if program is None:
                return None
            quiet, mapped = program.quiet, (vmap.level(), program.out_dims)
        elif call.region.num_draws or call.region.states:
            return None  # each example may draw for itself
    with levels.enable_single_level():
        return _apply(_Run(call, level, quiet, below, mapped), *wrapped)


def _mapped_program(
    call: Call, batch: Batch, physical: Sequence[Tensor]
) -> Mapped | None:
    """The mapped program of a call; None where it takes more than one run of a program."""
    path = call.fast_path
    assert path is not None, "the call needs more than one program"
    for known in path.mapped:
        is_alike = known.dims == batch.dims and known.size == batch.size
        if is_alike and known.check(*physical):
            return known
    metas = tuple(
        TensorMeta.of_whole(tensor, requires_grad=False) for tensor in physical
    )
    saves_by_rules = call.region.rules and path.num_kept > path.num_outputs
    is_more = call.region.num_draws or saves_by_rules
    if is_more or not all(map(guards.is_plain, physical)):
        return None
    batched = call.region.batched(call.roots, batch._replace(metas=metas), True)
    forward = batched.region.one_program(call.roots, call.numerics)
    dims = batched.dims
    if forward is None or dims is None:
        return None
    check, quiet = guards.tensor_guard(physical), forward.program.quiet
    found = Mapped(batch.dims, batch.size, check, quiet, tuple(dims))
    path.mapped = latest(found, path.mapped)
    return found


@dynamo.unseen_by_dynamo
def _forward(ctx: Any, run: _Run, *operands: Tensor) -> tuple[Tensor, ...]:
    call, level, quiet, physical, mapped = run
    path: Any = call.fast_path
    try:
        with levels.leave_functorch(), quiet.around():
            found: Any = quiet.run([*physical])
            if mapped is None:
                for index in path.untracked:
                    found[index] = autograd.untracked_alias(found[index])
    except RuntimeError as error:
        out_of_memory.note(error, "forward", call, [each.grad_fn for each in operands])
        raise
    first, last = path.num_outputs, path.num_kept
    ctx.versions = levels.versions_of(
        [*found[first:last], *physical[len(physical) - len(operands) :]]
    )
    if mapped is not None:
        found = levels.wrap_batched(found, mapped[1], mapped[0])
    kept = (*found[first:last], *operands)
    ctx.call, ctx.level, ctx.num_states = call, level, path.num_states
    ctx.save_for_backward(*kept, *found[last:])
    ctx.set_materialize_grads(False)
    return tuple(map(levels.wrap_at, found[:first], repeat(level)))


@dynamo.unseen_by_dynamo
def _gradients(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients, most often by the program of a backward before."""
    path: FastPath = ctx.call.fast_path
    wanted, found = ctx.needs_input_grad, levels.short_levels()
    if found is not None and found.level == ctx.level:
        for known in path.followed_at_level:
            if (
                known.check(*cotangents)
                and known.wanted == wanted
                and known.same_thread()
            ):
                gradients = _repeat_backward(ctx, known, cotangents, found)
                if gradients is None:
                    break
                return by_operand(wanted, gradients)
    return look_up_gradients(ctx, cotangents)


def _repeat_backward(
    ctx: Any, known: Followed, cotangents: Sequence[Any], found: levels.ShortLevels
) -> Sequence[Tensor] | None:
    """The gradients by a known program; None for the long way, which says what is wrong."""
    call: Call = ctx.call
    assert call.fast_path is not None, "the forward took the short way"
    try:
        kept: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError:
        return None
    has_ended = levels.level_of(kept[len(ctx.versions) - 1]) != ctx.level
    inputs = levels.all_unwrapped(kept[: len(ctx.versions)])
    changed = levels.versions_of(inputs) != ctx.versions
    below = levels.all_unwrapped(cotangents)
    if has_ended or changed or any(map(guards.requires_grad, below)):
        return None
    again = Call(known.region, call.roots, known.numerics, call.labels)
    own = call.fast_path.num_kept - call.fast_path.num_outputs
    return _run_at(
        again._replace(fast_path=known.path, connected_below=ctx.level),
        kept[:own],
        (*kept[own:], *cotangents),
        found,
    )


class _ShortFunction(levels.SingleLevelFunction):
    """One level of torch.func reverse mode over one program."""

    forward = staticmethod(_forward)
    backward = staticmethod(_gradients)


_apply: Callable[..., Sequence[Tensor]] = _ShortFunction.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
