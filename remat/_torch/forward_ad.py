"""Forward mode's dual level, of which torch has one.

Obsolete with nested dual levels.
"""

# pyright: reportPrivateUsage=false
import contextlib
from collections.abc import Generator
from typing import Any

from torch._functorch import eager_transforms
from torch.autograd import forward_ad

dual_levels: Any = forward_ad
transforms: Any = eager_transforms


def dual_level_is_active() -> bool:
    """Whether a `torch.autograd.forward_ad.dual_level` is open."""
    return dual_levels._current_level >= 0


@contextlib.contextmanager
def no_dual_level() -> Generator[None]:
    """Hides forward mode from code that runs below it, such as a fake mode's.

    If the arguments of a call do not match one overload, torch prints them before it tries
    the next. Printing a tensor asks for its tangent, which fails below autograd and leaves
    the thread's dispatch state broken. Obsolete when a trace of torch.func.jvp over
    `x.lerp_(y, w)` works on plain torch.
    """
    level = dual_levels._current_level
    dual_levels._current_level = -1
    try:
        yield
    finally:
        dual_levels._current_level = level


@contextlib.contextmanager
def shared_dual_level() -> Generator[None]:
    """Lets torch.func.jvp run where the caller has opened forward mode.

    Torch has a single level of forward mode. torch.func.jvp would open it a second time,
    unless it had opened it itself. Obsolete with nested dual levels.
    """
    if dual_levels._current_level < 0 or transforms.JVP_NESTING:
        yield
        return
    transforms.JVP_NESTING += 1
    try:
        yield
    finally:
        transforms.JVP_NESTING -= 1
