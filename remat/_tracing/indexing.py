"""Indices in tensors: a look-up by value, and a fill under a mask.

Outside a trace torch reads the number and takes a view. Inside `vmap` it gathers instead. A
trace has no numbers to read and gathers, too. The result is then no view: an in-place change
of it would not reach the tensor, and is refused.

`x[mask] = number` becomes `masked_fill_`, which is also what torch's own kernel runs. The
operator that torch calls for it asks where the mask is true, which a trace of a mapped program
cannot answer.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor

from remat._errors import TraceError
from remat._torch import fakes
from remat._user_lines import user_line

_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


@final
class LookUps:
    """The look-ups of one trace."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, int, str]] = []

    def call(self, func: Callable[..., Any], args: Sequence[Any]) -> Any:
        """The result of `x[i]` or `x[i] = y`; NotImplemented for any other call."""
        if func is not Tensor.__getitem__ and func is not Tensor.__setitem__:
            return NotImplemented
        tensor, index, *given = args
        parts = _parts_of_index(index)
        if given and _is_fill(tensor, index, *given):
            new_dims = [None] * (tensor.dim() - index.dim())
            tensor.masked_fill_(index[(..., *new_dims)], *given)
            return None
        if not any(map(_is_0d_index, parts)):
            return NotImplemented
        if not given:
            found = _item_at(tensor, parts)
            self._made.append((found, found._version, user_line()))
            return found
        others = [each for each in parts if not _is_0d_index(each)]
        if any(isinstance(each, (Tensor, list)) for each in others):
            return NotImplemented
        # `x[i] += y` changes what was looked up, and puts it back here.
        self._made = [each for each in self._made if each[0] is not given[0]]
        return _set_item(tensor, parts, *given)

    def require_unchanged(self) -> None:
        """Refuses a function that has changed what it looked up."""
        for found, version, line in self._made:
            if found._version != version:
                raise TraceError.of(
                    where=line,
                    what="the result of `x[i]`, where `i` is a tensor, is changed in place.",
                    why="In a trace `x[i]` is a gather and not a view, so `x` "
                    "would not change.",
                    do="Write x[i] = ..., or x[i] += ..., or pass `i` as an int.",
                )


def _is_fill(tensor: Tensor, index: Any, value: Any) -> bool:
    """Whether one number is written wherever a mask is true."""
    if not (isinstance(index, Tensor) and index.dtype is torch.bool and index.dim()):
        return False
    if index.device != tensor.device or index.shape != tensor.shape[: index.dim()]:
        return False
    return type(value) in {bool, int} or (
        type(value) is float and tensor.dtype.is_floating_point
    )


def _parts_of_index(index: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)


def _is_0d_index(part: Any) -> bool:
    is_0d = isinstance(part, Tensor) and part.dtype in _INTEGERS and part.dim() == 0
    return is_0d and fakes.hides_its_number(part)


def _item_at(tensor: Tensor, parts: tuple[Any, ...]) -> Tensor:
    found = torch.ops.aten.index.Tensor(
        tensor, _numbers_by_dim(tensor, parts, _num_dims_indexed)
    )
    others = tuple(part for part in parts if not _is_0d_index(part))
    return found[others] if others else found


def _numbers_by_dim(
    tensor: Tensor, parts: tuple[Any, ...], width: Callable[[Any], int]
) -> list[Tensor | None]:
    """For each dimension of a tensor, whose `width` each part takes, the number that stands there."""
    numbers: list[Tensor | None] = []
    for place, part in enumerate(parts):
        if part is Ellipsis:
            after = sum(map(width, parts[place + 1 :]))
            numbers += [None] * (tensor.dim() - after - len(numbers))
        elif _is_0d_index(part):
            numbers.append(part)
        else:
            numbers += [None] * width(part)
    return numbers


def _num_dims_indexed(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and part.dtype is torch.bool:
        return part.dim()
    return 1


def _set_item(tensor: Tensor, parts: tuple[Any, ...], value: Any) -> None:
    view = tensor[tuple(slice(None) if _is_0d_index(part) else part for part in parts)]
    numbers = _numbers_by_dim(view, parts, _num_dims_left)
    given = value if isinstance(value, Tensor) else view.new_full((), value)
    torch.ops.aten.index_put_.default(view, numbers, given.to(view.dtype))


def _num_dims_left(part: Any) -> int:
    """How many dimensions a part of an index without a number leaves."""
    return 1 if part is None or isinstance(part, slice) or _is_0d_index(part) else 0
