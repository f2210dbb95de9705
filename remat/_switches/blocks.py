"""Blocks that change what regions do: `disabled()` and `first_order()`; and those of plans.

The two are seldom entered, but each call of a region has to ask for both. One number answers
for all threads: zero means that no such block is open.

`torch.func.grad` records every backward in case somebody differentiates it, and the record
holds the backward's cotangents until the whole gradient is done. Under `first_order()` there
will be no second derivative, and the cotangents are freed at once.
"""

import contextlib
import os
import threading
import types
from collections.abc import Callable, Generator
from typing import Any, final

import torch

from remat._torch.attributes import attributes_as

# From a region, args and kwargs to what stands for the result of the call.
Instead = Callable[[Any, tuple[Any, ...], Any], Any]

_DISABLED = os.environ.get("REMAT_DISABLE", "0") not in ("", "0")

# `count` is of the open blocks on all threads, so that the fast path tests one integer.
departures = types.SimpleNamespace(count=0)
_lock = threading.Lock()


@contextlib.contextmanager
def departing() -> Generator[None]:
    """Counts as a block of this module: calls inside take no fast path, and ask what is in force."""
    with _lock:
        departures.count += 1
    try:
        yield
    finally:
        with _lock:
            departures.count -= 1


@final
class _OfThread(threading.local):
    def __init__(self) -> None:
        # On the instance, where Dynamo notices a change.
        # Blocks that generators open need not end in the reverse order: these are counts.
        self.disabled = 0
        self.first_order = 0
        self.instead: Instead | None = None  # what stands in for regions
        self.tiled: dict[int, Any] | None = None  # where tiled calls are noted


_here = _OfThread()


@contextlib.contextmanager
def _one_more(kind: str) -> Generator[None]:
    """A block of this kind, on this thread, until the `with` statement ends."""
    setattr(_here, kind, getattr(_here, kind) + 1)
    try:
        with departing():
            yield
    finally:
        setattr(_here, kind, getattr(_here, kind) - 1)


@contextlib.contextmanager
def disabled() -> Generator[None]:
    """Runs every region inside as the plain function, on this thread.

    The environment variable `REMAT_DISABLE=1` does the same for a whole process.

    Example:
        >>> import torch
        >>> from remat import disabled, remat
        >>> f = remat(lambda x: x.sin().sin())
        >>> with disabled():
        ...     y = f(torch.ones(2, requires_grad=True))
        >>> y.grad_fn.name()
        'SinBackward0'
    """
    with _one_more("disabled"):
        yield


@contextlib.contextmanager
def first_order() -> Generator[None]:
    """Gives regions called inside, on this thread, first derivatives only.

    Under `torch.func.grad`, `vjp` and `jacrev`, and under `backward(create_graph=True)`, a
    region's backward then holds no cotangent after its use: the peak is lower by one
    set of cotangents a region. Elsewhere nothing changes.

    Laws: gradients are the same to the bit. Reverse mode over the gradient of such a
    region raises, and is never silently zero; forward mode over it still works.

    Raises:
        SecondDerivativeError: when the gradient of a region that was called inside is
            itself differentiated in reverse mode.

    Example:
        >>> import torch
        >>> from remat import first_order, remat
        >>> f = remat(lambda x: x.sin().sin().sum())
        >>> with first_order():
        ...     slope = torch.func.grad(f)(torch.zeros(3))
        >>> slope
        tensor([1., 1., 1.])
    """
    with _one_more("first_order"):
        yield


def is_disabled() -> bool:
    """Whether regions run as the plain function on this thread, as in `torch.export`.

    An exported program is a forward, for any size that is left open.
    """
    return _DISABLED or _here.disabled > 0 or torch.compiler.is_exporting()


def is_inert() -> bool:
    """Whether regions run as the plain function here, whatever the arguments."""
    return (
        is_disabled()
        or not torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
    )


@contextlib.contextmanager
def standing_in(instead: Instead | None) -> Generator[None]:
    """Has a function give what each region that is called inside, on this thread, returns.

    With None, regions are themselves again.
    """
    with attributes_as(_here, instead=instead), departing():
        yield


def stand_in() -> Instead | None:
    """What stands in for regions on this thread, if anything does."""
    return _here.instead


@contextlib.contextmanager
def noting_tiled() -> Generator[dict[int, Any]]:
    """Collects what is called inside, on this thread, and has a number of `tiles`, by identity."""
    found: dict[int, Any] = {}
    with attributes_as(_here, tiled=found):
        yield found


def note_tiled(owner: Any) -> None:
    """Notes a call of what runs in `owner.tiles` tiles, which a plan may change."""
    if _here.tiled is not None:
        _here.tiled[id(owner)] = owner


def is_first_order() -> bool:
    """Whether this thread wants no second derivative of the regions it calls."""
    return _here.first_order > 0
