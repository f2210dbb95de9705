"""Drop-ins for `torch.utils.checkpoint` and torch's checkpoint wrapper, over this engine.

Each has the signature of the newest torch. Unsupported options raise, and say why; names
that say nothing of how recomputation is done are torch's own. docs/interop_torch.md goes
through torch's own tests, behavior by behavior.

- `_checkpoint`: `checkpoint`, `checkpoint_sequential`, their options and switches.
- `_selective`: selective checkpointing, by policies of operators.
- `_wrapper`: `checkpoint_wrapper` and its like, which change modules in place.
"""

from torch.utils.checkpoint import (
    CheckpointPolicy,
    DefaultDeviceType,
    SelectiveCheckpointContext,
    check_backward_validity,
    detach_variable,
    get_device_states,  # pyright: ignore[reportUnknownVariableType]
    noop_context_fn,
    set_device_states,  # pyright: ignore[reportUnknownVariableType]
)

from remat._errors import RecomputationError as CheckpointError
from remat.interop.torch._checkpoint import (
    CheckpointFunction,
    GraphExecGroup,
    checkpoint,
    checkpoint_sequential,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)
from remat.interop.torch._selective import create_selective_checkpoint_contexts
from remat.interop.torch._wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

__all__ = [
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointImpl",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "apply_activation_checkpointing",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "offload_wrapper",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]
