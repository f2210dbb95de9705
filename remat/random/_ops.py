"""The operators behind keys and draws: opaque in traces, on any device, under vmap.

Each takes keys of shape (*batch, 2) and gives each key a result of its own, so that one
kernel serves single keys and mapped ones, and a mapped draw has the bits of the draws one
by one. None draws from a generator and none has a derivative; what comes from them alone
is drawn again in a backward and never saved (`remat._graph.operators.is_keyed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from remat._torch import schemas
from remat.random import _checking, _native, _portable
from remat.random._tiles import advanced, tiles

_BLOCK = 4  # numbers of 32 bits in a block


def _define(
    name: str,
    arguments: str,
    kernel: Callable[..., Tensor],
    fake: Callable[..., Tensor],
) -> Any:
    library = schemas.library()
    library.define(f"{name}({arguments}) -> Tensor")
    library.impl(name, kernel, "CompositeExplicitAutograd")
    schemas.register_fake(name, fake)
    return getattr(torch.ops.remat, name).default


def _map_keys(name: str) -> None:
    """Maps an operator of which only the key, its first argument, is ever mapped."""

    def batched(_: Any, in_dims: Any, key: Tensor, *rest: Any) -> tuple[Tensor, int]:
        op = getattr(torch.ops.remat, name).default
        return op(key.movedim(in_dims[0], 0), *rest), 0

    schemas.register_vmap(name, batched)


def _implementation(keys: Tensor) -> ModuleType:
    return _native if _native.serves(keys.device) else _portable


def _drawn(
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    draw: Callable[[ModuleType, Tensor, Tensor], object],
) -> Tensor:
    """Runs `draw(implementation, out, keys)` with out (key, number), keys (key, 2)."""
    keys = key.reshape(-1, 2)
    _checking.consume(keys)
    out = torch.empty(
        (keys.shape[0], math.prod(shape)), dtype=dtype, device=keys.device
    )
    if out.numel():
        draw(_implementation(keys), out, keys)
    return out.view((*key.shape[:-1], *shape))


def _split(key: Tensor, num: int) -> Tensor:
    keys = key.reshape(-1, 2)
    _checking.consume(keys)
    return _derived(keys, num).view(*key.shape[:-1], num, 2)


def _derived(keys: Tensor, num: int) -> Tensor:
    if keys.numel() == 0:
        return keys.new_empty((0, num, 2))
    return _implementation(keys).split(keys, num)


def _fake_split(key: Tensor, num: int) -> Tensor:
    return key.new_empty((*key.shape[:-1], num, 2))


def _batch(key: Tensor, data: Tensor) -> tuple[int, ...]:
    broadcast: Callable[..., torch.Size] = torch.broadcast_shapes  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return tuple(broadcast(key.shape[:-1], data.shape))


def _fold_in(key: Tensor, data: Tensor) -> Tensor:
    # The key that a split into more than `data` keys would give at that place.
    batch = _batch(key, data)
    moved = advanced(key.expand(*batch, 2), data)
    return _derived(moved.reshape(-1, 2), 1).view(*batch, 2)


def _fake_fold_in(key: Tensor, data: Tensor) -> Tensor:
    return key.new_empty((*_batch(key, data), 2))


def _fold_in_int(key: Tensor, data: int) -> Tensor:
    moved = advanced(key, data)
    return _derived(moved.reshape(-1, 2), 1).view(key.shape)


def _fake_fold_in_int(key: Tensor, data: int) -> Tensor:
    return torch.empty_like(key, memory_format=torch.contiguous_format)


def _uniform(
    key: Tensor, shape: Sequence[int], low: float, high: float, dtype: torch.dtype
) -> Tensor:
    return _drawn(key, shape, dtype, lambda by, out, k: by.uniform(out, k, low, high))


def _normal(
    key: Tensor, shape: Sequence[int], mean: float, std: float, dtype: torch.dtype
) -> Tensor:
    return _drawn(key, shape, dtype, lambda by, out, k: by.normal(out, k, mean, std))


def _integers(
    key: Tensor, shape: Sequence[int], first: int, last: int, dtype: torch.dtype
) -> Tensor:
    # Bounds come as the int64 with their bits: both ends belong to the range.
    low = first if dtype.is_signed else first % (1 << 64)
    span = (last - first) % (1 << 64) + 1
    return _drawn(key, shape, dtype, lambda by, out, k: by.integers(out, k, low, span))


def _mask(
    key: Tensor, shape: Sequence[int], p: float, value: float, dtype: torch.dtype
) -> Tensor:
    """`value` with probability `p`, else 0."""
    is_single = dtype == torch.float32

    def draw(by: ModuleType, out: Tensor, keys: Tensor) -> None:
        # Piece by piece, so that no second tensor of the size of the first is held. A piece
        # is contiguous: it is whole rows, or a part of one.
        num_blocks = -(-out.shape[1] // _BLOCK)
        for rows, first, count in tiles(out.shape[0], num_blocks, out.device):
            target = out[rows, first * _BLOCK : (first + count) * _BLOCK]
            u = target if is_single else torch.empty_like(target, dtype=torch.float32)
            by.uniform(u, advanced(keys[rows], first), 0.0, 1.0).lt_(p)
            if not is_single:
                target.copy_(u)
            if value != 1.0:
                target.mul_(value)

    return _drawn(key, shape, dtype, draw)


def _fake_draw(key: Tensor, shape: Sequence[int], *rest: Any) -> Tensor:
    *_, dtype = rest
    return key.new_empty((*key.shape[:-1], *shape), dtype=dtype)


def _batched_fold_in(
    _: Any, in_dims: Any, key: Tensor, data: Tensor
) -> tuple[Tensor, int]:
    # A mapped argument gets its examples in front, and ones in between where the other
    # has more dimensions, so that both broadcast.
    key_dim, data_dim = in_dims
    key = key if key_dim is None else key.movedim(key_dim, 0)
    data = data if data_dim is None else data.movedim(data_dim, 0)
    key_rank = key.ndim - 1 - (key_dim is not None)
    data_rank = data.ndim - (data_dim is not None)
    if key_dim is not None:
        ones = (1,) * max(0, data_rank - key_rank)
        key = key.reshape(key.shape[0], *ones, *key.shape[1:])
    if data_dim is not None:
        ones = (1,) * max(0, key_rank - data_rank)
        data = data.reshape(data.shape[0], *ones, *data.shape[1:])
    return FOLD_IN(key, data), 0


SPLIT = _define("random_split", "Tensor key, int num", _split, _fake_split)
FOLD_IN = _define("random_fold_in", "Tensor key, Tensor data", _fold_in, _fake_fold_in)
FOLD_IN_INT = _define(
    "random_fold_in_int", "Tensor key, int data", _fold_in_int, _fake_fold_in_int
)
UNIFORM = _define(
    "random_uniform",
    "Tensor key, SymInt[] shape, float low, float high, ScalarType dtype",
    _uniform,
    _fake_draw,
)
NORMAL = _define(
    "random_normal",
    "Tensor key, SymInt[] shape, float mean, float std, ScalarType dtype",
    _normal,
    _fake_draw,
)
INTEGERS = _define(
    "random_integers",
    "Tensor key, SymInt[] shape, int first, int last, ScalarType dtype",
    _integers,
    _fake_draw,
)
MASK = _define(
    "random_mask",
    "Tensor key, SymInt[] shape, float p, float value, ScalarType dtype",
    _mask,
    _fake_draw,
)
for _op in (SPLIT, FOLD_IN_INT, UNIFORM, NORMAL, INTEGERS, MASK):
    _map_keys(_op.name().removeprefix("remat::"))
schemas.register_vmap("random_fold_in", _batched_fold_in)
