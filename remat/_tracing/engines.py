"""Modules that an engine of `torch.distributed` drives: a region around them raises.

Such an engine gathers parameters in hooks around a module's forward, and asks autograd to be told
when a gradient is there. A trace would run these hooks once, and a region computes its backward on
stand-ins of the parameters: a gradient would be left out of the sum over the ranks, without a
word. A region *inside* such a module is fine, since the hooks run around it. Two engines do that
work in their own `forward`, in whose place a region is no region inside: it raises too.

`engine="rerun"` takes modules of `fully_shard`: see `_rerun.fully_shard`.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from remat._tracing.refusals import driven

# Each module of torch's that has such classes, and their names. What has not been imported
# has no instances.
_BY_FORWARD = (
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
)
_BY_HOOKS = (("torch.distributed.fsdp", "FSDPModule"),)


def refused() -> contextlib.AbstractContextManager[None]:
    """Raises in front of the hooks of an engine whose module this thread calls."""
    return around_driven(_refuse) if is_distributed() else contextlib.nullcontext()


def _refuse(module: nn.Module) -> None:
    raise driven(module)


def require_no_engine(function: object) -> None:
    """Raises where a function is the `forward` of a module that drives others by it."""
    module: Any = getattr(function, "__self__", None)
    if is_distributed() and isinstance(module, _imported_engines(_BY_FORWARD)):
        raise driven(module)


def is_distributed() -> bool:
    """Whether engines may drive modules: this process is in a world of `torch.distributed`."""
    distributed: Any = sys.modules.get("torch.distributed")
    is_there = distributed and distributed.is_available()
    return bool(is_there and distributed.is_initialized())


@contextlib.contextmanager
def around_driven(
    enter: Callable[[nn.Module], None], leave: Callable[[nn.Module], None] | None = None
) -> Generator[None]:
    """Calls these in front of this thread's calls of driven modules, and after them.

    `enter` goes before the engine's own hooks, and `leave` before those that let go of the
    gathered parameters.
    """
    kinds = _imported_engines(_BY_FORWARD + _BY_HOOKS)
    thread = threading.get_ident()

    def hook(run: Callable[[nn.Module], None], module: nn.Module, *_: Any) -> None:
        if isinstance(module, kinds) and threading.get_ident() == thread:
            run(module)

    with contextlib.ExitStack() as stack:
        before = functools.partial(hook, enter)
        stack.enter_context(register_module_forward_pre_hook(before))
        if leave:
            after = functools.partial(hook, leave)
            stack.enter_context(register_module_forward_hook(after))
        yield


def _imported_engines(classes: Iterable[tuple[str, str]]) -> tuple[type, ...]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in classes)
    return tuple(filter(None, found))
