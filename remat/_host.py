"""Python's own generator and numpy's: no tensor comes of them, but what is computed may.

A number that a function draws from these decides which layer it leaves out, say. A trace
keeps what it drew, and warns; a function that runs again draws the same again.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Generator
from typing import Any

from remat._lines import warn

_said: set[str] = set()


def states() -> tuple[Any, ...]:
    """Both states by value; None for numpy's where it is not loaded."""
    numpy = sys.modules.get("numpy.random")
    # Pickled, a state is a copy that compares, whatever generator numpy was given.
    there = None if numpy is None else pickle.dumps(numpy.get_state(legacy=False))
    return random.getstate(), there


@contextlib.contextmanager
def set_to(found: tuple[Any, ...] | None) -> Generator[None]:
    """Inside, draws start from these states, then go on from their own; None does nothing."""
    if found is None:
        yield
        return
    before = states()
    _put(found)
    try:
        yield
    finally:
        _put(before)


def _put(found: tuple[Any, ...]) -> None:
    python, numpy = found
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy.random"].set_state(pickle.loads(numpy))


@contextlib.contextmanager
def told(where: str) -> Generator[None]:
    """Warns if something was drawn inside, where a function is traced; once a function."""
    before = states()
    yield
    # No error: another thread may have drawn, a data loader's say.
    if before == states() or where in _said:
        return
    _said.add(where)
    warn(
        where=where,
        what="Python's `random`, or numpy's, was drawn from while it was traced.",
        why="A trace runs Python once: if the function drew a number, it is a "
        "constant of the trace, the same in each later call.",
        do="Draw from a key, draw outside the region and pass the number as a tensor, "
        'or use engine="rerun".',
    )
