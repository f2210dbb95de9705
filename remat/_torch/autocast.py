"""Autocast: the device types that have it, and its cache of cast weights.

Obsolete when torch has a public name for what it keeps.
"""

# pyright: reportPrivateUsage=false
import contextlib
import functools
from collections.abc import Generator

import torch
from torch import Tensor

from remat._torch.levels import requires_grad_anywhere


@contextlib.contextmanager
def autocast_cache(enabled: bool) -> Generator[None]:
    """Switches autocast's cache of cast weights on or off; `make_fx` turns it off."""
    found = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(found)


def autocast_devices() -> tuple[str, ...]:
    """The device types here that autocast may be switched on for."""
    return _devices_beside_cpu(torch.accelerator.current_accelerator())


@functools.cache
def _devices_beside_cpu(accelerator: torch.device | None) -> tuple[str, ...]:
    if accelerator is None or not torch.accelerator.is_available():
        return ("cpu",)
    return ("cpu", accelerator.type)


def autocast_keeps_casts() -> bool:
    """Whether autocast is on, and keeps its casts of weights for their next use."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()


def is_cast_each_time(tensor: Tensor) -> bool:
    """Whether autocast keeps casts, but none of this tensor, which some transform differentiates.

    It keeps those of leaves, which weights are. The gradients of all uses of a cast are summed
    in the lower precision; the gradients of casts are cast back first.
    """
    if tensor.dtype is not torch.float32 or not autocast_keeps_casts():
        return False
    return requires_grad_anywhere(tensor) and not is_weight(tensor)


def in_products(tensor: Tensor) -> Tensor:
    """A tensor in the dtype in which autocast multiplies matrices; itself where it is off.

    For what multiplies in place, or later than it is called, which autocast does not see.
    """
    device, wide = tensor.device.type, (torch.float32, torch.float16, torch.bfloat16)
    is_cast = tensor.dtype in wide and torch.is_autocast_enabled(device)
    return tensor.to(torch.get_autocast_dtype(device)) if is_cast else tensor


def is_weight(tensor: Tensor) -> bool:
    """Whether autocast keeps its cast of a tensor: it does for leaves that require grad."""
    return tensor.requires_grad and tensor.is_leaf and not tensor._is_view()


def cast_each_time(tensor: Tensor) -> Tensor:
    """A tensor of these numbers of which autocast keeps no cast: it keeps those of leaves.

    A view, where the layout has some. Obsolete when every layout has `alias`.
    """
    if tensor.layout is torch.strided:
        return torch.ops.aten.alias.default(tensor)
    return tensor.view_as(tensor) if tensor.layout is torch.jagged else tensor.clone()
