"""Drop-ins for `torch.utils.checkpoint` and torch's checkpoint wrapper, over this engine.

Each has the signature that the newest torch gives it. What cannot be kept raises, and says
why; docs/interop_torch.md goes through torch's own tests, behavior by behavior.
"""

from remat.interop.torch._checkpoint import (
    checkpoint,
    checkpoint_sequential,
    noop_context_fn,
)
from remat.interop.torch._selective import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from remat.interop.torch._wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

__all__ = [
    "CheckpointPolicy",
    "SelectiveCheckpointContext",
    "apply_activation_checkpointing",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "create_selective_checkpoint_contexts",
    "noop_context_fn",
]
