"""The random generators of Python and numpy, which may decide what a function computes.

A function may draw a number from them to decide which layer it skips, say. A trace keeps
that number as a constant, and warns; a function that runs again draws the same number.
"""

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Generator
from typing import Any

from remat._user_lines import warn_once


def states() -> tuple[Any, ...]:
    """The states of Python's and numpy's generators by value; None for a numpy not loaded."""
    numpy = sys.modules.get("numpy.random")
    # Pickled, the state of any bit generator of numpy is a copy that can be compared.
    there = None if numpy is None else pickle.dumps(numpy.get_state(legacy=False))
    return random.getstate(), there


@contextlib.contextmanager
def drawing_from(found: tuple[Any, ...] | None) -> Generator[None]:
    """Inside, Python and numpy draw from these states, then from the old ones. None: no-op."""
    if found is None:
        yield
        return
    before = states()
    set_states(found)
    try:
        yield
    finally:
        set_states(before)


def set_states(found: tuple[Any, ...]) -> None:
    """Has Python and numpy draw from these states from now on."""
    python, numpy = found
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy.random"].set_state(pickle.loads(numpy))


@contextlib.contextmanager
def warned_of_draws(where: str) -> Generator[Callable[[], None]]:
    """Warns, once a function, if its trace, which runs inside, draws as Python or numpy do.

    Gives what takes the draws back, as is done if the trace is refused: what runs instead of it
    draws the same numbers.
    """
    before = states()

    def take_back() -> None:
        if before != states():
            set_states(before)

    try:
        yield take_back
    except BaseException:
        take_back()
        raise
    # Not an error: it may have been another thread, such as that of a data loader.
    if before != states():
        warn_once(
            ("drawn", where),
            where=where,
            what="Python's `random`, or numpy's, was drawn from while it was traced.",
            why="A trace runs Python once, so a number that the function drew is a "
            "constant, the same in each later call.",
            do="Draw from a key, draw outside the region and pass the number as a tensor, "
            'or use engine="rerun".',
        )
