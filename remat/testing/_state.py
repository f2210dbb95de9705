"""What a function may change beyond its arguments: captured tensors and generators."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterable
from typing import Any, final

import torch
from torch import Tensor

from remat import _captures


def captured(*functions: Callable[..., Any]) -> dict[str, Tensor]:
    """The tensors that functions reach, by their path in words."""
    survey = _captures.Survey(tuple(map(inspect.unwrap, functions)))
    return {str(node.label): node.value for node, *_ in survey.tensors.values()}


@final
class State:
    """The state from which every run starts: what `functions` reach, and the generators.

    It is found by the same walk by which a region finds its captured state, so it
    leaves out what a region could not know either.
    """

    def __init__(
        self, functions: Iterable[Callable[..., Any]], devices: set[torch.device]
    ) -> None:
        self._functions = [*map(inspect.unwrap, functions)]
        self._survey = _captures.Survey(tuple(self._functions))
        self._numbers = [(each, each.detach().clone()) for each in self._survey.reached]
        self._devices = [each for each in devices if each.type != "cpu"]
        self._cpu = torch.get_rng_state()

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Inside, the state may change; afterwards it is restored."""
        with torch.random.fork_rng(self._devices, device_type=self._device_type):  # pyright: ignore[reportUnknownMemberType]
            torch.set_rng_state(self._cpu)
            try:
                yield
            finally:
                self._survey.restore(self._numbers)

    @property
    def _device_type(self) -> str:
        return self._devices[0].type if self._devices else "cuda"

    def seen(self) -> dict[str, Tensor]:
        """What the tensors that either function reaches and the generator are now."""
        reached = captured(*self._functions)
        found = {label: tensor.detach().clone() for label, tensor in reached.items()}
        return found | {"the default generator": torch.get_rng_state()}
