"""The logits of a head, as a tensor that is computed when something reads it.

What goes row by row keeps it late: slices of tokens, a change of shape or dtype. A cross-entropy of
it runs tile by tile; anything else gets the logits themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat._errors import SavedTensorModifiedError, refusal
from remat._switches.blocks import note_tiled
from remat._torch import autocast, levels, modes, trees
from remat._torch.modules import calling_module
from remat._tracing.thread import is_running
from remat.layers import tiled_cross_entropy


@final
class LateProduct(Tensor):
    """`rows @ head.T` in a dtype, of shape (..., vocabulary)."""

    rows: Tensor
    head: Tensor
    tiles: int | str
    versions: tuple[int, int]

    @staticmethod
    def __new__(
        cls: Any, rows: Tensor, head: Tensor, tiles: int | str, dtype: torch.dtype
    ) -> LateProduct:
        """A tensor without data, with the metadata of the product."""
        shape = (*rows.shape[:-1], len(head))
        made = cls._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=rows.device, requires_grad=True
        )
        made.rows, made.head, made.tiles = rows, head, tiles
        made.versions = rows._version, head._version
        with modes.unseen_by_traces():
            made.register_hook(_refuse_gradient)
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Stays late where `func` goes row by row; computes the product otherwise."""
        with modes.unseen_by_traces():
            if func in _METADATA:
                return func(*args, **(kwargs or {}))
            options = dict(kwargs or {})
            if isinstance(options.get("out"), cls):
                raise _untouchable("something is written to them")
            if args and isinstance(args[0], cls):
                if _keeps_hold(func):
                    raise _untouchable(f"`{func.__name__}` of them is called")
                late = _kept_late(func, *args, **options)
                if late is not None:
                    return late
        args, options = trees.map_tensors(_computed_logits, (args, options))
        return func(*args, **options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        """What comes here has gone past autograd, and with it the gradient."""
        raise _past_autograd(f"{func} got them")

    def require_fresh(self) -> None:
        """Refuses rows or a head that were changed in place meanwhile."""
        if (self.rows._version, self.head._version) != self.versions:
            raise SavedTensorModifiedError.of(
                where=_LOGITS,
                what="are read after the hidden states or the head's weight were changed.",
                why="They are computed when something reads them, and would be others now.",
                do="Read them before the optimizer's step: `logits = output.logits + 0`.",
            )

    def changed(self, rows: Tensor, dtype: torch.dtype | None = None) -> LateProduct:
        """The product of other rows, or in another dtype."""
        self.require_fresh()
        return LateProduct(rows, self.head, self.tiles, dtype or self.dtype)


def _refuse_gradient(gradient: Tensor) -> None:
    raise _past_autograd("a gradient came back to them")


def _past_autograd(what: str) -> TypeError:
    return refusal(
        TypeError,
        where=_LOGITS,
        what=f"{what} before they were computed.",
        why="They are computed where an operator of torch reads them. An autograd.Function "
        "takes them as they are, and their gradient would be lost.",
        do="Pass it `logits + 0`, or leave `tiled_loss` out.",
    )


def _untouchable(what: str) -> TypeError:
    return refusal(
        TypeError,
        where=_LOGITS,
        what=f"{what} before they were computed.",
        why="What reads them next would compute them anew, without the change or the hook.",
        do="Call it on `logits + 0`, and use that from then on, or leave `tiled_loss` out.",
    )


def _with_bias() -> ValueError:
    return refusal(
        ValueError,
        where=_LOGITS,
        what="have a bias, which the head got after that call.",
        why="In tiles they are the product with one weight, and the bias would be left out.",
        do="Set `bias` of the head to None, or call enable again without `tiled_loss`.",
    )


_LOGITS = "the logits of a model with interop.transformers.enable(tiled_loss=...)"


def _keeps_hold(func: Any) -> bool:
    """Whether a function changes its first argument, or adds a hook to it."""
    name: str = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in _HOLDING


_HOLDING = {
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or")),
    *("register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
}


def _computed_logits(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, LateProduct):
        return tensor
    with modes.unseen_by_traces():
        tensor.require_fresh()
        dtype = tensor.dtype
    return F.linear(tensor.rows, tensor.head).to(dtype)


def _kept_late(func: Any, late: LateProduct, *rest: Any, **options: Any) -> Any:
    """What a function gives that goes row by row; None where it needs the product."""
    match func:
        case F.cross_entropy:
            return _cross_entropy(late, *rest, **options)
        case _ if options:
            return None
        case Tensor.to if rest not in ((late.device,), (torch.float32,)):
            return None
        case Tensor.float | Tensor.to:
            is_moved = rest == (late.device,)
            return late if is_moved else late.changed(late.rows, torch.float32)
        case Tensor.contiguous:
            return late
        case Tensor.view | Tensor.reshape:
            return _viewed_logits(late, *rest)
        case Tensor.__getitem__:
            return _sliced_logits(late, *rest)
        case _requires_grad.__get__:
            return late.rows.requires_grad or late.head.requires_grad
        case _:
            return None


def _viewed_logits(late: LateProduct, *sizes: Any) -> LateProduct | None:
    shape: list[Any] = [*sizes[0]] if isinstance(sizes[0], (tuple, list)) else [*sizes]
    if shape[-1] != len(late.head):
        return None
    return late.changed(late.rows.reshape(*shape[:-1], late.rows.shape[-1]))


def _sliced_logits(late: LateProduct, index: Any) -> LateProduct | None:
    parts: list[Any] = [*index] if isinstance(index, tuple) else [index]
    is_open = any(each is Ellipsis for each in parts)
    is_whole = parts[-1] == slice(None) if is_open else len(parts) < late.dim()
    kinds = set(map(type, parts)) - {slice, type(Ellipsis)}
    return late.changed(late.rows[tuple(parts)]) if is_whole and not kinds else None


_LOSS_OPTIONS = {"ignore_index", "label_smoothing", "reduction"}


def _cross_entropy(
    late: LateProduct, target: Tensor, weight: Tensor | None = None, **options: Any
) -> Tensor | None:
    is_plain = late.dim() == 2 and not target.is_floating_point() and weight is None
    options = {key: each for key, each in options.items() if each is not None}
    if not is_plain or options.keys() - _LOSS_OPTIONS:
        return None
    late.require_fresh()
    with modes.unseen_by_traces():
        logits = late.rows, late.head
        loss = tiled_cross_entropy(*logits, target, tiles=late.tiles, **options)
        return loss.to(late.dtype)


_requires_grad: Any = Tensor.requires_grad
_FIELDS = ("shape", "dtype", "device", "ndim", "layout")
_METHODS = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point)
_METADATA = {*_METHODS, *(getattr(Tensor, name).__get__ for name in _FIELDS)}


@final
class LateHead:
    """Stands in the place of a head's `forward`: its product is computed when it is read."""

    def __init__(self, head: nn.Linear, tiles: int | str) -> None:
        self.head = head
        self.tiles = tiles
        self.__qualname__ = "tiled_loss"  # by which a plan names it

    def __call__(self, x: Tensor) -> Tensor:
        """The logits, late while the model trains."""
        if torch.compiler.is_compiling():
            return type(self.head).forward(self.head, x)
        through = calling_module()
        head: nn.Linear = self.head if through is None else through
        is_plain = not is_running() and not levels.interpreter_is_active()
        if not is_plain or not head.training or not torch.is_grad_enabled():
            return type(head).forward(head, x)
        if head.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            raise _with_bias()
        note_tiled(self)
        rows, weight = map(autocast.in_products, (x, head.weight))
        return LateProduct(rows, weight, self.tiles, rows.dtype)
