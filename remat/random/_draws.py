"""The distributions: those that have an operator of their own, and those made of their draws."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from remat._errors import refusal, require_number, require_type
from remat.random import _ops
from remat.random._keys import Shape, as_integer, as_shape, require_key
from remat.random._philox import as_int64

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (
    *(torch.int32, torch.int64, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
_FEWEST_SPARE_BITS = 4  # fewer than these, and the bias of a remainder shows
_SQRT2 = math.sqrt(2.0)


def bits(key: Tensor, shape: Shape = (), *, dtype: torch.dtype = torch.int32) -> Tensor:
    """Random bits: every number of an integer dtype with equal probability.

    Laws: those of `remat.random`; dtypes under 32 bits hold the low bits of the int32.

    Args:
        key: a key, uint64 of shape (2,).
        shape: the shape of the result.
        dtype: an integer dtype.

    Returns:
        A tensor of that shape and dtype, on the device of the key.

    Raises:
        TypeError: `key` is not a key, or `dtype` not an integer dtype.

    Example:
        >>> from remat import random
        >>> random.bits(random.key(0), (2,))
        tensor([1713891541, -513161843], dtype=torch.int32)

    References:
        `jax.random.bits`, which defaults to uint32; the bits are those of
        `torch.func._random.bits`.
    """
    shape = _checked_shape("bits", key, shape, dtype, _INTEGERS)
    info = torch.iinfo(dtype)
    return _draw_integers(key, shape, info.min, info.max, dtype)


def uniform(
    key: Tensor,
    shape: Shape = (),
    *,
    dtype: torch.dtype = torch.float32,
    minval: float | Tensor = 0.0,
    maxval: float | Tensor = 1.0,
) -> Tensor:
    """Numbers from [minval, maxval), all equally likely.

    Laws: those of `remat.random`; the result is a multiple of 2**-24 in float32, 2**-53
    in float64, 2**-11 in float16 and 2**-8 in bfloat16, before it is scaled; scaling may
    round up to `maxval`. Differentiable in tensor bounds.

    Args:
        key: a key, uint64 of shape (2,).
        shape: the shape of the result.
        dtype: float32, float64, float16 or bfloat16.
        minval: the lower bound; a tensor broadcasts to `shape`.
        maxval: the upper bound, likewise.

    Returns:
        A tensor of that shape and dtype, on the device of the key.

    Raises:
        TypeError: `key` is not a key, or `dtype` not one of these.
        ValueError: a tensor does not broadcast to `shape`, or `minval` is above `maxval`.

    Example:
        >>> from remat import random
        >>> random.uniform(random.key(0), (3,), minval=-1.0).abs().max() <= 1
        tensor(True)
    """
    shape = _checked_shape("uniform", key, shape, dtype, minval=minval, maxval=maxval)
    if isinstance(minval, Tensor) or isinstance(maxval, Tensor):
        unit = _ops.UNIFORM(key, shape, 0.0, 1.0, dtype)
        return (minval + unit.to(_computed_in(dtype)) * (maxval - minval)).to(dtype)
    _require(minval <= maxval, "uniform", "minval <= maxval", (minval, maxval))
    return _ops.UNIFORM(key, shape, float(minval), float(maxval), dtype)


def normal(
    key: Tensor,
    shape: Shape = (),
    *,
    dtype: torch.dtype = torch.float32,
    mean: float | Tensor = 0.0,
    std: float | Tensor = 1.0,
) -> Tensor:
    """Normal numbers, by the transformation of Box and Muller.

    Laws: those of `remat.random`, but for the last bits: with torch's kernel and without,
    and from device to device, results agree to 4 units in the last place of a standard
    normal number, not to the bit. Differentiable in tensor `mean` and `std`.

    Args:
        key: a key, uint64 of shape (2,).
        shape: the shape of the result.
        dtype: float32, float64, float16 or bfloat16.
        mean: the mean; a tensor broadcasts to `shape`.
        std: the standard deviation, likewise.

    Returns:
        A tensor of that shape and dtype, on the device of the key.

    Raises:
        TypeError: `key` is not a key, or `dtype` not one of these.
        ValueError: a tensor does not broadcast to `shape`, or `std` is a negative number.

    Example:
        >>> from remat import random
        >>> random.normal(random.key(0), (2, 3), mean=5.0).shape
        torch.Size([2, 3])

    References:
        `jax.random.normal`, which has neither mean nor std; the numbers are those of
        `torch.func._random.normal`.
    """
    shape = _checked_shape("normal", key, shape, dtype, mean=mean, std=std)
    _require(isinstance(std, Tensor) or std >= 0, "normal", "a std of 0 or more", std)
    if isinstance(mean, Tensor) or isinstance(std, Tensor):
        standard = _ops.NORMAL(key, shape, 0.0, 1.0, dtype)
        return (mean + std * standard.to(_computed_in(dtype))).to(dtype)
    return _ops.NORMAL(key, shape, float(mean), float(std), dtype)


def bernoulli(key: Tensor, shape: Shape = (), *, p: float | Tensor = 0.5) -> Tensor:
    """True with probability `p`.

    Laws: those of `remat.random`; the result is `uniform(key, shape) < p`.

    Args:
        key: a key, uint64 of shape (2,).
        shape: the shape of the result.
        p: the probability; a tensor broadcasts to `shape`, and gets no gradient.

    Returns:
        A bool tensor of that shape, on the device of the key.

    Raises:
        TypeError: `key` is not a key.
        ValueError: `p` does not broadcast to `shape`, or is a number outside [0, 1].

    Example:
        >>> from remat import random
        >>> random.bernoulli(random.key(0), (1000,), p=0.25).sum()
        tensor(238)
    """
    shape = _checked_shape("bernoulli", key, shape, torch.float32, p=p)
    if isinstance(p, Tensor):
        return _ops.UNIFORM(key, shape, 0.0, 1.0, torch.float32) < p
    _require(0.0 <= p <= 1.0, "bernoulli", "a p in [0, 1]", p)
    return _ops.MASK(key, shape, float(p), 1.0, torch.bool)


def randint(
    key: Tensor,
    shape: Shape = (),
    *,
    minval: int = 0,
    maxval: int,
    dtype: torch.dtype = torch.int32,
) -> Tensor:
    """Integers from [minval, maxval), equally likely up to the bias of a remainder.

    Laws: those of `remat.random`. A draw has 64 bits for dtypes of 64 bits and 32 for the
    others; the remainder of its division by `n = maxval - minval` favors some numbers by
    at most `n / 2**64` or `n / 2**32`, and none where n is a power of two.

    Args:
        key: a key, uint64 of shape (2,).
        shape: the shape of the result.
        minval: the least integer.
        maxval: the first integer beyond.
        dtype: an integer dtype.

    Returns:
        A tensor of that shape and dtype, on the device of the key.

    Raises:
        TypeError: `key` is not a key, or `dtype` not an integer dtype.
        ValueError: the range is empty, not within the dtype, or so wide that the bias
            would show: 1/16 of what is drawn or more, unless it is a power of two.

    Example:
        >>> from remat import random
        >>> random.randint(random.key(0), (5,), maxval=10)
        tensor([1, 3, 8, 0, 4], dtype=torch.int32)
    """
    shape = _checked_shape("randint", key, shape, dtype, _INTEGERS)
    advice = "It bounds whole numbers."
    minval = as_integer("random.randint(minval=...)", minval, advice)
    maxval = as_integer("random.randint(maxval=...)", maxval, advice)
    _require_randint_range(minval, maxval, dtype)
    return _draw_integers(key, shape, minval, maxval - 1, dtype)


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
    require_number("random.dropout(rate=...)", rate)
    _require(0.0 <= rate <= 1.0, "dropout", "a rate in [0, 1]", rate)
    require_type("random.dropout(key, x)", x, Tensor, wanted="a tensor")
    if not x.is_floating_point() and not x.is_complex():
        raise TypeError(f"random.dropout takes a floating tensor, not {x.dtype}.")
    if rate == 0.0:
        return x
    scale = 1.0 / (1.0 - rate) if rate < 1.0 else 0.0
    dtype = x.dtype.to_real() if x.is_complex() else x.dtype
    return x * _ops.MASK(key, x.shape, 1.0 - rate, scale, dtype)


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
        ValueError: a bound does not broadcast to `shape`, or two numbers leave nothing
            between them.

    Example:
        >>> from remat import random
        >>> random.truncated_normal(random.key(0), (100,), lower=0.0).min() > 0
        tensor(True)
    """
    name = "truncated_normal"
    shape = _checked_shape(name, key, shape, dtype, lower=lower, upper=upper)
    if not (isinstance(lower, Tensor) or isinstance(upper, Tensor)):
        _require(lower < upper, name, "lower < upper", (lower, upper))
    computed = _computed_in(dtype)

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
    shape = _checked_shape("gumbel", key, shape, dtype)
    computed = _computed_in(dtype)
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
        TypeError: `key` is not a key, or `logits` not floating.
        ValueError: `shape` does not end with that shape, or the axis is empty.
        IndexError: `logits` has no such axis.

    Example:
        >>> import torch
        >>> from remat import random
        >>> logits = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
        >>> random.categorical(random.key(0), logits=logits)
        tensor([0, 1])
    """
    require_key(key, "categorical")
    require_type("random.categorical(logits=...)", logits, Tensor, wanted="a tensor")
    _require_drawn_dtype(logits.dtype, _FLOATS, "categorical(logits=...)", "takes")
    if _length_of(axis, logits.shape, "categorical") == 0:
        raise refusal(
            ValueError,
            where=f"random.categorical(logits=..., axis={axis})",
            what=f"the axis of logits of shape {tuple(logits.shape)} is empty.",
            why="There is no index to draw.",
            do="Pass a logit for each index, along this axis.",
        )
    last = logits.detach().movedim(axis, -1)
    batch = list(last.shape[:-1])
    wanted = batch if shape is None else as_shape(shape, "categorical")
    if wanted[len(wanted) - len(batch) :] != batch:
        raise ValueError(
            f"random.categorical(key, shape) draws along axis {axis} of logits of shape "
            f"{tuple(logits.shape)}: the shape must end with {tuple(batch)}, and is "
            f"{tuple(wanted)}."
        )
    noise = gumbel(key, [*wanted, last.shape[-1]], dtype=_computed_in(logits.dtype))
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
        x: a tensor to shuffle; or an integer n, which may be a tensor without dimensions,
            for a permutation of 0 to n - 1; or a shape, for independent permutations of 0
            to shape[axis] - 1 along the axis.
        axis: the axis along which to shuffle.
        independent: whether each row of a tensor along the axis gets an order of its own.

    Returns:
        A tensor like `x`, or int64 of that shape, on the device of the key.

    Raises:
        TypeError: `key` is not a key, or `x` a number that is no integer.
        ValueError: a size is negative.
        IndexError: `x` has no such axis.

    Example:
        >>> from remat import random
        >>> random.permutation(random.key(0), 5).sort().values
        tensor([0, 1, 2, 3, 4])
    """
    require_key(key, "permutation")
    if not isinstance(x, Tensor) or x.ndim == 0:
        shape = as_shape(x, "permutation")
        _length_of(axis, shape, "permutation")
        return _random_order(key, shape, axis)
    length = _length_of(axis, x.shape, "permutation")
    if independent:
        return x.take_along_dim(_random_order(key, x.shape, axis), dim=axis)
    return x.index_select(axis, _random_order(key, [length], 0))


