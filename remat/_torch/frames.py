"""Frames of the Python stack.

Obsolete when Python has a public function that does not build the whole stack.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import sys
from types import FrameType


def caller(depth: int) -> FrameType | None:
    """The frame `depth` calls above the function that asks, which is 0.

    Obsolete when Python has a public function that does not build the whole stack.
    """
    return sys._getframe(depth + 1)
