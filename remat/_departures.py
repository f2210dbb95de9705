"""Whether this thread departs from what regions do usually; if not, one look tells.

Blocks such as `disabled()` and `first_order()` are entered seldom, and calls of regions ask
for all of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator


class Thread(threading.local):
    """What a thread has entered.

    Attributes:
        departures: how many blocks in which a region's calls are not as usual.
    """

    departures = 0


thread = Thread()


@contextlib.contextmanager
def departing() -> Generator[None]:
    """Inside, no call on this thread is recognized as one like those before."""
    thread.departures += 1
    try:
        yield
    finally:
        thread.departures -= 1
