"""Batches of sequences, and how often functions of them have run in Python."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from remat import remat
from tests.support import run, seeded

WIDTH, HEADS = 8, 2


def sequence(batch: int, length: int, seed: int = 0) -> Tensor:
    """A batch of sequences: (batch, length, WIDTH)."""
    return seeded(batch, length, WIDTH, seed=seed)


def traced(
    fun: Callable[..., Any], *, dynamic_shapes: bool = True, **options: Any
) -> Any:
    """The region of a function, of which no test before has left a trace."""
    region = remat(fun, dynamic_shapes=dynamic_shapes, **options)
    region.cache_clear()
    return region


def quiet(region: Any, *args: Any) -> None:
    """Runs it forward and backward; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(region, args)
