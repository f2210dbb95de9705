"""The other names of `torch.utils.checkpoint`, for code that changes only its import.

Helpers do what torch's do. A switch for something that regions always do is silent; one
for something that they cannot do warns that it has no effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor

from remat._errors import explain
from remat._generators import recorded
from remat._messages import warn
from remat._torch import trees
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


def detach_variable(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same values, each tensor detached to a leaf that keeps its `requires_grad`.

    Args:
        inputs: tensors of any shapes, and other values.

    Returns:
        For each tensor one that shares its memory; all else as it is.

    Raises:
        TypeError: `inputs` is not a tuple.

    Example:
        >>> import torch
        >>> from remat.interop.torch import detach_variable
        >>> x, three = detach_variable((torch.ones(2, requires_grad=True) * 2, 3))
        >>> x.is_leaf, x.requires_grad, three
        (True, True, 3)

    References:
        `torch.utils.checkpoint.detach_variable` of torch 2.15.
    """
    if not isinstance(inputs, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"detach_variable takes a tuple, as in torch, and got a "
            f"{type(inputs).__name__}: write detach_variable((x,))."
        )
    return tuple(
        each.detach().requires_grad_(each.requires_grad)
        if isinstance(each, Tensor)
        else each
        for each in inputs
    )


def check_backward_validity(inputs: Iterable[Any]) -> None:
    """Warns if no tensor among some values requires grad.

    Args:
        inputs: tensors of any shapes, and other values.

    Warns:
        RematWarning: none does.

    Example:
        >>> import torch
        >>> from remat.interop.torch import check_backward_validity
        >>> check_backward_validity([torch.ones(2, requires_grad=True), 3])

    References:
        `torch.utils.checkpoint.check_backward_validity` of torch 2.15.
    """
    if not any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
        warn(
            where="check_backward_validity(...)",
            what="got no tensor that requires grad.",
            why="No gradient will flow to any of these.",
            do="Call requires_grad_() on a tensor that should be differentiated.",
        )


@final
class DefaultDeviceType:
    """The default kind of device of `set_device_states`.

    Regions do not use it: they record the states of each device that they draw from.

    Example:
        >>> from remat.interop.torch import DefaultDeviceType
        >>> DefaultDeviceType.set_device_type(DefaultDeviceType.get_device_type())

    References:
        `torch.utils.checkpoint.DefaultDeviceType` of torch 2.15.
    """

    _chosen: str | None = None

    @staticmethod
    def set_device_type(device: str = "cuda") -> None:
        """Chooses it.

        Args:
            device: the kind, such as "cuda".
        """
        DefaultDeviceType._chosen = device

    @staticmethod
    def get_device_type() -> str:
        """The chosen kind, or else this machine's accelerator, or else "cpu".

        Returns:
            The kind.
        """
        if DefaultDeviceType._chosen is None:
            here = torch.accelerator.current_accelerator(check_available=True)
            return "cpu" if here is None else here.type
        return DefaultDeviceType._chosen


def get_device_states(*args: Any) -> tuple[list[int], list[Tensor]]:
    """The states of the generators of the accelerators that some tensors are on.

    Args:
        *args: pytrees with tensors of any shapes; those on "cpu" and "meta" do not count.

    Returns:
        For each tensor the index of its device, and the state of the device's generator.

    Raises:
        ValueError: they are on two kinds of accelerators, which indices do not tell apart.

    Example:
        >>> import torch
        >>> from remat.interop.torch import get_device_states
        >>> get_device_states(torch.ones(2), {"x": torch.ones(2)})
        ([], [])

    References:
        `torch.utils.checkpoint.get_device_states` of torch 2.15.
    """
    devices = [
        leaf.device
        for leaf in trees.tensor_leaves(args)
        if leaf.device.type not in ("cpu", "meta")
    ]
    kinds = sorted({device.type for device in devices})
    if len(kinds) > 1:
        raise ValueError(
            explain(
                where="get_device_states(...)",
                what=f"got tensors on devices of the kinds {', '.join(kinds)}.",
                why="It returns device indices, which do not say the kind of device.",
                do="Call it for each kind.",
            )
        )
    return [device.index or 0 for device in devices], [*map(recorded.get, devices)]


def set_device_states(
    devices: Sequence[int],
    states: Sequence[Tensor],
    *,
    device_type: str | None = None,
) -> None:
    """Sets what `get_device_states` returned.

    Args:
        devices: indices of devices.
        states: for each the state of its generator.
        device_type: the kind of the devices; None: `DefaultDeviceType.get_device_type()`.

    Example:
        >>> from remat.interop.torch import get_device_states, set_device_states
        >>> set_device_states(*get_device_states(3))

    References:
        `torch.utils.checkpoint.set_device_states` of torch 2.15.
    """
    kind = device_type or DefaultDeviceType.get_device_type()
    for index, state in zip(devices, states, strict=False):
        recorded.put(state, torch.device(kind, index))


def _has_no_effect(where: str, why: str, do: str) -> None:
    warn(where=where, what="has no effect.", why=why, do=do)
