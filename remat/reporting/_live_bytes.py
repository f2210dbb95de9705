"""Measures the bytes of live storages, under every transform of torch.func.

A dispatch mode stands below the transforms and sees the plain tensors that each operator
takes and gives. It holds a weak reference to each storage: a storage counts once, however
many tensors view it, from the operator that made it until its memory is released.

Not seen: buffers that live only inside one kernel, and the allocator's rounding. Storages
that were there before count only from the first operator that touches them, so `ignore`
takes the tensors that should not count at all.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from remat._compat import TorchDispatchMode
from remat._watching import tensors_in


@final
class LiveBytes(TorchDispatchMode):
    """Counts, while it is active, the bytes of the storages that operators made.

    Args:
        ignore: tensors whose storages do not count: parameters, the batch.

    Attributes:
        current_bytes: what lives now.
        peak_bytes: the most that lived at one time since the start.

    Example:
        >>> with LiveBytes() as live:
        ...     x = torch.zeros(256)  # 1024 bytes
        ...     del x
        ...     y = torch.zeros(64).view(8, 8)
        >>> live.current_bytes, live.peak_bytes
        (256, 1024)
    """

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch's
        self.current_bytes = 0
        self.peak_bytes = 0
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignore}
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs the operator and counts the storages that it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta" or storage.data_ptr() in self._ignored:
            return
        key = weakref.ref(storage, self._forget)
        self.current_bytes += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _forget(self, key: weakref.ref[torch.UntypedStorage]) -> None:
        self.current_bytes -= self._sizes.pop(key)
