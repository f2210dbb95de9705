"""Trackers: tables from a name to a generator's state, as Megatron and TransformerEngine use.

Which are registered, and their states by value.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from remat._torch import isolation, modes


class Tracker(Protocol):
    """What can be registered; its states are tensors, or generators that hold them."""

    def get_states(self) -> Mapping[str, Any]:
        """The states by name."""
        ...

    def set_states(self, states: dict[str, Any], /) -> None:
        """Replaces all states."""
        ...


# By the number of the registration; a trace holds under those that it was made under.
registered: OrderedDict[int, Tracker] = OrderedDict()


def register_tracker(tracker: Tracker) -> RemovableHandle:
    """Has regions with `rng="preserve"` keep the states of a tracker.

    A tracker is any object with `get_states()`, which returns a dict from names to
    generator states, and `set_states(states)`, which takes one: `CudaRNGStatesTracker` of
    Megatron and of TransformerEngine, whose `fork(name)` draws from a named state. The
    states are tensors, as `torch.get_rng_state()` returns them, or generators of torch.

    Laws: a region takes the states by value when it is called; its recomputation draws the
    same numbers from them, and leaves the tracker as it found it; the forward moves it as
    without remat. With `engine="trace"` the states of a tracker are stand-ins while a
    function is traced: a fork means the state of that name, whatever that is at the call,
    and no other thread may fork meanwhile. What a function does to a tracker besides
    forking it needs `engine="rerun"`.

    Args:
        tracker: what to register; it is held until its registration ends.

    Returns:
        The registration, to end by `.remove()`; or a context manager that does.

    Raises:
        TypeError: it lacks one of the two methods, or has a state that is neither.
        ValueError: it is registered already.

    Example:
        >>> import torch
        >>> from remat import random
        >>> class Tracker:
        ...     def __init__(self):
        ...         self.states = {}
        ...     def get_states(self):
        ...         return dict(self.states)
        ...     def set_states(self, states):
        ...         self.states = states
        >>> with random.register_tracker(Tracker()):
        ...     pass  # train

    References:
        `megatron.core.tensor_parallel.random` and
        `transformer_engine.pytorch.distributed`, which save all states before a checkpoint
        and put them back around its recomputation.
    """
    kind = type(tracker).__name__
    for name in ("get_states", "set_states"):
        if not callable(getattr(tracker, name, None)):
            raise TypeError(
                "random.register_tracker takes an object with get_states() and "
                f"set_states(states); this {kind} has no {name}."
            )
    if is_tracker(tracker):
        raise ValueError(
            f"This {kind} is registered already: end that registration by its handle's "
            "remove() first."
        )
    for name, held in tracker.get_states().items():
        if not isinstance(held, (Tensor, torch.Generator)):
            raise TypeError(
                f"The state {name!r} of this {kind} is a {type(held).__name__}: it must be "
                "a tensor, as torch.get_rng_state() returns it, or a torch.Generator."
            )
    handle = RemovableHandle(registered)
    registered[handle.id] = tracker
    return handle


def is_tracker(value: object) -> bool:
    return number_of(value) is not None


def number_of(value: object) -> int | None:
    """The number of a tracker's registration, None of what is not registered."""
    held = (number for number, each in registered.items() if each is value)
    return next(held, None)


@contextlib.contextmanager
def plainly() -> Generator[None]:
    """Runs the body, which handles a tracker's states, outside transforms, traces and modes."""
    with isolation.isolated(), modes.unseen_by_traces():
        yield


def recorded() -> Callable[[], None]:
    """What sets all registered trackers to the states, by value, that they have now."""
    found = [
        (each, {name: (held, state_of(held)) for name, held in states.items()})
        for each in registered.values()
        for states in [each.get_states()]
    ]

    def put_back() -> None:
        for tracker, states in found:
            tracker.set_states(
                {name: state_for(held, value) for name, (held, value) in states.items()}
            )

    return put_back


def state_of(held: Any) -> Tensor:
    """The state in what a tracker holds, as a tensor of our own."""
    if isinstance(held, torch.Generator):
        return held.get_state()
    with plainly():
        return held.clone()


def state_for(held: Any, value: Tensor) -> Any:
    """What a tracker should hold in place of `held` to have a state."""
    if isinstance(held, torch.Generator):
        held.set_state(value)
        return held
    with plainly():
        return value.clone()
