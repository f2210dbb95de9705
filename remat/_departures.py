"""Whether some thread departs from what regions do usually; if none does, one look tells.

Blocks such as `disabled()` and `first_order()` are entered seldom, and calls of regions ask
for all of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator


class _Count:
    """How many blocks are entered, on all threads.

    Attributes:
        count: 0 means that every thread does the usual.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


departures = _Count()
_lock = threading.Lock()


@contextlib.contextmanager
def departing() -> Generator[None]:
    """Inside, no call is recognized as one like those before; which thread departs is asked."""
    _add(1)
    try:
        yield
    finally:
        _add(-1)


def _add(number: int) -> None:
    with _lock:
        departures.count += number
