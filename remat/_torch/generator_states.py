"""The states of default generators: who asks for one, or sets one, by torch's functions for it."""

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any, final

import torch
from torch import Tensor

from remat._torch.attributes import attributes_as

#: Takes a kind of device and the state that is handed out, or set; None for one made of a seed.
Note = Callable[[str, Tensor | None], None]


@final
class _Watched:
    """What `torch.random`'s functions take for the CPU's generator."""

    def __init__(self, generator: Any, got: Note, put: Note) -> None:
        self._generator, self._got, self._put = generator, got, put

    def get_state(self) -> Tensor:
        state = self._generator.get_state()
        self._got("cpu", state)
        return state

    def set_state(self, state: Tensor) -> Any:
        self._put("cpu", state)
        return self._generator.set_state(state)

    def manual_seed(self, seed: int) -> Any:
        self._put("cpu", None)
        return self._generator.manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def _watched_functions(module: Any, kind: str, got: Note, put: Note) -> dict[str, Any]:
    """The functions of an accelerator's module, in the same way."""

    def get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
        state = getting(*args, **kwargs)
        got(kind, state)
        return state

    def set_rng_state(new_state: Tensor, *args: Any, **kwargs: Any) -> Any:
        put(kind, new_state)
        return setting(new_state, *args, **kwargs)

    getting, setting = module.get_rng_state, module.set_rng_state
    return {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state}


@contextlib.contextmanager
def watched(got: Note, put: Note, kinds: Iterable[str]) -> Generator[None]:
    """Inside, whoever asks torch for the state of a default generator, or sets it, is noted.

    On any thread. A generator's own methods are not seen. Obsolete when these are torch functions.
    """
    random: Any = torch.random
    instead = _Watched(random.default_generator, got, put)
    with contextlib.ExitStack() as stack:
        stack.enter_context(attributes_as(random, default_generator=instead))
        for kind in kinds:
            module = getattr(torch, kind)
            functions = _watched_functions(module, kind, got, put)
            stack.enter_context(attributes_as(module, **functions))
        yield
