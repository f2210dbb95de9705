"""Generator states as values: recorded before a draw, put back around its redraw.

A recomputed draw reads the state from which its first run started. So it gives the same
numbers even if other draws are left out because nothing reads them. The generator itself is
left as it was found. The state of a CPU generator is 5,056 bytes, that of an accelerator's 16.
Tensors on "meta" have no numbers, and a draw there no generator: its state is empty.
"""

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch.fx.node import has_side_effect

from remat._torch import generator_states, levels, schemas

_SIZE_OF_CPU, _SIZE = SIZES = 5056, 16  # in bytes: a CPU's, an accelerator's


def _module(kind: str) -> Any:
    """What torch offers for the generators of an accelerator."""
    return getattr(torch, kind, None)


def has(device: torch.device) -> bool:
    """Whether a device has a generator, and can be asked for its state here."""
    if device.type == "cpu":
        return True
    module = _module(device.type)
    return hasattr(module, "get_rng_state") and module.is_available()


def is_default(generator: torch.Generator) -> bool:
    """Whether a generator is the one that a device draws from unless told otherwise."""
    kind = generator.device.type
    if kind == "cpu":
        return generator is torch.default_generator
    return generator in _module(kind).default_generators


def get(device: torch.device) -> torch.Tensor:
    """The state of a device's generator, by value; no operator."""
    if device.type == "meta":
        return torch.empty(0, dtype=torch.uint8)
    if device.type == "cpu":
        return torch.default_generator.get_state()
    with generator_states.unwatched():
        return _module(device.type).get_rng_state(device)


def put(state: torch.Tensor, device: torch.device) -> None:
    """Sets the state of a device's generator; no operator."""
    if device.type == "cpu":
        torch.default_generator.set_state(state)
    elif device.type != "meta":
        with generator_states.unwatched():
            _module(device.type).set_rng_state(state, device)


@contextlib.contextmanager
def put_back(devices: Iterable[torch.device]) -> Generator[None]:
    """Puts the generators of the CPU and of these devices back at the end."""
    states = {each: get(each) for each in filter(has, {torch.device("cpu"), *devices})}
    try:
        yield
    finally:
        for device, state in states.items():
            put(state, device)


def _swap(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    found = get(device)
    put(state, device)
    return found


def fake_state(device: torch.device) -> torch.Tensor:
    """A tensor like the state of a device's generator."""
    return torch.empty(size_bytes(device), dtype=torch.uint8)


def size_bytes(device: torch.device) -> int:
    return {"cpu": _SIZE_OF_CPU, "meta": 0}.get(device.type, _SIZE)


def _fake_swap(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(state)


STATE = schemas.define("rng_state", "(Device device) -> Tensor", get, fake_state)
SWAP = schemas.define(
    "rng_swap", "(Tensor state, Device device) -> Tensor", _swap, _fake_swap
)
has_side_effect(STATE)
has_side_effect(SWAP)


def record(device: torch.device) -> torch.Tensor:
    """The generator state of a device, by value."""
    with levels.leave_functorch():
        return STATE(device)


def swap(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Sets a state and returns the one that it replaces."""
    with levels.leave_functorch():
        return SWAP(state, device)