def _random_order(key: Tensor, shape: Sequence[int], axis: int) -> Tensor:
    words = bits(key, shape, dtype=torch.int64)
    return words.sort(dim=axis, stable=True).indices


def _draw_integers(
    key: Tensor, shape: list[int], first: int, last: int, dtype: torch.dtype
) -> Tensor:
    # Operators take int64: numbers beyond go as the int64 with their bits.
    return _ops.INTEGERS(key, shape, as_int64(first), as_int64(last), dtype)


def _length_of(axis: int, shape: Sequence[int], function: str) -> int:
    """How long a tensor of a shape is along an axis; raises unless there is one."""
    axis = as_integer(f"random.{function}(axis=...)", axis, "It counts dimensions.")
    if not -len(shape) <= axis < len(shape):
        raise refusal(
            IndexError,
            where=f"random.{function}(axis={axis})",
            what=f"a tensor of shape {tuple(shape)} has no such axis.",
            why="Axes are counted from 0, or back from -1.",
            do="Pass an axis of the tensor, or one more dimension.",
        )
    return shape[axis]


def _checked_shape(
    function: str,
    key: object,
    shape: Shape,
    dtype: torch.dtype,
    known: tuple[torch.dtype, ...] = _FLOATS,
    **numbers: float | Tensor,
) -> list[int]:
    """The sizes of what a function is asked to draw; raises unless it can draw that.

    Each number is one, or a tensor that broadcasts to the shape: a larger one would share draws.
    """
    require_key(key, function)
    _require_drawn_dtype(dtype, known, function)
    for name, each in numbers.items():
        if not isinstance(each, Tensor):
            require_number(f"random.{function}({name}=...)", each)
    wanted = as_shape(shape, function)
    for name, each in numbers.items():
        sizes = each.shape if isinstance(each, Tensor) else ()
        pairs = zip(reversed(sizes), reversed(wanted), strict=False)
        if len(sizes) > len(wanted) or any(size not in (1, end) for size, end in pairs):
            raise ValueError(
                f"random.{function}(key, shape) draws numbers of shape {tuple(wanted)}, to "
                f"which {name}, of shape {tuple(sizes)}, does not broadcast. Pass the shape "
                "of the result."
            )
    return wanted


