"""`tiled`: a function that is independent along an axis, run tile by tile.

Each tile is a region, so that the values of one tile alone exist at a time, forward and backward.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, final, overload

import torch
from torch import Tensor

from remat._api import remat
from remat._calls.decorated import is_of_module
from remat._calls.options import PolicyLike
from remat._errors import (
    BudgetError,
    explain,
    refuse,
    require_callable,
    require_choice,
    require_count,
)
from remat._partition.peak import peaks_of
from remat._switches.blocks import is_disabled, note_tiled
from remat._torch import dynamo, trees
from remat._torch.modules import calling_module
from remat._user_lines import warn
from remat.layers import _unrolled
from remat.layers._independence import require_independent
from remat.layers._tiles import Call, Part, Pattern
from remat.policies._sizes import parse_size, show_size

_P = ParamSpec("_P")
_R = TypeVar("_R")

_Reduce = Literal["sum", "mean"]


@overload
def tiled(
    f: Callable[_P, _R],
    pattern: str,
    *,
    tiles: int | str,
    reduce: _Reduce = "sum",
    policy: PolicyLike = None,
) -> Tiled[_P, _R]: ...
@overload
def tiled(
    f: str, *, tiles: int | str, reduce: _Reduce = "sum", policy: PolicyLike = None
) -> Callable[[Callable[_P, _R]], Tiled[_P, _R]]: ...
def tiled(
    f: Any,
    pattern: str | None = None,
    *,
    tiles: int | str,
    reduce: _Reduce = "sum",
    policy: PolicyLike = None,
) -> Any:
    """Runs a function tile by tile along an axis; each tile is recomputed by itself.

    It is this, with a region for `f`, where the pattern cuts `x` and the result::

        torch.cat([f(part, ...) for part in x.split(size, dim)], dim)

    Laws: numbers and gradients are those of the function up to the order of sums, under every
    transform. Of what `f` computes, one tile's values exist at a time, in the forward and in
    the backward. What all tiles share gets the sum of the tiles' gradients. A function that is
    not independent along the axis is refused, by its trace.

    Args:
        f: takes pytrees and returns one; what it closes over is the same for all tiles. It may
            neither compute with the size of a tile nor change buffers. A region keeps its own
            options. Or the pattern, to decorate a function.
        pattern: einops' notation for each positional argument, "->", and for the result, or
            each item of a tuple. "(tile s)" is the axis that is cut; a part without it is the
            same for all tiles, and a last "..." stands for all further arguments. Each part
            holds for all tensors of its argument. A result without the axis is reduced.
        tiles: how many; the last one may be smaller, and there are at most as many as the axis
            is long. Or bytes that the values of one tile may take, gradients included, as in
            "512MiB": the fewest tiles that keep them. Of a number, `fit` and `modules.plan`
            may make a larger one.
        reduce: how results without the axis are put together: "sum", or "mean", weighted by
            size. The function must sum or average over the axis accordingly.
        policy: what a tile saves for its backward, if `f` is no region.

    Returns:
        The function. Keys (`remat.random`) among its arguments without the axis are folded
        with the number of the tile, so that tiles draw different numbers.

    Raises:
        TileError: the pattern cannot be read, does not fit the arguments, or `f` mixes places
            of the axis; the message names operator and line.
        BudgetError: tiles of one step do not fit the bytes.
        MutationError: `f` changes a buffer or an argument.

    Example:
        >>> import torch
        >>> from remat.layers import tiled
        >>> w = torch.ones(4, 16, requires_grad=True)
        >>> @tiled("b (tile s) d -> b (tile s) d", tiles=8)
        ... def mlp(x):
        ...     return torch.relu(x @ w) @ w.T
        >>> mlp(torch.ones(2, 100, 4)).shape
        torch.Size([2, 100, 4])
        >>> @tiled("(tile n) d, ... -> ", tiles="64KiB", reduce="mean")
        ... def loss(x, scale):
        ...     return (x @ w).square().mean() * scale
        >>> loss(torch.ones(2048, 4), 0.5)
        tensor(8., grad_fn=<...>)

    References:
        DeepSpeed's `TiledMLP` and ALST (https://arxiv.org/abs/2506.13996); `jax.lax.map` with
        a batch size.
    """
    require_tiles(tiles, "tiled(tiles=...)")
    require_choice("reduce", reduce, ("sum", "mean"), of="tiled")
    read = Pattern.of(f if pattern is None else pattern)

    def decorate(fun: Callable[..., Any]) -> Any:
        require_callable("tiled(f)", fun)
        if policy is not None and _unrolled.is_region(fun):
            warn(
                where=f"tiled({fun!r}, policy=...)",
                what="has no effect.",
                why="The function is a region already, which keeps its own policy.",
                do="Leave it out, or pass the function that was decorated.",
            )
        return Tiled(fun, read, tiles, reduce, policy)

    return decorate if pattern is None else decorate(f)


def require_tiles(tiles: object, where: str) -> None:
    """Refuses what is neither a number of tiles nor a size."""
    if not isinstance(tiles, str):
        require_count(where, cast("int", tiles), at_least=1)
    elif parse_size(tiles, where) == 0:
        raise refuse(
            where,
            tiles,
            why="The values of no tile fit it.",
            do="Pass the bytes that the values of one tile may take.",
        )


@final
class Tiled(Generic[_P, _R]):
    """What `tiled` returns."""

    __name__: str

    def __init__(
        self,
        fun: Callable[_P, _R],
        pattern: Pattern,
        tiles: int | str,
        reduce: _Reduce,
        policy: PolicyLike,
    ) -> None:
        functools.update_wrapper(self, fun, updated=())
        self.__wrapped__ = fun
        self.pattern = pattern
        self.tiles = tiles
        self.reduce: _Reduce = reduce
        self.policy = policy
        self._unbound: Tiled[Any, Any] | None = None

    def __repr__(self) -> str:
        return (
            f"tiled({self.__wrapped__!r}, {self.pattern.text!r}, tiles={self.tiles!r}, "
            f"reduce={self.reduce!r}, policy={self.policy!r})"
        )

    def __reduce__(self) -> Any:
        parts = (self.__wrapped__, self.pattern, self.tiles, self.reduce, self.policy)
        return Tiled, parts

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """A method of an object, whose patterns leave out the object."""
        if instance is None:
            return self
        fun: Any = getattr(self.__wrapped__, "__func__", self.__wrapped__)
        bound = fun.__get__(instance, owner)
        found = Tiled(bound, self.pattern, self.tiles, self.reduce, self.policy)
        found._unbound = self._unbound or self
        return found

    @property
    def unbound(self) -> Tiled[Any, Any]:
        """Itself, or what it was bound from, which outlives a call."""
        return self._unbound or self

    @functools.cached_property
    def region(self) -> Any:
        """The function as a region, which one tile runs."""
        f: Any = self.__wrapped__
        if _unrolled.is_region(f):
            return f
        dense = functools.partial(_call_on_dense_tiles, f, self.pattern)
        if hasattr(f, "__qualname__"):
            functools.update_wrapper(dense, f, updated=())
        else:  # an object
            dense.__qualname__ = type(f).__name__  # pyright: ignore[reportAttributeAccessIssue]
        rng = "preserve" if is_of_module(f) else "keys"
        return remat(dense, policy=self.policy, rng=rng)

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """The function's result, computed tile by tile."""
        if torch.compiler.is_dynamo_compiling():
            return _call_tiled(self, *args, **kwargs)
        return _call_tiled(self.called_through(calling_module()), *args, **kwargs)

    def called_through(self, module: object) -> Tiled[Any, Any]:
        """Itself, or what it is in the attributes of a copy of its module."""
        own = getattr(self.__wrapped__, "__self__", None)
        is_copy = module is not own and type(module) is type(own)
        return self.__get__(module) if is_copy else self

    def length_of_tile(self, *args: _P.args, **kwargs: _P.kwargs) -> int:
        """How long a tile of a call is along the axis; the last one may be shorter."""
        return self.size(Call.of(self.pattern, args, kwargs))

    def size(self, call: Call) -> int:
        """`length_of_tile` of a call whose arguments are cut already."""
        if not isinstance(self.tiles, str):
            return max(-(-call.length // self.tiles), 1)
        return _tile_size_within(
            self.region, call, parse_size(self.tiles, "tiled(tiles=...)")
        )

    def run_tiles(self, run: Callable[..., Any], call: Call, size: int) -> Any:
        """Runs a function on each tile, and puts the results together."""
        results = [run(*args, **kwargs) for args, kwargs in call.tiles(size)]
        parts = iter(self.pattern.of_results(results[0]))
        leaves, spec = zip(*map(trees.flatten, results), strict=True)
        joined = [
            self._joined_leaf(next(parts), column, call.sizes(size))
            if isinstance(column[0], Tensor)
            else column[0]
            for column in zip(*leaves, strict=True)
        ]
        return trees.unflatten(joined, spec[0])

    def _joined_leaf(
        self, part: Part, column: tuple[Tensor, ...], sizes: Sequence[int]
    ) -> Tensor:
        dim = part.dim(column[0], f"a result of {self!r}")
        if dim is not None:
            return torch.cat(column, dim)
        first = column[0]
        if self.reduce == "mean":
            if not (first.is_floating_point() or first.is_complex()):
                return first  # no mean, but the same for all tiles
            total = sum(sizes) or 1
            weights = [size / total for size in sizes]
            column = tuple(map(operator.mul, column, weights))
        # Half precision would swallow small parts one by one; torch's sum does not.
        return torch.stack(column).sum(0, dtype=first.dtype)


def _call_on_dense_tiles(
    f: Callable[..., Any], pattern: Pattern, *args: Any, **kwargs: Any
) -> Any:
    """Calls a function with tiles that lie in memory as a whole tensor does."""
    pairs = pattern.of_arguments(args)
    given = [
        trees.map_tensors(Tensor.contiguous, arg) if part.place is not None else arg
        for part, arg in pairs
    ]
    return f(*given, **kwargs)


def _unrolled_tiles(tiled: Tiled[Any, Any], *args: Any, **kwargs: Any) -> Any:
    """A call under torch.compile, whose graph has the tiles in a row."""
    if isinstance(tiled.tiles, str) or tiled.policy is not None:
        dynamo.end_graph(_WITH_OPTIONS)
    call = Call.of(tiled.pattern, args, kwargs)
    f: Any = tiled.__wrapped__
    if not _unrolled.is_region(f):
        f = functools.partial(_unrolled.call, f)
    run = functools.partial(_call_on_dense_tiles, f, tiled.pattern)
    return tiled.run_tiles(run, call, tiled.size(call))


@dynamo.traced_as(_unrolled_tiles)
def _call_tiled(tiled: Tiled[Any, Any], *args: Any, **kwargs: Any) -> Any:
    note_tiled(tiled.unbound)
    call = Call.of(tiled.pattern, args, kwargs)
    size, region = tiled.size(call), tiled.region
    if not is_disabled():
        require_independent(region, tiled.pattern, tiled.reduce, call, size)
    return tiled.run_tiles(region, call, size)


_WITH_OPTIONS = explain(
    where="remat.layers.tiled",
    what="has a policy or a size in bytes, and is called under torch.compile.",
    why="Both need its own trace, which cannot be part of a graph.",
    do="Pass a number of tiles and no policy, or compile without fullgraph=True: the tiles "
    "then run between two graphs.",
)


def _tile_size_within(region: Any, call: Call, limit: int) -> int:
    """The largest size of a tile whose values take at most some bytes."""
    count = 1
    while True:
        size = max(-(-call.length // count), 1)
        (args, kwargs), _ = call.stand_in(size)
        stages = region.entry_of(args, kwargs)[0].stages
        peaks = peaks_of(stages.joint, stages.cut, stages.saved_bytes)
        found = peaks.of_step
        if found <= limit:
            return size
        if size == 1:
            raise BudgetError.of(
                where="tiled(tiles=...)",
                what=f"the values of a tile of one step take {show_size(found)}, and "
                f"{show_size(limit)} were allowed.",
                why="Gradients of what all tiles share count, and no tile is smaller.",
                do=f'Pass at least "{found}B", or a number of tiles.',
            )
        count = max(count + 1, min(call.length, math.ceil(count * found / limit)))
