"""Modules that an engine of `torch.distributed` drives: none may be called inside a region.

Such an engine works in hooks around a module's forward. It gathers parameters there, and
asks autograd to be told when a gradient is there. A trace would run these hooks once and
never again, and `engine="rerun"` runs the function on stand-ins of the parameters, whose
gradients the engine never sees. So a gradient would be left out of the sum over the ranks,
without a word. A region *inside* such a module is fine: the hooks then run around it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Generator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from remat._errors import TraceError, explain

# Each module of torch's that has such classes, and their names. What has not been imported
# has no instances.
_CLASSES = {
    "torch.nn.parallel": "DistributedDataParallel",
    "torch.distributed.fsdp": "FSDPModule FullyShardedDataParallel",
}


@contextlib.contextmanager
def refused() -> Generator[None]:
    """Raises where this thread calls a module that an engine drives.

    Raises:
        TraceError: in front of the engine's own hooks, which so find all as it was.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if not (
        distributed and distributed.is_available() and distributed.is_initialized()
    ):
        yield
        return
    kinds = _kinds()
    thread = threading.get_ident()

    def refuse(module: nn.Module, _: Any) -> None:
        if isinstance(module, kinds) and threading.get_ident() == thread:
            raise _refusal(module)

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _kinds() -> tuple[type, ...]:
    return tuple(
        getattr(sys.modules[module], name)
        for module, names in _CLASSES.items()
        if module in sys.modules
        for name in names.split()
        if hasattr(sys.modules[module], name)
    )


def _refusal(module: nn.Module) -> TraceError:
    return TraceError(
        explain(
            where=f"a {type(module).__name__}",
            what="is called inside a region.",
            why="Hooks around its forward gather parameters or reduce gradients. In a "
            "region they would not see the gradients, which would be lost.",
            do="Put the regions inside: remat.modules.apply to it, or to its blocks.",
        )
    )
