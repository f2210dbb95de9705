"""`torch.standin`: what torch offers for a device, as `torch.cuda` does for CUDA."""

import contextlib
from typing import Any

import torch

DEVICE_COUNT = 2

Stream = torch.Stream
Event = torch.Event

#: The generators from which the devices draw unless told otherwise.
default_generators: tuple[torch.Generator, ...] = ()


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return DEVICE_COUNT


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def device(device: Any) -> contextlib.AbstractContextManager[None]:
    """Makes a device the current one."""
    return torch.accelerator.device_index(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def stream(stream: torch.Stream) -> torch.Stream:
    """Makes a stream the current one, in a `with`."""
    return stream


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


# What torch counts for any accelerator.
memory_allocated = torch.accelerator.memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_allocated = torch.accelerator.max_memory_allocated
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
mem_get_info = torch.accelerator.get_memory_info


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def get_rng_state(device: Any = None) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    default_generators[_index(device)].set_state(state)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


manual_seed = manual_seed_all


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index
