"""The switches of `torch.utils.checkpoint`, for code that changes only its import.

A switch for something that regions always do is silent; one for something that they
cannot do warns that it has no effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Self, final

from remat._messages import warn
from remat.interop.torch._checkpoint import checkpoint


@contextlib.contextmanager
def set_checkpoint_early_stop(enable: bool) -> Generator[None]:
    """Does nothing: a recomputation always ends with the last value that is needed.

    A traced region always recomputes only what some gradient needs.

    Args:
        enable: True has no effect, because it always holds.

    Warns:
        RematWarning: it is False, which has no effect.

    Example:
        >>> from remat.interop.torch import set_checkpoint_early_stop
        >>> with set_checkpoint_early_stop(True):
        ...     pass

    References:
        `torch.utils.checkpoint.set_checkpoint_early_stop` of torch 2.15.
    """
    if not enable:
        _has_no_effect(
            "set_checkpoint_early_stop(False)",
            "A traced region recomputes what some gradient needs, and has no code for the "
            "rest.",
            'Leave it out, or call checkpoint(..., engine="rerun"), which runs the whole '
            "function again.",
        )
    yield


@contextlib.contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Generator[None]:
    """Does nothing: there is one program, and no log to compare.

    Args:
        enabled: None and False have no effect, because they always hold.

    Warns:
        RematWarning: it is True, which has no effect.

    Example:
        >>> from remat.interop.torch import set_checkpoint_debug_enabled
        >>> with set_checkpoint_debug_enabled(None):
        ...     pass

    References:
        `torch.utils.checkpoint.set_checkpoint_debug_enabled` of torch 2.15.
    """
    if enabled:
        _has_no_effect(
            "set_checkpoint_debug_enabled(True)",
            "A recomputation is part of the program that was traced, and cannot go "
            "another way.",
            "Leave it out; to look for a nondeterministic kernel, use "
            "remat(verify=True).",
        )
    yield


@final
class GraphExecGroup:
    """In torch, backwards inside it recompute a region once; here each one does.

    Gradients are the same. A region is one node of the graph, and its recomputed values
    are freed when that node has run.

    Warns:
        RematWarning: it is entered, which has no effect.

    Example:
        >>> import warnings
        >>> from remat.interop.torch import GraphExecGroup
        >>> with warnings.catch_warnings(action="ignore"), GraphExecGroup():
        ...     pass

    References:
        `torch.utils.checkpoint.GraphExecGroup` of torch 2.15.
    """

    def __enter__(self) -> Self:
        """Warns."""
        _has_no_effect(
            "GraphExecGroup()",
            "A region is one node of the graph: each backward through it recomputes.",
            "Leave it out, and take gradients that share a region in one call.",
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Does nothing."""


@final
class CheckpointFunction:
    """The `autograd.Function` of torch's reentrant variant, for its `apply`.

    Example:
        >>> import torch
        >>> from remat.interop.torch import CheckpointFunction
        >>> x = torch.ones(3, requires_grad=True)
        >>> CheckpointFunction.apply(torch.sin, True, x).sum().backward()
        >>> x.grad.shape
        torch.Size([3])

    References:
        `torch.utils.checkpoint.CheckpointFunction` of torch 2.15.
    """

    @staticmethod
    def apply(
        run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any
    ) -> Any:
        """The same as `checkpoint(run_function, *args, use_reentrant=True)`.

        Args:
            run_function: what to run.
            preserve_rng_state: see `checkpoint`.
            *args: its arguments.

        Returns:
            What `run_function` returns.
        """
        return checkpoint(
            run_function,
            *args,
            use_reentrant=True,
            preserve_rng_state=preserve_rng_state,
        )


def _has_no_effect(where: str, why: str, do: str) -> None:
    warn(where=where, what="has no effect.", why=why, do=do)
