"""Dropout by a key."""

from __future__ import annotations

from torch import Tensor

from remat.random import _ops
from remat.random._keys import require_key


def dropout(key: Tensor, x: Tensor, rate: float) -> Tensor:
    """Sets each number to zero with probability `rate`, and scales the others up.

    x * bernoulli(key, x.shape, p=1 - rate) / (1 - rate), so that the mean is `x`.

    Laws: those of `remat.random`; the same numbers are dropped in every dtype. Where a
    number is dropped, so are its derivatives, of any order: they draw the factor again. A
    rate of 0 returns `x` itself, and consumes no key.

    Args:
        key: a key, uint64 of shape (2,), on the device of `x`.
        x: the numbers, floating or complex, of any shape.
        rate: the probability of dropping a number, in [0, 1].

    Returns:
        A tensor like `x`.

    Raises:
        TypeError: `key` is not a key, or `x` not floating.
        ValueError: `rate` is out of range.

    Example:
        >>> import torch
        >>> from remat import random
        >>> random.dropout(random.key(0), torch.ones(5), rate=0.5)
        tensor([2., 2., 2., 2., 0.])

    References:
        Dropout: A Simple Way to Prevent Neural Networks from Overfitting. N. Srivastava
        et al., JMLR 15, 2014. https://jmlr.org/papers/v15/srivastava14a.html
    """
    require_key(key, "dropout")
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"random.dropout takes a rate in [0, 1], not {rate!r}.")
    if not x.is_floating_point() and not x.is_complex():
        raise TypeError(f"random.dropout takes a floating tensor, not {x.dtype}.")
    if rate == 0.0:
        return x
    scale = 1.0 / (1.0 - rate) if rate < 1.0 else 0.0
    dtype = x.dtype.to_real() if x.is_complex() else x.dtype
    return x * _ops.MASK(key, x.shape, 1.0 - rate, scale, dtype)
