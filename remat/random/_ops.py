"""The operators behind keys and draws: opaque in traces, on any device, under vmap.

Each takes keys of shape (*batch, 2) and gives each key a result of its own, so that one
kernel serves single keys and mapped ones, and a mapped draw has the bits of the draws one
by one. None draws from a generator and none has a derivative; what comes from them alone
is drawn again in a backward and never saved (`remat._graph.operators.is_keyed`).
"""

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._torch import schemas
from remat.random import _checking, _native, _portable
from remat.random._philox import advanced, tiles

_BLOCK = 4  # numbers of 32 bits in a block


def _define(
    name: str, schema: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]
) -> Any:
    """Defines an operator of which only the key, its first argument, is ever mapped."""
    op = schemas.define(name, f"({schema}) -> Tensor", kernel, fake, ())

    def batched(_: Any, in_dims: Any, key: Tensor, *rest: Any) -> tuple[Tensor, int]:
        return op(key.movedim(in_dims[0], 0), *rest), 0

    schemas.register_vmap(name, batched)
    return op


def _define_draw(name: str, bounds: str, kernel: Callable[..., Tensor]) -> Any:
    def fake(key: Tensor, shape: Sequence[int], *rest: Any) -> Tensor:
        return key.new_empty((*key.shape[:-1], *shape), dtype=rest[-1])

    schema = f"Tensor key, SymInt[] shape, {bounds}, ScalarType dtype"
    op = _define(name, schema, kernel, fake)
    operators.WORKSPACES[op] = _workspace_bytes
    return op


def _native_or_portable(keys: Tensor) -> ModuleType:
    return _native if _native.serves(keys.device) else _portable


def _workspace_bytes(args: Sequence[Any], drawn: TensorMeta) -> int:
    """What a draw holds beside its result while it runs."""
    if _native.has_kernels(drawn.device.type):
        return 0  # but for a mask of another dtype, which is made of uniform numbers in pieces
    of_key = math.prod(args[1])
    num_keys = math.prod(drawn.shape) // max(of_key, 1)
    return _portable.workspace_bytes(num_keys, of_key, drawn.dtype, drawn.device)


def _drawn(
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    draw: Callable[[ModuleType, Tensor, Tensor], object],
) -> Tensor:
    """What an operator draws, by `draw(implementation, out, keys)`: out (key, number)."""
    keys = key.reshape(-1, 2)
    _checking.consume(keys)
    out = keys.new_empty((keys.shape[0], math.prod(shape)), dtype=dtype)
    if out.numel():
        draw(_native_or_portable(keys), out, keys)
    return out.view((*key.shape[:-1], *shape))


def _split_op(key: Tensor, num: int) -> Tensor:
    keys = key.reshape(-1, 2)
    _checking.consume(keys)
    return _derived_keys(keys, num).view(*key.shape[:-1], num, 2)


def _derived_keys(keys: Tensor, num: int) -> Tensor:
    if keys.numel() == 0:
        return keys.new_empty((0, num, 2))
    return _native_or_portable(keys).split(keys, num)


def _fake_split(key: Tensor, num: int) -> Tensor:
    return key.new_empty((*key.shape[:-1], num, 2))


def _batch_of_keys(key: Tensor, data: Tensor | int) -> tuple[int, ...]:
    broadcast: Callable[..., torch.Size] = torch.broadcast_shapes  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    shape = data.shape if isinstance(data, Tensor) else ()
    return tuple(broadcast(key.shape[:-1], shape))


def _fold_op(key: Tensor, data: Tensor | int) -> Tensor:
    # The key that a split into more than `data` keys would give at that place.
    batch = _batch_of_keys(key, data)
    moved = advanced(key.expand(*batch, 2), data)
    return _derived_keys(moved.reshape(-1, 2), 1).view(*batch, 2)


def _fake_fold_in(key: Tensor, data: Tensor | int) -> Tensor:
    return key.new_empty((*_batch_of_keys(key, data), 2))


def _uniform_op(
    key: Tensor, shape: Sequence[int], low: float, high: float, dtype: torch.dtype
) -> Tensor:
    return _drawn(key, shape, dtype, lambda by, out, k: by.uniform(out, k, low, high))


def _normal_op(
    key: Tensor, shape: Sequence[int], mean: float, std: float, dtype: torch.dtype
) -> Tensor:
    return _drawn(key, shape, dtype, lambda by, out, k: by.normal(out, k, mean, std))


def _integers_op(
    key: Tensor, shape: Sequence[int], first: int, last: int, dtype: torch.dtype
) -> Tensor:
    # Bounds come as the int64 with their bits: both ends belong to the range.
    low = first if dtype.is_signed else first % (1 << 64)
    span = (last - first) % (1 << 64) + 1
    return _drawn(key, shape, dtype, lambda by, out, k: by.integers(out, k, low, span))


def _mask_op(
    key: Tensor, shape: Sequence[int], p: float, value: float, dtype: torch.dtype
) -> Tensor:
    """The operator of masks: `value` with probability `p`, else 0."""
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


def _batched_fold_in(
    _: Any, in_dims: Any, key: Tensor, data: Tensor
) -> tuple[Tensor, int]:
    # Examples go in front, and ones in between where the other argument has more
    # dimensions, so that both broadcast.
    key_dim, data_dim = in_dims
    key_rank = key.ndim - 1 - (key_dim is not None)
    data_rank = data.ndim - (data_dim is not None)
    key = _examples_first(key, key_dim, data_rank - key_rank)
    data = _examples_first(data, data_dim, key_rank - data_rank)
    return FOLD_IN(key, data), 0


def _examples_first(tensor: Tensor, dim: int | None, num_ones: int) -> Tensor:
    if dim is None:
        return tensor
    tensor = tensor.movedim(dim, 0)
    return tensor.reshape(tensor.shape[0], *(1,) * num_ones, *tensor.shape[1:])


SPLIT = _define("random_split", "Tensor key, int num", _split_op, _fake_split)
FOLD_IN_INT = _define(
    "random_fold_in_int", "Tensor key, int data", _fold_op, _fake_fold_in
)
FOLD_IN = schemas.define(
    "random_fold_in", "(Tensor key, Tensor data) -> Tensor", _fold_op, _fake_fold_in, ()
)
schemas.register_vmap("random_fold_in", _batched_fold_in)
UNIFORM = _define_draw("random_uniform", "float low, float high", _uniform_op)
NORMAL = _define_draw("random_normal", "float mean, float std", _normal_op)
INTEGERS = _define_draw("random_integers", "int first, int last", _integers_op)
MASK = _define_draw("random_mask", "float p, float value", _mask_op)
