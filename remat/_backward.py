"""What the backward of a region reads, runs and hands out, whichever rules are above it.

And what it refuses: saved tensors that were changed, second derivatives under
`first_order`, gradients that autograd would lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _compat, _shortage
from remat._any_region import Call
from remat._errors import SavedTensorModifiedError, SecondDerivativeError, explain
from remat._program import Program


def saved(ctx: Any) -> tuple[Tensor, ...]:
    """What the forward kept, in the order in which the backward reads it."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        explain_failure(error, ctx)
        raise


def consumed(
    program: Program, ctx: Any, cotangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients by a program, which lets go of what was saved."""
    read = [*saved(ctx), *cotangents]
    # Unless the graph is kept, each is let go after its last use, not at the end.
    ctx.maybe_clear_saved_tensors()
    try:
        found = program.consume(read)
    except RuntimeError as error:
        explain_failure(error, ctx)
        raise
    return spread(ctx.needs_input_grad, found)


def explain_failure(error: RuntimeError, ctx: Any) -> None:
    """Says why what was saved cannot be read, or what fills the memory that a run wants.

    Raises:
        SavedTensorModifiedError: if autograd found that a saved tensor was changed.
    """
    if "modified by an inplace operation" in str(error):
        raise _modified(ctx) from error
    _shortage.note(error, "backward", ctx.call, [ctx])


def spread(
    wanted: Sequence[bool], found: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients that are wanted in the places of their operands, after the job's."""
    if False not in wanted[1:]:
        return (None, *found)
    rest = iter(found)
    return (None, *[next(rest) if each else None for each in wanted[1:]])


def require_recordable(cotangents: Sequence[Tensor]) -> None:
    """Refuses what autograd would record on a wrapper that it then throws away."""
    if torch.is_grad_enabled() and any(map(_compat.is_batched_by_autograd, cotangents)):
        raise NotImplementedError(
            explain(
                where="a region under torch.autograd.grad(is_grads_batched=True, "
                "create_graph=True)",
                what="gives gradients that could not be differentiated again.",
                why="autograd records them on a wrapper that it then throws away.",
                do="Use torch.func.jacrev, or torch.func.vmap over torch.func.vjp.",
            )
        )


def second_derivative(call: Call) -> SecondDerivativeError:
    """What is raised where a gradient that was the last is differentiated."""
    labels = ", ".join(call.labels) or "none"
    return SecondDerivativeError(
        explain(
            where=f"the gradient of a region with the operands {labels}",
            what="is differentiated in reverse mode.",
            why="The region was called under first_order(), which keeps nothing that a "
            "second derivative reads.",
            do="Call it outside of first_order(), or use forward mode over the gradient.",
        )
    )


def _modified(ctx: Any) -> SavedTensorModifiedError:
    labels = ", ".join(ctx.call.labels) or "none"
    return SavedTensorModifiedError(
        explain(
            where=f"the backward of a region with the operands {labels}",
            what="a tensor that waits for it was changed in place since the forward.",
            why="The recomputation would start from other numbers.",
            do="Change a copy (x = x + 1 instead of x += 1), or do it after backward().",
        )
    )
