"""Copies between an accelerator and host memory, while the accelerator computes.

There is a stream for each direction, so that neither copy waits for the other, and the
compute stream waits only when it reads what came back. Copies overlap only with
page-locked memory, which comes from a pool that is reused in each step, because locking
pages is slow. The scheme is vDNN's (`_offload`).

Only the device's streams order the work: the host never waits, except when another
storage reads what was sent (`Lane.settle`).
"""

import collections
import contextlib
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

_MOST_WASTE = 1.25  # a heuristic: how much larger than a value its buffer may be


@final
@dataclass(eq=False)
class Buffer:
    """Host memory for one value at a time, read until an event, if by anything."""

    memory: Tensor
    is_read_until: Any = None


@final
@dataclass(eq=False)
class Lease:
    """The use of a buffer, which returns to its pool when this is freed."""

    buffer: Buffer


_size_of_buffer = operator.attrgetter("memory.nbytes")


@final
class Pool:
    """Buffers that are used again, and never hold more than was in use at one time.

    A value gets the smallest free buffer that is at most a quarter larger than it. Where
    there is none, free ones of at least its size are dropped and a new one is made: the
    pool's size stays within the largest size of all buffers in use at one time.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: list[Buffer] = []
        # Any thread that collects garbage may fill it, so it must need no lock.
        self._returned: collections.deque[Buffer] = collections.deque()
        self.size_bytes = 0  # of all its buffers, in use and free
        self.num_made = 0  # how many buffers, ever

    def lease(self, num_bytes: int) -> Lease:
        """A buffer for a value of so many bytes."""
        with self._lock:
            self._take_back()
            most = num_bytes * _MOST_WASTE
            fits = [b for b in self._free if num_bytes <= b.memory.nbytes <= most]
            buffer = min(fits, key=_size_of_buffer, default=None)
            if buffer is None:
                self._drop(num_bytes)
                self.size_bytes += num_bytes
                self.num_made += 1
                buffer = Buffer(self._allocate(num_bytes))
            else:
                self._free.remove(buffer)
            lease = Lease(buffer)
        # At the end of the process no step is left that could use the memory.
        weakref.finalize(lease, self._returned.append, lease.buffer).atexit = False
        return lease

    def clear(self) -> None:
        """Drops the buffers that nothing uses."""
        with self._lock:
            self._take_back()
            self._drop(self.size_bytes)

    def _take_back(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())

    def _drop(self, num_bytes: int) -> None:
        """Drops free buffers, the largest first, until they come to so many bytes."""
        self._free.sort(key=_size_of_buffer)
        dropped = 0
        while self._free and dropped < num_bytes:
            dropped += self._free.pop().memory.nbytes
        self.size_bytes -= dropped


@final
class Driver:
    """The interface of an accelerator: the module that torch has for it."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device

    def new_stream(self) -> Any:
        return self._module.Stream(self._device)

    def current_stream(self) -> Any:
        return self._module.current_stream(self._device)

    def running_on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return self._module.stream(stream)

    def is_used_on(self, tensor: Tensor, stream: Any) -> None:
        """Tells the allocator not to reuse memory before a stream is done with it."""
        tensor.record_stream(stream)


@final
class Lane:
    """Copies between one device and the host memory of a pool, in both directions."""

    def __init__(self, driver: Any, device: torch.device, pool: Pool) -> None:
        self._driver = driver
        self._device = device
        self._there = driver.new_stream()
        self._back = driver.new_stream()
        self.pool = pool

    def send(self, value: Tensor) -> Tensor:
        """Starts to copy a contiguous value to host memory; does not wait for it."""
        lease = self.pool.lease(value.nbytes)
        memory = lease.buffer.memory[: value.nbytes]
        host: Any = memory.view(value.dtype).view(value.shape)
        host.lease = lease  # the buffer is in use for as long as the tensor is
        if lease.buffer.is_read_until is not None:
            self._there.wait_event(lease.buffer.is_read_until)
        self._there.wait_stream(self._driver.current_stream())
        with self._driver.running_on(self._there):
            host.copy_(value, non_blocking=True)
        self._driver.is_used_on(value, self._there)
        return host

    def settle(self) -> None:
        """Waits, on the host, for the copies that were sent."""
        self._there.synchronize()

    def fetch(self, parts: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Starts to copy values back; the result makes the compute stream wait."""
        self._back.wait_stream(self._there)
        with self._driver.running_on(self._back):
            values = [part.to(self._device, non_blocking=True) for part in parts]
            arrived = self._back.record_event()
        for part in parts:
            lease: Lease | None = getattr(part, "lease", None)
            if lease is not None:
                lease.buffer.is_read_until = arrived

        def end() -> Sequence[Tensor]:
            current = self._driver.current_stream()
            current.wait_event(arrived)
            for value in values:
                self._driver.is_used_on(value, current)
            return values

        return end


@final
@dataclass(frozen=True, slots=True)
class Fetch:
    """Brings values back along a lane, of any number of them at once."""

    lane: Lane
    num_ahead: int

    def start(self, parts: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Begins to copy; see `Lane.fetch`."""
        return self.lane.fetch(parts)


def has_streams(device: torch.device) -> bool:
    """Whether copies from a device can overlap with its computation."""
    if device.type in ("cpu", "meta"):
        return False
    return hasattr(torch.get_device_module(device), "Stream")


_lanes: dict[tuple[torch.device, bool], Lane] = {}


def lane_of(device: torch.device, pin: bool) -> Lane:
    """The lane of a device, made when it is first used."""
    key = (device, pin)
    if key not in _lanes:
        pool = Pool(functools.partial(_memory_for_transfer, pin=pin))
        _lanes.setdefault(key, Lane(Driver(device), device, pool))
    return _lanes[key]


def release_host_memory() -> None:
    """Drops the page-locked host memory of `Offload` in which nothing waits.

    Otherwise it is kept for the next step; it is never more than was in use at one
    time.

    Example:
        >>> from remat import storage
        >>> storage.release_host_memory()
    """
    for lane in _lanes.values():
        lane.pool.clear()


def _memory_for_transfer(num_bytes: int, *, pin: bool) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
