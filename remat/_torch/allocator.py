"""What a run takes from the allocator of its device, buffers inside kernels included.

Obsolete when torch counts for CPUs what `torch.cuda.memory_stats` does.
"""

# pyright: reportPrivateUsage=false
import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

_ALLOCATED = "allocated_bytes.all.allocated"

_autograd: Any = cast("Any", torch.autograd)


def is_profiled() -> bool:
    """Whether a profiler runs on this thread, beside which no other can."""
    return _autograd._profiler_enabled()


def most_allocated(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that a run allocated at one time.

    Of an accelerator all that it allocated, at one time or not; 0 where its allocator does not count.
    """
    if device.type != "cpu":
        before = _allocated_so_far(device)
        run()
        return _allocated_so_far(device) - before
    # Unlike `torch.profiler`, this one prints nothing, and fails where another one runs.
    config = ProfilerConfig(
        ProfilerState.CPU,
        report_input_shapes=False,
        profile_memory=True,
        with_stack=False,
        with_flops=False,
        with_modules=False,
        experimental_config=_ExperimentalConfig(),
    )
    _autograd._enable_profiler_legacy(config)
    try:
        run()
    finally:
        events = itertools.chain(*_autograd._disable_profiler_legacy())
    changes = [e.cpu_memory_usage() for e in events if e.kind() == "memory_alloc"]
    return max(itertools.accumulate(changes), default=0)


def _allocated_so_far(device: torch.device) -> int:
    module: Any = torch.get_device_module(device)
    counts = hasattr(module, "memory_stats")
    return module.memory_stats(device).get(_ALLOCATED, 0) if counts else 0
