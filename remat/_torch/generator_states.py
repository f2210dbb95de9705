"""The states of default generators: who asks for one, or sets one, by torch's functions for it."""

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from remat._torch.attributes import attributes_as

#: Takes a kind of device and the state that is handed out, or set; None for one made of a seed.
Note = Callable[[str, Tensor | None], None]


class _Watcher(NamedTuple):
    got: Note
    put: Note


class _Thread(threading.local):
    watchers: tuple[_Watcher, ...] = ()  # of the open blocks


_thread = _Thread()
_lock = threading.Lock()
# How to put back what stood there, once for each block that is open on any thread.
_open_blocks: list[contextlib.ExitStack] = []


def _got(kind: str, state: Tensor) -> Tensor:
    for each in _thread.watchers:
        each.got(kind, state)
    return state


def _put(kind: str, state: Tensor | None) -> None:
    for each in _thread.watchers:
        each.put(kind, state)


@final
class _Watched:
    """What `torch.random`'s functions take for the CPU's generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def get_state(self) -> Tensor:
        return _got("cpu", self._generator.get_state())

    def set_state(self, state: Tensor) -> torch.Generator:
        _put("cpu", state)
        return self._generator.set_state(state)

    def manual_seed(self, seed: int) -> torch.Generator:
        _put("cpu", None)
        return self._generator.manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def _watched_functions(module: Any, kind: str) -> dict[str, Any]:
    """The functions of an accelerator's module, in the same way."""
    getting, setting = module.get_rng_state, module.set_rng_state

    def get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
        return _got(kind, getting(*args, **kwargs))

    def set_rng_state(new_state: Tensor, *args: Any, **kwargs: Any) -> Any:
        _put(kind, new_state)
        return setting(new_state, *args, **kwargs)

    return {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state}


def _install(stack: contextlib.ExitStack) -> None:
    random: Any = torch.random
    watched = _Watched(random.default_generator)
    stack.enter_context(attributes_as(random, default_generator=watched))
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        module = getattr(torch, accelerator.type)
        functions = _watched_functions(module, accelerator.type)
        stack.enter_context(attributes_as(module, **functions))


@contextlib.contextmanager
def watched(got: Note, put: Note) -> Generator[None]:
    """Inside, a function of this thread that asks for a default generator's state, or sets it, is noted.

    A generator's own methods are not seen. Obsolete when these are torch functions.
    """
    with _lock:
        _open_blocks.append(contextlib.ExitStack())
        if len(_open_blocks) == 1:
            _install(_open_blocks[0])
    try:
        watchers = (*_thread.watchers, _Watcher(got, put))
        with attributes_as(_thread, watchers=watchers):
            yield
    finally:
        with _lock:
            _open_blocks.pop().close()


def unwatched() -> contextlib.AbstractContextManager[None]:
    """Notes nothing of this thread inside: what runs there is not the user's."""
    return attributes_as(_thread, watchers=())
