"""Where regions run as the plain function: `disabled()`, `REMAT_DISABLE`, without gradients.

And in `torch.export`, whose programs are forwards, for any size that is left open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

import torch

from remat._switches.departures import Block

_block = Block()
_DISABLED = os.environ.get("REMAT_DISABLE", "0") not in ("", "0")


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
    with _block.entered():
        yield


def is_disabled() -> bool:
    """Whether regions are switched off on this thread."""
    return _DISABLED or _block.depth > 0 or torch.compiler.is_exporting()


def is_inert() -> bool:
    """Whether regions run as the plain function on this thread, whatever the arguments."""
    return is_disabled() or not _gradients_are_on()


def _gradients_are_on() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
