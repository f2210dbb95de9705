"""Where one axis of the arguments is in a value: the states that `_independence` tells apart."""

from __future__ import annotations

import dataclasses
import enum
from typing import TypeAlias, final


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Along:
    """Part of the axis: each step along dimension `dim` belongs to one place on it.

    The dimension may be a product of several, of which the axis is one: `inner` is the product
    of those behind it.
    """

    dim: int
    inner: int = 1


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Alike:
    """Nothing of the axis: the value is the same whichever tile runs.

    Along `dims` its slices are equal (or independent draws), so that they suit any tile.
    """

    dims: frozenset[int] = frozenset()


@final
class Total(enum.Enum):
    """Everything of the axis, in a way that tiles can make: their sum, or their mean."""

    SUM = "sum"
    MEAN = "mean"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """A random key, which each tile gets as one of its own."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Mixed:
    """Several places of the axis at once, in a way that tiles cannot make.

    `step` is the operator that did so, with its line, and `why` says how.
    """

    step: str
    why: str


State: TypeAlias = Along | Alike | Total | Key | Mixed


class MixesError(Exception):
    """Raised by a rule where an operator mixes places of the axis; the text says how."""
