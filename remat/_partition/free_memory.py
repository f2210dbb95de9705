"""How many bytes are free: on a device, or to the process."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_CGROUPS = (  # limit and use: the second version's names, then the first's
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free_bytes(device: torch.device) -> int:
    """Bytes that are still free on a device.

    On an accelerator that tells it: what the driver has free, and what torch's allocator
    keeps unused. Elsewhere: the least of what the machine has available, what the
    process's control group has left, and what its limit of address space has.
    """
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "mem_get_info"):
        free, _ = module.mem_get_info(device)
        return free + module.memory_reserved(device) - module.memory_allocated(device)
    return min(limits(Path("/")))


def limits(root: Path) -> Iterator[int]:
    """What each limit on this process leaves; `root` is where the system's files are."""
    available = root / "proc/meminfo"
    if available.exists():
        for line in available.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
    for names in _CGROUPS:
        most, taken = (root / "sys/fs/cgroup" / name for name in names)
        if most.exists() and taken.exists() and most.read_text().strip() != "max":
            yield max(0, int(most.read_text()) - int(taken.read_text()))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = root / "proc/self/statm"
    if space != resource.RLIM_INFINITY:
        taken = int(pages.read_text().split()[0]) if pages.exists() else 0
        yield max(0, space - taken * resource.getpagesize())