def _require(holds: bool, function: str, takes: str, given: object) -> None:
    """Raises unless what is asked of the numbers given holds; what tensors hold is not read."""
    if not holds:
        raise ValueError(f"random.{function} takes {takes}, not {given!r}.")


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which draws of another are computed: 16 bits are too few."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _require_drawn_dtype(
    dtype: torch.dtype,
    known: tuple[torch.dtype, ...],
    function: str,
    does: str = "draws",
) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in known:  # pyright: ignore[reportUnnecessaryIsInstance]
        names = ", ".join(map(str, known))
        raise TypeError(f"random.{function} {does} {names}, not {dtype!r}.")


def _require_randint_range(minval: int, maxval: int, dtype: torch.dtype) -> None:
    info, width = torch.iinfo(dtype), maxval - minval
    if not info.min <= minval < maxval <= info.max + 1:
        raise ValueError(
            f"random.randint draws {dtype} from [minval, maxval) within "
            f"[{info.min}, {info.max}], not from [{minval}, {maxval})."
        )
    drawn = 64 if info.bits == 64 else 32
    if width >> (drawn - _FEWEST_SPARE_BITS) and width & (width - 1):
        wider = "with dtype=torch.int64, or " if drawn == 32 else ""
        raise ValueError(
            f"random.randint has {drawn} bits for a number of {dtype}: too few for a range "
            f"of {width}, in which some numbers would be more likely by over 6 %. Draw "
            f"{wider}from a power of two."
        )
