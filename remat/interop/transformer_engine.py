"""`transformer_engine.pytorch.checkpoint` over this engine.

What differs from TransformerEngine's: tensors that are passed by keyword, held in
containers, or reached otherwise get their gradients, with `use_reentrant` either way; the
caller's tensors are left alone; any size is sharded; ranks that differ raise.

References:
    TransformerEngine, `transformer_engine/pytorch/distributed.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from remat._errors import refusal
from remat._torch import dynamo
from remat._user_lines import warn
from remat.interop._shared import call_as_region, preserve_tracker, shard_over

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["checkpoint"]

# TransformerEngine passes these on to torch where a function has no modules of its own.
_OF_TORCH = ("determinism_check", "debug")


@dynamo.unseen_by_dynamo
def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: ProcessGroup | None = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Calls a function whose intermediate values are recomputed in the backward.

    Laws: those of `remat`. Generators and the tracker are put back for the recomputation
    by value, and end as without it. The two modes that `use_reentrant` names are one here,
    and both may shard: a region takes gradients to wherever the function's tensors come
    from, and under `.backward()` as under `torch.autograd.grad` and torch.func.

    Args:
        function: a module, a function or a region, called with what follows.
        *args: its arguments; pytrees of tensors and other values. As in TransformerEngine
            a bool, a function and a group in front of them, which is how Megatron-LM calls
            it, are the three options that follow; that is deprecated there, and warns.
        distribute_saved_activations: whether each rank of `tp_group` keeps its part of the
            arguments of a floating dtype, as `storage.Shard` does, parameters aside.
        get_rng_state_tracker: gives the tracker of named generator states from which the
            function draws. It is registered (`random.register_tracker`) from then on.
        tp_group: the ranks that hold the same arguments; None means all ranks.
        use_reentrant: accepted either way.
        **kwargs: the function's keyword arguments. Of torch's options, which
            TransformerEngine passes on, `preserve_rng_state` is accepted either way.

    Returns:
        What `function` returns.

    Raises:
        TraceError: the function cannot be traced; in its place,
            `remat(function, engine="rerun", rng="preserve")` runs it again instead.
        NotReplicatedError: arguments that are to be sharded differ between ranks.
        RuntimeError: there are no process groups to shard over.
        ValueError: `context_fn` is passed, which runs code around a rerun of the function.

    Example:
        >>> import torch
        >>> from remat.interop import transformer_engine as te
        >>> linear, x = torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        >>> y = te.checkpoint(lambda x, *, scale: linear(x).tanh() * scale, x, scale=x)
        >>> y.sum().backward()
        >>> linear.weight.grad.shape
        torch.Size([4, 4])
    """
    if _has_options_in_front(args):
        warn(
            where="interop.transformer_engine.checkpoint(function, *args)",
            what="got distribute_saved_activations, get_rng_state_tracker and tp_group "
            "by position.",
            why="TransformerEngine accepts this, but has deprecated it.",
            do="Pass them by keyword.",
            category=DeprecationWarning,
        )
        distribute_saved_activations, get_rng_state_tracker, tp_group, *rest = args
        args = tuple(rest)
    kwargs = _transformer_engine_kwargs(kwargs)
    if get_rng_state_tracker is not None:
        preserve_tracker(get_rng_state_tracker)
    storage = functools.partial(shard_over, tp_group, args, kwargs)
    return call_as_region(
        function, args, kwargs, storage if distribute_saved_activations else None
    )


def _has_options_in_front(args: tuple[Any, ...]) -> bool:
    """Whether positional arguments begin with options, by TransformerEngine's own test."""
    if len(args) <= 3 or not isinstance(args[0], bool) or not callable(args[1]):
        return False
    group: Any = getattr(torch.distributed, "ProcessGroup", None)
    return args[2] is None or (group is not None and isinstance(args[2], group))


def _transformer_engine_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    if "context_fn" in kwargs:
        raise refusal(
            ValueError,
            where="interop.transformer_engine.checkpoint(context_fn=...)",
            what="is not supported.",
            why="The function is traced once, so none of its Python code runs in "
            "the backward for a context to enclose.",
            do="Choose what is saved with remat(policy=...).",
        )
    for name in _OF_TORCH:
        if name in kwargs:
            warn(
                where=f"interop.transformer_engine.checkpoint({name}=...)",
                what="has no effect, as in TransformerEngine's own checkpoint.",
                why="It is an option of torch.utils.checkpoint.",
                do="Leave it out; remat(verify=True) compares each recomputed value.",
            )
    of_torch = {*_OF_TORCH, "preserve_rng_state"}
    return {name: each for name, each in kwargs.items() if name not in of_torch}
