"""What torch knows of an nn.Module: its call, its hooks, where its parameters stand twice.

Obsolete when torch makes the hooks public; a function that says so itself has an end of its own.
"""

# pyright: reportPrivateUsage=false
import contextlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.module_tracker import ModuleTracker

from remat._torch.attributes import attributes_as
from remat._torch.modes import unseen_by_traces

_T = TypeVar("_T")
_CALLS = torch.nn.Module.__call__.__code__.co_filename
_torch: Any = torch.nn.modules.module
HOOKS_FOR_ALL: tuple[dict[int, Any], ...] = (
    *(_torch._global_forward_pre_hooks, _torch._global_forward_hooks),
    *(_torch._global_backward_pre_hooks, _torch._global_backward_hooks),
)


def calling_module() -> Any:
    """The module whose call has called the caller of this function; None if none has.

    Obsolete when what stands in an attribute `forward` is told through which module.
    """
    frame = sys._getframe(2)
    is_call = frame.f_code.co_filename == _CALLS
    return frame.f_locals.get("self") if is_call else None


def called_with(module: Any, instead: Mapping[int, Any], args: Any, kwargs: Any) -> Any:
    """Calls a module with other tensors for its parameters and buffers, by their identities.

    What it leaves in attributes, such as a cache, is the caller's to undo.

    `functional_call` takes names, and puts the wrong ones back where a part has two: each part is
    named once here. Obsolete when it does so.
    """
    state = {
        f"{name}.{key}" if name else key: instead[id(tensor)]
        for name, part in module.named_modules()
        for key, tensor in (*part._parameters.items(), *part._buffers.items())
        if id(tensor) in instead
    }
    return torch.func.functional_call(module, state, args, kwargs, tie_weights=False)


def copied(module: _T, **attributes: Any) -> _T:
    """A module with the attributes of another one, but for those that are given."""
    found = object.__new__(type(module))
    found.__dict__ = {**vars(module), **attributes}
    return found


def converting_by(
    made_of: Callable[[Any], Any],
) -> contextlib.AbstractContextManager[None]:
    """Inside, `Module.to` and its like do what is made of torch's own function for that.

    Obsolete when that leaves a module alone of which it changes nothing.
    """
    kind: Any = torch.nn.Module
    return attributes_as(kind, _apply=made_of(kind._apply))


def made_by_hooks(module: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The attributes that hooks set, and what computes them, without a power iteration."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            yield hook.name, partial(hook.compute_weight, module, False)
        elif isinstance(hook, WeightNorm):
            yield hook.name, partial(hook.compute_weight, module)
        elif isinstance(hook, BasePruningMethod):
            masked: Any = hook
            yield masked._tensor_name, partial(masked.apply_mask, module)


def forward_hooks_in(module: torch.nn.Module) -> list[Any]:
    parts: Iterator[Any] = module.modules()
    return [hook for part in parts for hook in part._forward_hooks.values()]


def hooks_for_all() -> dict[int, Any]:
    """The hooks that run with every module's forward or backward, by their registration.

    Not those that are `_is_tracking`.
    """
    found = {key: hook for hooks in HOOKS_FOR_ALL for key, hook in hooks.items()}
    return {key: hook for key, hook in found.items() if not _is_tracking(hook)}


def _is_tracking(hook: Any) -> bool:
    """Whether torch notes by a hook which modules run, as to count FLOPs by module."""
    return isinstance(getattr(hook, "__self__", None), ModuleTracker)


@contextlib.contextmanager
def untracked() -> Generator[None]:
    """Runs the body without hooks that are `_is_tracking`: they hook on gradients of arguments.

    Obsolete when `register_multi_grad_hook` takes leaves under `torch.autograd.grad`.
    """
    found = [(hooks, dict(hooks)) for hooks in HOOKS_FOR_ALL]
    for hooks, before in found:
        for key in [key for key, hook in before.items() if _is_tracking(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, before in found:
            if any(map(_is_tracking, before.values())):
                now = before | hooks
                hooks.clear()
                hooks.update(now)


def second_places(kind: type) -> tuple[str, ...]:
    """Attributes of a module's class that hold its parameters a second time.

    Obsolete when recurrent modules read their parameters where they are registered.
    """
    is_recurrent = issubclass(kind, torch.nn.RNNBase)
    return ("_flat_weights", "_flat_weight_refs") if is_recurrent else ()


def refresh_second_places(module: object) -> None:
    """Sets `second_places` to the parameters that the module has now. Obsolete as they are."""
    if isinstance(module, torch.nn.RNNBase):
        with unseen_by_traces():
            module._update_flat_weights()


def forward_of(module: object) -> Any:
    """The `forward` of an object's class, or None."""
    return getattr(type(module), "forward", None)


def is_copy(module: object, original: object) -> bool:
    """Whether a module is another than the original; a library may make a class of its own for it."""
    return module is not original and isinstance(module, type(original))
