"""How many threads are inside a block that changes what regions do.

Blocks such as `disabled()` and `first_order()` are seldom entered, but every call of a
region has to ask for all of them. One number answers for all: zero means that no thread is
in any.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import final


class _Count:
    """How many such blocks are open.

    Attributes:
        count: of the blocks on all threads.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


departures = _Count()
_lock = threading.Lock()


@contextlib.contextmanager
def departing() -> Generator[None]:
    """Counts as such a block: calls inside take no route, and ask what is in force."""
    _add(1)
    try:
        yield
    finally:
        _add(-1)


@final
class Block(threading.local):
    """A kind of such a block, which a thread may be in more than once.

    Attributes:
        depth: how many of its kind this thread is in.
    """

    def __init__(self) -> None:
        # On the instance, where Dynamo notices a change.
        self.depth = 0

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """One more, until the `with` statement ends."""
        self.depth += 1
        try:
            with departing():
                yield
        finally:
            self.depth -= 1


def _add(number: int) -> None:
    with _lock:
        departures.count += number
