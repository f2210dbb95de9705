"""Keys: made from a seed, split, and told apart by a number."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from remat._errors import refusal, shown
from remat.random import _ops
from remat.random._philox import as_int64

Shape = int | Sequence[int]

_LEAST, _END = -(1 << 63), 1 << 64


def key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """A key from a seed.

    Laws: equal seeds give equal keys, on every device and every version of torch.

    Args:
        seed: an integer in [-2**63, 2**64); a negative one stands for `seed + 2**64`.
        device: where the key lives, and with it what is drawn from it; None is torch's
            default device.

    Returns:
        A uint64 tensor of shape (2,): the seed of a stream of random blocks, and the
        position in it, here 0.

    Raises:
        TypeError: the seed is not an integer.
        ValueError: it is out of range.

    Example:
        >>> from remat import random
        >>> random.key(42)
        tensor([42,  0], dtype=torch.uint64)
    """
    advice = "For a number that depends on data, write random.fold_in(random.key(0), number)."
    number = _checked_integer("random.key(seed)", seed, advice)
    if torch.compiler.is_dynamo_compiling():
        # Inductor writes no constants of this dtype.
        signed = torch.tensor([as_int64(number), 0], device=device)
        return signed.view(torch.uint64)
    return torch.tensor([number % _END, 0], dtype=torch.uint64, device=device)


def split(key: Tensor, num: Shape = 2) -> Tensor:
    """New independent keys from one, which is consumed.

    Laws: the keys are the same at every call, under every transform and on every device;
    `split(key, n)[i]` is `split(key, m)[i]` and `fold_in(key, i)`; `split(key, (n, m))` is
    `split(key, n * m)` in that shape; `vmap(split)` is `split` of each key.

    Args:
        key: a key, uint64 of shape (2,).
        num: how many, at least 1; or a shape of keys.

    Returns:
        The keys, uint64 of shape (num, 2) or (*num, 2): they unpack, and `torch.func.vmap`
        maps them.

    Raises:
        TypeError: `key` is not a key, or `num` neither an integer nor a shape.
        ValueError: `num` is less than 1, or has a size that is.

    Example:
        >>> import torch
        >>> from remat import random
        >>> for_mask, for_noise = random.split(random.key(0))
        >>> torch.equal(for_mask, for_noise)
        False
    """
    require_key(key, "split")
    shape = as_shape(num, "split")
    count = math.prod(shape)
    if count < 1:
        raise ValueError(f"random.split(key, num) makes at least one key, not {num!r}.")
    keys = _ops.SPLIT(key, count)
    return keys if len(shape) == 1 else keys.view(*shape, 2)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and a number: that of a layer, a step, or a rank.

    Laws: keys folded from different numbers are independent; equal numbers give equal
    keys, as int or as tensor; the key is not consumed. `fold_in(key, i)` is
    `split(key, n)[i]`: use one or the other on a key.

    Args:
        key: a key, uint64 of shape (2,).
        data: an int in [-2**63, 2**64), or an integer tensor without dimensions, which
            may be mapped by `torch.func.vmap`; negative numbers stand for
            `data + 2**64`.

    Returns:
        A key, uint64 of shape (2,).

    Raises:
        TypeError: `key` is not a key, or `data` not an integer.
        ValueError: `data` is out of range or has dimensions.

    Example:
        >>> import torch
        >>> from remat import random
        >>> key = random.key(0)
        >>> step = torch.tensor(7)
        >>> torch.equal(random.fold_in(key, 7), random.fold_in(key, step))
        True
    """
    require_key(key, "fold_in")
    if isinstance(data, Tensor):
        return _ops.FOLD_IN(key, _number_to_fold(data, key.device))
    advice = "Number the things to be told apart, or fold in several numbers one after the other."
    number = _checked_integer("random.fold_in(key, data)", data, advice)
    return _ops.FOLD_IN_INT(key, as_int64(number))


def require_key(key: object, function: str) -> None:
    """Raises unless `key` is one key: uint64 of shape (2,)."""
    if isinstance(key, Tensor):
        if key.dtype == torch.uint64 and tuple(key.shape) == (2,):
            return
        dtype = str(key.dtype).removeprefix("torch.")
        found = f"a {dtype} tensor of shape {tuple(key.shape)}"
    else:
        found = repr(key)
    raise TypeError(
        f"random.{function} takes a key, a uint64 tensor of shape (2,), as its first "
        f"argument, not {found}. Make one with random.key(seed), and more with "
        "random.split(key, n); torch.func.vmap maps a function over several keys."
    )


def as_shape(shape: Shape | Tensor, function: str) -> list[int]:
    """The sizes of a shape that may be one number; raises unless each can be a size."""
    is_text = isinstance(shape, (str, bytes))
    sizes = shape if isinstance(shape, Sequence) and not is_text else (shape,)
    try:
        whole = [operator.index(cast("int", size)) for size in sizes]
    except TypeError as error:
        raise _not_a_shape(TypeError, shape, function, f"{error}.") from None
    if any(size < 0 for size in whole):
        what = f"the size {min(whole)} is negative."
        raise _not_a_shape(ValueError, shape, function, what)
    return whole


def _not_a_shape(
    kind: Callable[[str], Exception], shape: object, function: str, what: str
) -> Exception:
    return refusal(
        kind,
        where=f"random.{function}(key, {shape!r})",
        what=what,
        why="A size is a number of places, and none is inferred from the others.",
        do="Pass an integer, or a sequence of integers, each 0 or more.",
    )


def _number_to_fold(data: Tensor, device: torch.device) -> Tensor:
    if data.is_floating_point() or data.is_complex() or data.dtype == torch.bool:
        raise TypeError(
            f"random.fold_in(key, data) takes an integer tensor, not {data.dtype}. "
            "Number the things to be told apart."
        )
    if data.ndim:
        raise ValueError(
            "random.fold_in(key, data) takes one number, not a tensor of shape "
            f"{tuple(data.shape)}. torch.func.vmap maps it over several."
        )
    data = data.to(device)
    return data.view(torch.int64) if data.dtype == torch.uint64 else data.long()


def as_integer(call: str, number: object, advice: str) -> int:
    """A number that is whole, and neither a bool nor an array."""
    is_stray = isinstance(number, (bool, type)) or getattr(number, "shape", ())
    if not is_stray and hasattr(number, "__index__"):
        try:
            return operator.index(cast("int", number))
        except TypeError:  # a tensor of one float
            pass
    raise TypeError(f"{call} takes an integer, not {shown(number)}. {advice}")


def _checked_integer(call: str, number: object, advice: str) -> int:
    whole = as_integer(call, number, advice)
    if not _LEAST <= whole < _END:
        raise ValueError(f"{call} takes an integer in [-2**63, 2**64), not {whole}.")
    return whole
