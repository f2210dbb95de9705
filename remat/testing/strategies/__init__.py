"""Hypothesis strategies: random functions, tensors, cotangents, policies, transforms.

A random function prints as Python, so that a failing test shows its source. This module
needs hypothesis: the extra `testing`.

- `_draw_programs`: random functions, policies and transforms are drawn.
- `_program`: a function that was drawn, which runs, and prints its source.
- `_operators`: the statements that it is made of.
- `_tensors`: tensors by shape, strides, dtype and seed; cotangents.
"""

from remat.testing.strategies._draw_programs import policies, programs, transforms
from remat.testing.strategies._program import Program
from remat.testing.strategies._tensors import (
    Cotangents,
    TensorSpec,
    cotangents,
    dtypes,
    normal,
    shapes,
    tensors,
)

__all__ = [
    "Cotangents",
    "Program",
    "TensorSpec",
    "cotangents",
    "dtypes",
    "normal",
    "policies",
    "programs",
    "shapes",
    "tensors",
    "transforms",
]
