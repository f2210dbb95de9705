"""Catches a key that is consumed twice: two draws that should differ but do not.

The record is kept by the data of the key, in the kernels of the draws: below every
transform there are only plain tensors. So a key is recognized however it was passed around,
and mapped keys are seen one by one.
"""

import contextlib
import threading
from collections.abc import Generator
from typing import Any, cast

import torch
from torch import Tensor

from remat._errors import KeyReuseError
from remat._switches.blocks import disabled
from remat._torch import autograd
from remat._torch.attributes import attributes_as
from remat._user_lines import user_line

# The bits of (seed, offset) -> the line that consumed them.
_Record = dict[tuple[int, int], str]


class _Thread(threading.local):
    record: _Record | None = None


_thread = _Thread()


@contextlib.contextmanager
def checking() -> Generator[None]:
    """Raises if a key is consumed twice inside this context, on this thread.

    `split` and every draw consume their key. `fold_in` does not: it may derive any
    number of keys from one. Keys are compared by their contents, so folding the same
    number into a key twice gives the same key. Draws in a backward are recomputations,
    not reuse. A block within another shares its record: each sees the other's uses.

    This is for tests: each key is copied from its device. Regions inside run as plain
    functions, as under `remat.disabled()`, so that each draw has its own line. Code
    that `torch.compile` has compiled counts as one line.

    Raises:
        KeyReuseError: where a key is consumed again; it names both lines.

    Example:
        >>> from remat import KeyReuseError, random
        >>> key = random.key(0)
        >>> with random.checking():
        ...     noise = random.normal(key, (2,))
        ...     try:
        ...         mask = random.bernoulli(key, (2,))
        ...     except KeyReuseError:
        ...         print("split it first")
        split it first

    References:
        `jax.experimental.key_reuse`.
    """
    record = {} if _thread.record is None else _thread.record
    with attributes_as(_thread, record=record), disabled():
        yield


def consume(keys: Tensor) -> None:
    """Records that each key of shape (key, 2) was consumed by the line that runs."""
    record = _thread.record
    if record is None or autograd.in_backward():
        return
    line = user_line()
    # As int64: torch 2.13 cannot read every uint64 back.
    for pair in cast("Any", keys.view(torch.int64)).tolist():
        key = (pair[0] % 2**64, pair[1] % 2**64)
        if key in record:
            raise KeyReuseError.of(
                where=f"the key {list(key)}, consumed at {line}",
                what=f"was consumed before, at {record[key]}.",
                why="Both draws have the same bits, so numbers that should be "
                "independent are equal.",
                do="Split it once, k1, k2 = random.split(key), or derive a key for each "
                "use, random.fold_in(key, 0) and random.fold_in(key, 1).",
            )
        record[key] = line
