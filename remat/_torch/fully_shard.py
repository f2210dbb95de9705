"""What `fully_shard` hangs on its modules.

Obsolete when torch tells the state of such a module.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from torch import Tensor


def is_idle(module: Any) -> bool:
    """Whether a module of `fully_shard` is in no forward or backward.

    Obsolete when torch tells the state of such a module.
    """
    return module._get_fsdp_state()._training_state.name == "IDLE"


def sharded_parameters(module: Any) -> list[Tensor]:
    """The tensors that a module holds for the parameters that `fully_shard` splits.

    Parameters of inner modules that are sharded separately, and `ignored_params`, are left
    out. Obsolete when torch lists these parameters.
    """
    groups: Any = module._get_fsdp_state()._fsdp_param_groups
    places = [each._module_info for group in groups for each in group.fsdp_params]
    return [getattr(place.module, place.param_name) for place in places]


@contextlib.contextmanager
def called_again(module: Any) -> Generator[None]:
    """Inside, a call of a module of `fully_shard` during a backward is a forward of its own.

    After the module's first backward, and until autograd ends, torch takes each call for the
    recomputation of a forward that has its hooks already. And a forward would gather the
    parameters of the modules after it, which the backward needs no more. Obsolete when torch
    can be told what a call is for.
    """
    state: Any = module._get_fsdp_state()
    if state._training_state.name == "PRE_BACKWARD":
        state._training_state = state._training_state.__class__.IDLE
    ahead = state._states_to_forward_prefetch
    state._states_to_forward_prefetch = []
    try:
        yield
    finally:
        state._states_to_forward_prefetch = ahead
