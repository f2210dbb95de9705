"""Dropout that draws under a transform of torch.func what it draws without one.

A region runs its function below all transforms, and under one of them for a derivative, which
must have the forward's mask. torch.func puts operators in the place of dropout that draw a mask
in another order than that in which its tensor lies in memory. Obsolete when it does not.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from remat._torch import levels

#: What a unit of SELU tends to far below zero, but for its sign: what `alpha_dropout` drops it to.
_ALPHA = 1.7580993408473766


def drawn_alike(func: Any) -> Any:
    """The function itself, or under a transform one that draws what it does without."""
    return _ALIKE.get(func, func) if levels.interpreter_is_active() else func


def _mask(like: Tensor, p: float) -> Tensor:
    """What to keep, drawn in the order in which a tensor lies in memory."""
    if levels.draws_in_place(like):
        return torch.empty_like(like).bernoulli_(1 - p)
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    back = [order.index(dim) for dim in range(like.dim())]
    # Of what no map maps yet each draws as its randomness says.
    sizes = [like.shape[dim] for dim in order]
    mask = torch.empty(sizes, dtype=like.dtype, device=like.device)
    return torch.bernoulli(mask, 1 - p).permute(back)


def _draws(tensor: Tensor, p: float, training: bool) -> bool:
    return training and 0.0 < p < 1.0 and tensor.numel() > 0


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    # Into a new tensor accelerators drop by one kernel. Where vmap has others for it, a draw is
    # repeated outside of that map (`levels.outside_maps`).
    is_kernel = input.device.type not in ("cpu", "mps") and not inplace
    if is_kernel or not _draws(input, p, training):
        return F.dropout(input, p, training, inplace)
    mask = _mask(input, p).div_(1 - p)
    return input.mul_(mask) if inplace else input * mask


def _alpha_dropout(
    input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    if not _draws(input, p, training):
        return F.alpha_dropout(input, p, training, inplace)
    mask = _mask(input, p)
    scale = 1 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    shift = mask.add(-1).mul_(_ALPHA * scale).add_(_ALPHA * scale * p)
    mask.mul_(scale)
    return input.mul_(mask).add_(shift) if inplace else input.mul(mask).add_(shift)


def _as_operator(
    function: Callable[..., Tensor], inplace: bool
) -> Callable[..., Tensor]:
    """The function with the arguments of the operator under it."""

    def call(input: Tensor, p: float, train: bool) -> Tensor:
        return function(input, p, train, inplace)

    return call


_ALIKE: dict[Any, Callable[..., Tensor]] = {
    F.dropout: _dropout,
    F.alpha_dropout: _alpha_dropout,
    torch.dropout: _as_operator(_dropout, inplace=False),
    torch.dropout_: _as_operator(_dropout, inplace=True),
    torch.alpha_dropout: _as_operator(_alpha_dropout, inplace=False),
    torch.alpha_dropout_: _as_operator(_alpha_dropout, inplace=True),
}
