"""Trackers as the projects write them, each with states of its own kind."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch


class Tracker:
    """The way of `CudaRNGStatesTracker`, with the CPU's generator: states are tensors."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def get_states(self) -> dict[str, Any]:
        """A new dict of the very states, as Megatron's."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "tp") -> Generator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        watched = torch.get_rng_state()
        try:
            yield
        finally:
            # Megatron looks whether another device's generator has moved.
            self.has_moved = not torch.all(watched == torch.get_rng_state()).item()
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


class InPlace(Tracker):
    """Writes into the states that it once handed out, and hands out its own dict."""

    def get_states(self) -> dict[str, Any]:
        return self.states_

    @contextlib.contextmanager
    def fork(self, name: str = "tp") -> Generator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name].copy_(torch.get_rng_state())
            torch.set_rng_state(outside)


class GraphSafe(Tracker):
    """The states are generators, by reference, as in the variants for CUDA graphs."""

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = torch.Generator().manual_seed(seed)

    @contextlib.contextmanager
    def fork(self, name: str = "tp") -> Generator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name].get_state())
        try:
            yield
        finally:
            self.states_[name].set_state(torch.get_rng_state())
            torch.set_rng_state(outside)
