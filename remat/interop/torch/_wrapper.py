"""torch 2.15's `checkpoint_wrapper` and `apply_activation_checkpointing`, in place.

torch puts a wrapper module around each module, and hides it from `state_dict`. Here
there is no wrapper: a module keeps its class and its names (`remat.modules`).
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from remat._errors import refusal, require_type
from remat._torch import distributed
from remat.interop.torch._checkpoint import (
    CheckpointOptions,
    checkpoint,
    require_options,
)
from remat.modules import apply
from remat.modules._apply import region_of
from remat.policies import everything_saveable, nothing_saveable
from remat.storage import Offload


class CheckpointImpl(enum.Enum):
    """Which of torch's two variants to use; here both are the same.

    Example:
        >>> from torch import nn
        >>> from remat.interop.torch import CheckpointImpl, checkpoint_wrapper
        >>> checkpoint_wrapper(nn.Tanh(), checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        Tanh()
    """

    REENTRANT = enum.auto()
    NO_REENTRANT = enum.auto()


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: Any = None,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> nn.Module:
    """Makes a module recompute in its backward, in place.

    Args:
        module: the module.
        checkpoint_impl: a `CheckpointImpl`, ours or torch's; both members do the same.
        checkpoint_fn: None, or `checkpoint` of this package; others raise.
        **checkpoint_fn_kwargs: options of `checkpoint`.

    Returns:
        The module itself, with a region around its `forward`.

    Raises:
        NotImplementedError: there is another `checkpoint_fn`, or an option asks for what a
            region cannot do.
        TypeError: there is no such option.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from remat.interop.torch import checkpoint_wrapper
        >>> checkpoint_wrapper(nn.Linear(2, 2))
        Linear(in_features=2, out_features=2, bias=True)
    """
    del checkpoint_impl
    if checkpoint_fn not in (None, checkpoint):
        raise refusal(
            NotImplementedError,
            where=f"checkpoint_wrapper(checkpoint_fn={checkpoint_fn!r})",
            what="asks for another checkpointing function.",
            why="Then the module would not be a region of this package.",
            do="Leave it out, or write module.forward = checkpoint_fn(...) yourself.",
        )
    known = [field.name for field in dataclasses.fields(CheckpointOptions)]
    require_options(
        "checkpoint_wrapper",
        checkpoint_fn_kwargs,
        known,
        why="torch would pass it to the module at each call.",
        do="Use one of these, or pass it where the module is called.",
    )
    its = CheckpointOptions(**checkpoint_fn_kwargs).settings
    return apply(module, "", policy=its.policy, rng=its.rng, engine=its.engine)


def offload_wrapper(module: nn.Module) -> nn.Module:
    """Offloads what a module keeps for its backward to host memory, in place.

    This covers saved values and inputs. Parameters stay on their device, while torch
    copies them too. A module from `checkpoint_wrapper` still recomputes, and what it
    keeps waits in host memory.

    Args:
        module: the module.

    Returns:
        The module itself, with a region around its `forward`.

    Raises:
        ValueError: the module has `engine="rerun"`, which keeps inputs unchanged.

    Example:
        >>> from torch import nn
        >>> from remat.interop.torch import offload_wrapper
        >>> offload_wrapper(nn.Linear(2, 2)).forward.settings.policy
        everything_saveable.stored(Offload(device='cpu', pin=True, min_bytes=0, max_bytes=None, prefetch=1, path=None))
    """
    region = region_of(module)
    policy = everything_saveable
    options: dict[str, Any] = {}
    if region is not None:
        its = region.settings
        policy, options = its.policy, {"rng": its.rng, "engine": its.engine}
    if policy != nothing_saveable:
        policy = policy.stored(Offload())
    return apply(module, "", policy=policy, saved_inputs=Offload(), **options)


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Any = None,
) -> None:
    """Makes the submodules that `check_fn` accepts recompute, in place.

    The model itself is left out, as in torch; its names, classes and `state_dict` stay.

    Args:
        model: the model.
        checkpoint_wrapper_fn: what is done to each: `checkpoint_wrapper`, a partial of it
            with options, `offload_wrapper`, or a function of yours. A module that it
            returns in place of another one is put there.
        check_fn: which submodules are meant; the default takes all, nested ones too.
        auto_wrap_policy: takes the place of `check_fn`: a policy of FSDP's, such as
            `ModuleWrapPolicy({Block})`, or a function `(module, recurse, nonwrapped_numel)`
            as `size_based_auto_wrap_policy` is one. The options that a `CustomPolicy`
            names go to `checkpoint_wrapper_fn`.

    Raises:
        NotImplementedError: the wrapper is torch's own.

    Warns:
        RematWarning: nothing is meant.

    Example:
        >>> from torch import nn
        >>> from remat.interop.torch import apply_activation_checkpointing
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        >>> is_linear = lambda module: isinstance(module, nn.Linear)
        >>> apply_activation_checkpointing(model, check_fn=is_linear)
        >>> ["forward" in vars(module) for module in model]
        [True, False, True]
    """
    where, wanted = "apply_activation_checkpointing(model)", "a module"
    require_type(where, model, nn.Module, wanted=wanted)
    _require_no_torch_wrapper(checkpoint_wrapper_fn)
    if auto_wrap_policy is None:
        below = (each for each in model.modules() if each is not model)
        chosen = {each: dict[str, Any]() for each in below if check_fn(each)}
    else:
        chosen = distributed.picked_by(auto_wrap_policy, model)
    places = [
        (owner, name, child)
        for owner in model.modules()
        # By all names; torch's `named_children` leaves out the second of one child.
        for name, child in vars(owner)["_modules"].items()
        if child in chosen
    ]
    if not places:
        # Says so, and what to do.
        apply(model, lambda name, module: False)
    done: dict[nn.Module, nn.Module] = {}
    for owner, name, child in places:
        if child not in done:
            done[child] = checkpoint_wrapper_fn(child, **chosen[child])
        if done[child] is not child:
            setattr(owner, name, done[child])


def _require_no_torch_wrapper(wrapper: Callable[..., Any]) -> None:
    inner = wrapper
    while isinstance(inner, functools.partial):
        inner = cast("Callable[..., Any]", inner.func)
    if str(getattr(inner, "__module__", "")).startswith("torch."):
        raise refusal(
            NotImplementedError,
            where=f"apply_activation_checkpointing(checkpoint_wrapper_fn={wrapper!r})",
            what="is not supported.",
            why="It is torch's own wrapper, which torch's own checkpointing runs.",
            do="Leave it out, or pass interop.torch.checkpoint_wrapper with the "
            "options, or interop.torch.offload_wrapper.",
        )
