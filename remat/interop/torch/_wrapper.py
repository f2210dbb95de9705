"""torch's `checkpoint_wrapper` and `apply_activation_checkpointing`, in place.

torch puts a wrapper module around each module, and hides it from `state_dict` again. Here a
module keeps its place, its class and its names (`remat.modules`).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from remat._errors import explain
from remat.interop.torch._checkpoint import Options, policy_of
from remat.modules import apply


class CheckpointImpl(enum.Enum):
    """Which of torch's two variants is asked for; here both are one.

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
        checkpoint_impl: a `CheckpointImpl`, ours or torch's; both of its members are one.
        checkpoint_fn: None; torch would call another checkpoint function.
        **checkpoint_fn_kwargs: options of `checkpoint`.

    Returns:
        The module itself, with a region around its `forward`.

    Raises:
        NotImplementedError: there is a `checkpoint_fn`, or an option asks for what a region
            cannot do.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from remat.interop.torch import checkpoint_wrapper
        >>> checkpoint_wrapper(nn.Linear(2, 2))
        Linear(in_features=2, out_features=2, bias=True)

    References:
        `torch.distributed.algorithms._checkpoint.checkpoint_wrapper` of torch 2.15.
    """
    del checkpoint_impl
    if checkpoint_fn is not None:
        raise NotImplementedError(
            explain(
                where=f"checkpoint_wrapper(checkpoint_fn={checkpoint_fn!r})",
                what="asks for another function to do the checkpointing.",
                why="Then nothing of this package is left in it.",
                do="Leave it out, or write module.forward = checkpoint_fn(...) yourself.",
            )
        )
    options = Options(**checkpoint_fn_kwargs)
    return apply(
        module,
        "",
        policy=policy_of(options.context_fn),
        rng="preserve" if options.preserve_rng_state else "keys",
        engine=options.engine,
    )


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Callable[..., Any] | None = None,
) -> None:
    """Makes the submodules that `check_fn` accepts recompute, in place.

    The model itself is left out, as in torch; its names, classes and `state_dict` stay.

    Args:
        model: the model.
        checkpoint_wrapper_fn: what is done to each: `checkpoint_wrapper`, a partial of it
            with options, or a function of yours. A module that it returns in place of
            another one is put there.
        check_fn: which submodules are meant; the default takes all, nested ones too.
        auto_wrap_policy: None; policies of FSDP are not known here.

    Raises:
        NotImplementedError: there is an `auto_wrap_policy`, or the wrapper is torch's own.

    Warns:
        RematWarning: `check_fn` accepts nothing.

    Example:
        >>> from torch import nn
        >>> from remat.interop.torch import apply_activation_checkpointing
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        >>> is_linear = lambda module: isinstance(module, nn.Linear)
        >>> apply_activation_checkpointing(model, check_fn=is_linear)
        >>> ["forward" in vars(module) for module in model]
        [True, False, True]
    """
    if auto_wrap_policy is not None:
        raise _refused(
            f"auto_wrap_policy={auto_wrap_policy!r}",
            "It is asked by a protocol of FSDP's, with numbers of parameters.",
            "Say by check_fn which modules are meant.",
        )
    _require_not_of_torch(checkpoint_wrapper_fn)
    found = [
        (owner, name, child)
        for owner in model.modules()
        for name, child in _children(owner)
        if check_fn(child)
    ]
    if not found:
        # Says so, and what to do.
        apply(model, lambda name, module: False)
    done: dict[int, nn.Module] = {}
    for owner, name, child in found:
        if id(child) not in done:
            done[id(child)] = checkpoint_wrapper_fn(child)
        if done[id(child)] is not child:
            setattr(owner, name, done[id(child)])


def _children(owner: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children by all their names; torch's `named_children` leaves out the second."""
    registered: dict[str, nn.Module | None] = vars(owner)["_modules"]
    return [(name, child) for name, child in registered.items() if child is not None]


def _require_not_of_torch(wrapper: Callable[..., Any]) -> None:
    inner = wrapper
    while isinstance(inner, functools.partial):
        inner = cast("Callable[..., Any]", inner.func)
    if str(getattr(inner, "__module__", "")).startswith("torch."):
        raise _refused(
            f"checkpoint_wrapper_fn={wrapper!r}",
            "It is torch's own wrapper, which torch's own checkpointing runs.",
            "Leave it out, or pass interop.torch.checkpoint_wrapper with the options.",
        )


def _refused(option: str, why: str, do: str) -> NotImplementedError:
    return NotImplementedError(
        explain(
            where=f"apply_activation_checkpointing({option})",
            what="cannot be kept.",
            why=why,
            do=do,
        )
    )
