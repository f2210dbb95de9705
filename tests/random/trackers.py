"""Trackers as the projects write them, each with states of its own kind."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

DEVICE = torch.get_default_device()  # asked now: each thread has a default of its own


def generator_state() -> Tensor:
    """The state of the generator from which the tests draw."""
    if DEVICE.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(DEVICE).get_rng_state(DEVICE)


def set_generator_state(state: Tensor) -> None:
    if DEVICE.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(DEVICE).set_rng_state(state, DEVICE)


def new_generator(seed: int) -> torch.Generator:
    """One of that kind."""
    return torch.Generator(DEVICE).manual_seed(seed)


class Tracker:
    """The way of `CudaRNGStatesTracker`, on the tests' device: states are tensors."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def get_states(self) -> dict[str, Any]:
        """A new dict of the very states, as Megatron's."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = new_generator(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "tp") -> Generator[None]:
        outside = generator_state()
        set_generator_state(self.states_[name])
        watched = generator_state()
        try:
            yield
        finally:
            # Megatron looks whether another device's generator has moved.
            self.has_moved = not torch.all(watched == generator_state()).item()
            self.states_[name] = generator_state()
            set_generator_state(outside)


class InPlace(Tracker):
    """Writes into the states that it once handed out, and hands out its own dict."""

    def get_states(self) -> dict[str, Any]:
        return self.states_

    @contextlib.contextmanager
    def fork(self, name: str = "tp") -> Generator[None]:
        outside = generator_state()
        set_generator_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name].copy_(generator_state())
            set_generator_state(outside)


class GraphSafe(Tracker):
    """The states are generators, by reference, as in the variants for CUDA graphs."""

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = new_generator(seed)

    @contextlib.contextmanager
    def fork(self, name: str = "tp") -> Generator[None]:
        outside = generator_state()
        set_generator_state(self.states_[name].get_state())
        try:
            yield
        finally:
            self.states_[name].set_state(generator_state())
            set_generator_state(outside)
