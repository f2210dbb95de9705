"""The distributions that are made from uniform numbers and bits by torch's operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from remat.random._draws import Shape, as_shape, bits, computed_in, require_fit, uniform
from remat.random._keys import require_key

_SQRT2 = math.sqrt(2.0)


def truncated_normal(
    key: Tensor,
    shape: Shape = (),
    *,
    lower: float | Tensor = -2.0,
    upper: float | Tensor = 2.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normal numbers, given that they lie in (lower, upper).

    sqrt(2) erfinv(u), with u uniform between erf(lower / sqrt 2) and erf(upper / sqrt 2).

    Laws: those of `remat.random`, with the agreement of `normal`. Beyond 5 standard
    deviations float32 has few numbers left; draw float64 there.

    Args:
        key: a key, uint64 of shape (2,).
        shape: the shape of the result.
        lower: the lower bound; a tensor broadcasts to `shape`.
        upper: the upper bound, likewise.
        dtype: float32, float64, float16 or bfloat16.

    Returns:
        A tensor of that shape and dtype, on the device of the key, within the bounds.

    Raises:
        TypeError: `key` is not a key, or `dtype` not one of these.
        ValueError: a bound does not broadcast to `shape`.

    Example:
        >>> from remat import random
        >>> random.truncated_normal(random.key(0), (100,), lower=0.0).min() > 0
        tensor(True)
    """
    require_key(key, "truncated_normal")
    computed = computed_in(dtype)
    require_fit("truncated_normal", as_shape(shape), lower=lower, upper=upper)

    def bound(value: float | Tensor) -> Tensor:
        # Made with `torch.full`, which a trace can repeat.
        if isinstance(value, Tensor):
            return value.to(computed)
        return torch.full((), value, dtype=computed, device=key.device)

    low, high = bound(lower), bound(upper)
    start, end = torch.erf(low / _SQRT2), torch.erf(high / _SQRT2)
    u = uniform(key, shape, dtype=computed, minval=start, maxval=end)
    number = (torch.erfinv(u) * _SQRT2).to(dtype)
    least, most = _inside(low, math.inf, dtype), _inside(high, -math.inf, dtype)
    return torch.minimum(torch.maximum(number, least), most)


def _inside(bound: Tensor, towards: float, dtype: torch.dtype) -> Tensor:
    """For truncated draws: the number of a dtype that comes next to a bound, in one direction."""
    bound = bound.detach()
    rounded = bound.to(dtype)
    following = torch.nextafter(rounded, torch.full_like(rounded, towards))
    is_inside = rounded > bound if towards > 0 else rounded < bound
    return torch.where(is_inside, rounded, following)


def gumbel(
    key: Tensor, shape: Shape = (), *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Standard Gumbel numbers: -log(-log(u)), with u uniform.

    Laws: those of `remat.random`, with the agreement of `normal`.

    Args:
        key: a key, uint64 of shape (2,).
        shape: the shape of the result.
        dtype: float32, float64, float16 or bfloat16.

    Returns:
        A tensor of that shape and dtype, on the device of the key; every number is finite.

    Raises:
        TypeError: `key` is not a key, or `dtype` not one of these.

    Example:
        >>> from remat import random
        >>> random.gumbel(random.key(0), (2,)).isfinite().all()
        tensor(True)
    """
    require_key(key, "gumbel")
    computed = computed_in(dtype)
    u = uniform(key, shape, dtype=computed).clamp(min=torch.finfo(computed).tiny)
    return (-torch.log(-torch.log(u))).to(dtype)


def categorical(
    key: Tensor, shape: Shape | None = None, *, logits: Tensor, axis: int = -1
) -> Tensor:
    """Indices drawn with probabilities softmax(logits), by the Gumbel-max trick.

    Laws: those of `remat.random`, unless two sums of logit and noise are so close that
    their order depends on the last bits. No gradient flows to the logits.

    Args:
        key: a key, uint64 of shape (2,).
        shape: the shape of the result, which must end with that of `logits` without
            `axis`; the dimensions before it are drawn independently. None means only
            that shape.
        logits: the unnormalized log-probabilities, floating, of any shape.
        axis: the axis of `logits` along which one index is drawn.

    Returns:
        Indices, int64 of that shape.

    Raises:
        TypeError: `key` is not a key.
        ValueError: `shape` does not end with that shape.

    Example:
        >>> import torch
        >>> from remat import random
        >>> logits = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
        >>> random.categorical(random.key(0), logits=logits)
        tensor([0, 1])
    """
    require_key(key, "categorical")
    last = logits.detach().movedim(axis, -1)
    batch = list(last.shape[:-1])
    wanted = batch if shape is None else as_shape(shape)
    if wanted[len(wanted) - len(batch) :] != batch:
        raise ValueError(
            f"random.categorical(key, shape) draws along axis {axis} of logits of shape "
            f"{tuple(logits.shape)}: the shape must end with {tuple(batch)}, and is "
            f"{tuple(wanted)}."
        )
    noise = gumbel(key, [*wanted, last.shape[-1]], dtype=computed_in(logits.dtype))
    return (noise + last).argmax(dim=-1)


def permutation(
    key: Tensor, x: Shape | Tensor, *, axis: int = 0, independent: bool = False
) -> Tensor:
    """A random order: of the first integers, or of a tensor along an axis.

    Numbers are ordered by 64 random bits each; two of n tie, and keep their order, with
    a probability under n**2 / 2**65.

    Laws: those of `remat.random`. Differentiable in a tensor `x`.

    Args:
        key: a key, uint64 of shape (2,).
        x: a tensor to shuffle; or an int n, for a permutation of 0 to n - 1; or a shape,
            for independent permutations of 0 to shape[axis] - 1 along the axis.
        axis: the axis along which to shuffle.
        independent: whether each row of a tensor along the axis gets an order of its own.

    Returns:
        A tensor like `x`, or int64 of that shape, on the device of the key.

    Raises:
        TypeError: `key` is not a key.

    Example:
        >>> from remat import random
        >>> random.permutation(random.key(0), 5).sort().values
        tensor([0, 1, 2, 3, 4])
    """
    require_key(key, "permutation")
    if not isinstance(x, Tensor):
        return _random_order(key, as_shape(x), axis)
    if independent:
        return x.take_along_dim(_random_order(key, x.shape, axis), dim=axis)
    return x.index_select(axis, _random_order(key, [x.shape[axis]], 0))


def _random_order(key: Tensor, shape: Sequence[int], axis: int) -> Tensor:
    words = bits(key, shape, dtype=torch.int64)
    return words.sort(dim=axis, stable=True).indices
