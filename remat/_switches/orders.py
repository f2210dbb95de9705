"""How many reverse derivatives of a region are wanted: all, or the first alone.

`torch.func.grad` records every backward in case somebody differentiates it. The record of a
region's backward holds its cotangents until the whole gradient is done. Under `first_order()`
there will be no second derivative, and the cotangents are freed at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from remat._switches.departures import Block

_block = Block()


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
    with _block.entered():
        yield


def is_first_order() -> bool:
    """Whether this thread wants no second derivative of the regions it calls."""
    return _block.depth > 0
