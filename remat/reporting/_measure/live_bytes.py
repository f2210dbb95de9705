"""Measures the bytes of live storages, under every transform of torch.func.

A dispatch mode below the transforms sees the plain tensors that each operator takes and
returns. It holds a weak reference to each storage. A storage counts once, however many
tensors view it, from the operator that made it until its memory is released.

Not seen: buffers that live only inside one kernel, and the allocator's rounding. An
accelerator's allocator sees both, but not whose they are: its peak is read beside.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, final

import torch

from remat._partition.costs import finish_work
from remat._regions.waiting import storages
from remat._torch import modes, trees


@final
class LiveBytes(modes.DispatchMode):
    """Counts, while it is active, the bytes of the storages that operators make.

    It measures any call: a gradient of `torch.func`, a whole training step, a solver.
    Arguments, parameters and other tensors that existed before do not count, nor do the
    tensors of a trace, which have no data. Tensors made from Python or numpy numbers
    (`torch.tensor(...)`) are not made by an operator, and do not count either.

    Attributes:
        current_bytes: what lives now.
        peak_bytes: the most that lived at one time since the start.

    Example:
        >>> import torch
        >>> with LiveBytes() as live:
        ...     x = torch.zeros(256)  # 1024 bytes
        ...     del x
        ...     y = torch.zeros(64).view(8, 8)
        >>> live.current_bytes, live.peak_bytes
        (256, 1024)
    """

    def __init__(self) -> None:
        super().__init__()
        self.current_bytes = 0
        self.peak_bytes = 0
        # The bytes of each; None of those that were there before.
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int | None] = {}

    def _hear(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operator and counts the storages that it makes."""
        for tensor in trees.tensor_leaves((args, kwargs)):
            for storage in storages(tensor):
                self._sizes.setdefault(weakref.ref(storage, self._forget), None)
        result = modes.run_in_mode(op, args, kwargs)
        for tensor in trees.tensor_leaves(result):
            for storage in storages(tensor):
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = weakref.ref(storage, self._forget)
        known = self._sizes.get(key, 0)
        if storage.device.type == "meta" or known is None:
            return
        self.current_bytes += storage.nbytes() - known
        self._sizes[key] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _forget(self, key: weakref.ref[torch.UntypedStorage]) -> None:
        self.current_bytes -= self._sizes.pop(key) or 0


def allocator_peak(devices: Iterable[torch.device]) -> Callable[[], int | None]:
    """Begins to measure what a step adds to the memory of accelerators, all together.

    The result tells the peak so far, None without an accelerator whose allocator counts.
    The allocator keeps one peak per device, which is reset here: what `torch.accelerator.
    max_memory_allocated` recorded of earlier steps is lost.
    """
    modules: list[tuple[Any, torch.device]] = [
        (getattr(torch, device.type, None), device) for device in devices
    ]
    counting = [each for each in modules if hasattr(each[0], "max_memory_allocated")]
    finish_work(device for _, device in counting)  # what it still reads is not free yet
    before = sum(module.memory_allocated(device) for module, device in counting)
    for module, device in counting:
        module.reset_peak_memory_stats(device)

    def peak() -> int | None:
        most = sum(module.max_memory_allocated(device) for module, device in counting)
        return most - before if counting else None

    return peak
