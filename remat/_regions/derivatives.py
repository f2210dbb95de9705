"""The regions that are derived from one region, kept by what each was asked for."""

from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar, final

from remat._graph.meta import TensorMeta, without_symbols
from remat._regions.derived_forwards import DerivedForward
from remat._regions.protocol import Asked, Batched, Pushed
from remat._regions.transforms import Batch

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")
_R = TypeVar("_R")


@final
class Cache(Generic[_K, _V]):
    """Values by what they were made for; the first one made for a key is kept."""

    def __init__(self, is_open: bool) -> None:
        self._is_open = is_open
        self._values: dict[Hashable, _V] = {}

    def get(self, key: _K, make: Callable[[], _V]) -> _V:
        """The value for a key, made if there is none."""
        # Inside a trace with open sizes a key holds symbols, which cannot be hashed.
        place = without_symbols(key) if self._is_open else key
        value = self._values.get(place)
        if value is None:
            # Two threads may both make it; the first result is kept.
            value = self._values.setdefault(place, make())
        return value


class Pushing(NamedTuple):
    """Which operands have a tangent, and what the region of the pushforward serves."""

    has_tangent: tuple[bool, ...]
    num_states: int = 0
    save: bool = False


@final
class Derivatives(Generic[_R]):
    """The regions derived from one region, by kind and by what was asked.

    Attributes:
        backwards: the backward programs, whether or not their cotangents want a gradient,
            with the metadata of the generator states that they take.
        pulled: the regions of gradients.
        opened: the regions of the programs, by which tensors want a gradient and which
            have a tangent; None for one that lacks a derivative.
        tangents: the regions of tangents alone, and which outputs have one.
        pushed: the regions of outputs and tangents.
        batched: the regions of the mapped function, and whether they save.
        whole: the regions of the mapped function with all that it returns.
    """

    def __init__(self, is_open: bool) -> None:
        self.backwards: Cache[Asked, tuple[DerivedForward, list[TensorMeta]]]
        self.backwards = Cache(is_open)
        self.pulled: Cache[Asked, _R] = Cache(is_open)
        self.opened: Cache[tuple[tuple[bool, ...], ...], tuple[_R | None]] = Cache(
            is_open
        )
        self.tangents: Cache[Pushing, tuple[_R, tuple[int, ...]]] = Cache(is_open)
        self.pushed: Cache[Pushing, Pushed] = Cache(is_open)
        self.batched: Cache[tuple[Batch, bool], Batched] = Cache(is_open)
        self.whole: Cache[Batch, _R] = Cache(is_open)
