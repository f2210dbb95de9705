"""`megatron.core.tensor_parallel.checkpoint` over this engine.

If Megatron-LM is imported, its tracker is preserved, and inputs are sharded over its
tensor-parallel group. This module does not import it.

References:
    Megatron-LM, `megatron/core/tensor_parallel/random.py`.
"""

import sys
from collections.abc import Callable
from typing import Any

from remat._torch import dynamo
from remat.interop._shared import call_as_region, preserve_tracker_of, shard_over

__all__ = ["checkpoint"]

_RANDOM = "megatron.core.tensor_parallel.random"
_STATE = "megatron.core.parallel_state"


@dynamo.unseen_by_dynamo
def checkpoint(
    function: Callable[..., Any], distribute_saved_activations: bool | None, *args: Any
) -> Any:
    """Calls a function whose intermediate values are recomputed in the backward.

    Laws: those of `remat`. Generators, registered trackers and, where Megatron-LM is
    imported, its own tracker are put back for the recomputation by value.

    Args:
        function: a module, a function or a region, called with `args`.
        distribute_saved_activations: whether each tensor-parallel rank keeps its part of
            the arguments of a floating dtype, as `storage.Shard` does, parameters aside.
            The ranks are those of Megatron-LM's group, or all where it is not in use. None,
            which is what Megatron-LM's `TransformerConfig` says by default, means False.
        *args: the function's arguments; pytrees of tensors and other values.

    Returns:
        What `function` returns.

    Raises:
        TypeError: the second argument is neither a bool nor None.
        TraceError: the function cannot be traced; in its place,
            `remat(function, engine="rerun", rng="preserve")` runs it again instead.
        NotReplicatedError: arguments that are to be sharded differ between ranks.
        RuntimeError: there are no process groups to shard over.

    Example:
        >>> import torch
        >>> from remat.interop import megatron
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = megatron.checkpoint(lambda x: x.sin().sin(), False, x)
        >>> y.sum().backward()
    """
    if not isinstance(distribute_saved_activations, bool | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            "interop.megatron.checkpoint(function, distribute_saved_activations, *args) "
            "takes True or False after the function, not a "
            f"{type(distribute_saved_activations).__name__}."
        )
    preserve_tracker_of(_RANDOM)
    if not distribute_saved_activations:
        return call_as_region(function, args, {})
    return call_as_region(
        function, args, {}, lambda: shard_over(_tensor_parallel_group(), args, {})
    )


def _tensor_parallel_group() -> Any:
    """Megatron-LM's, or None where it has none."""
    state: Any = sys.modules.get(_STATE)
    if state is None or not state.model_parallel_is_initialized():
        return None
    return state.get_tensor_model_parallel_group()
