"""What a trace may know of a tensor: its metadata, and layouts that compare and hash."""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, Self, cast, final

import torch

from remat._errors import show_type
from remat._torch import autocast, dtensor, levels, modes, sizes

# Shape, strides, dtype, device, whether it is differentiated; the other fields where they say
# something.
Layout = tuple[Any, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class TensorMeta:
    """All that a trace may know of a tensor: no data, no storage."""

    #: Its shape; a DTensor's is that of the part that this rank holds.
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # its strides, likewise
    dtype: torch.dtype  # its dtype
    device: torch.device  # its device
    requires_grad: bool = False  # whether it is to be differentiated
    #: How a DTensor is spread over the ranks; None for any other tensor.
    placement: Any = None
    #: Whether autocast keeps casts for later uses, but not of it.
    is_cast_each_time: bool = False

    @classmethod
    def of_operand(cls, tensor: torch.Tensor) -> Self:
        """The metadata of what a region gets, to be differentiated by whichever transform."""
        meta = cls.of(tensor, requires_grad=levels.requires_grad_anywhere(tensor))
        is_apart = autocast.is_cast_each_time(tensor)
        return dataclasses.replace(meta, is_cast_each_time=True) if is_apart else meta

    @classmethod
    def of(cls, tensor: torch.Tensor, *, requires_grad: bool | None = None) -> Self:
        """The metadata of a tensor, of any kind."""
        wanted = tensor.requires_grad if requires_grad is None else requires_grad
        placement = dtensor.placement(tensor)
        if placement is None:
            return cls.of_whole(tensor, requires_grad=wanted)
        with modes.unseen_by_traces():
            local = dtensor.local_part(levels.unwrapped(tensor))
            whole = cls.of_whole(local, requires_grad=wanted)
        return dataclasses.replace(whole, placement=placement)

    @classmethod
    def of_whole(cls, tensor: torch.Tensor, *, requires_grad: bool) -> Self:
        """The metadata of a tensor; of a DTensor that of the whole, as if it were plain."""
        shape = tuple(tensor.shape)
        return cls(shape, tensor.stride(), tensor.dtype, tensor.device, requires_grad)

    def empty(self) -> torch.Tensor:
        """A leaf like it, whose numbers are not set."""
        local = torch.empty_strided(
            self.shape,
            self.stride,
            dtype=self.dtype,
            device=self.device,
            requires_grad=self.is_leaf,
        )
        return self._spread(local)

    @property
    def is_leaf(self) -> bool:
        """Whether a tensor of this shape and strides is itself to be differentiated."""
        return self.requires_grad and self.placement is None

    def stand_in(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor for the function to use, or the DTensor of which it is this rank's part.

        Gradients are taken by the DTensor, and so are spread as without a region.
        """
        return self.cast_alike(self._spread(local))

    def _spread(self, local: torch.Tensor) -> torch.Tensor:
        if self.placement is None:
            return local
        wanted = self.requires_grad
        return dtensor.in_place_of(local, self.placement, requires_grad=wanted)

    def of_result(self) -> Self:
        """The metadata if an operator made the tensor, and not the user."""
        is_apart = self.requires_grad and self.dtype is torch.float32
        is_apart = is_apart and autocast.autocast_keeps_casts()
        return dataclasses.replace(self, is_cast_each_time=is_apart)

    def cast_alike(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in place of an operand, which autocast casts as often as the operand."""
        return autocast.cast_each_time(tensor) if self.is_cast_each_time else tensor

    @property
    def layout(self) -> Layout:
        """Its fields; see `layout_of`."""
        fields = (self.shape, self.stride, self.dtype, self.device, self.requires_grad)
        if self.placement is None and not self.is_cast_each_time:
            return fields
        return (*fields, self.placement, self.is_cast_each_time)

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, each counted once, at the sizes of the traced call."""
        return self.dtype.itemsize * math.prod(self.hints)

    @property
    def once(self) -> Self:
        """The metadata at the sizes of the traced call, an expanded dimension with one element."""
        stride = tuple(map(sizes.hint, self.stride))
        shape = tuple(unexpanded_shape(self.hints, stride))
        return dataclasses.replace(self, shape=shape, stride=stride)

    @property
    def hints(self) -> tuple[int, ...]:
        """The shape, with the size of the traced call for each open size."""
        return tuple(map(sizes.hint, self.shape))

    @property
    def is_differentiable(self) -> bool:
        """Whether tensors of this dtype have gradients."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def differentiated(self) -> "TensorMeta":
        """The same of a tensor that requires grad, if it can have a gradient."""
        return dataclasses.replace(self, requires_grad=self.is_differentiable)

    def __str__(self) -> str:
        return show_type(self.dtype, self.shape)


Meta = TensorMeta | tuple[TensorMeta | None, ...] | None


def unexpanded_shape(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """A shape before `expand`: a dimension that repeats one element has size one."""
    pairs = zip(shape, stride, strict=True)
    return [size if step else min(size, 1) for size, step in pairs]


def copied_as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also those of expanded dimensions, which are 0."""
    stride = tensor.stride()
    sizes = unexpanded_shape(tensor.shape, stride)
    copy = torch.empty_strided(sizes, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor[tuple(map(slice, sizes))]).expand(tensor.shape)


def layout_of(tensor: torch.Tensor) -> Layout:
    """The fields of a tensor's `TensorMeta`, cheap to read and to hash."""
    if autocast.is_cast_each_time(tensor) or dtensor.placement(tensor) is not None:
        return TensorMeta.of_operand(tensor).layout
    wanted = levels.requires_grad_anywhere(tensor)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, wanted)


def whole_layout(layout: Layout) -> Layout:
    """The layout of a tensor; that of a DTensor is the layout of the whole."""
    if not is_spread(layout):
        return layout
    _, _, dtype, device, wanted, placement, _ = layout
    return (placement.shape, placement.stride, dtype, device, wanted)


def is_spread(layout: Layout) -> bool:
    """Whether a layout is that of a DTensor."""
    return len(layout) > 5 and layout[5] is not None


def is_alike(one: Meta, other: Meta) -> bool:
    """Whether two values are tensors of the same shape, strides, dtype and device."""
    if not isinstance(one, TensorMeta) or not isinstance(other, TensorMeta):
        return False
    return one.layout[:4] == other.layout[:4]


def is_open(meta: TensorMeta) -> bool:
    """Whether a size or stride is a symbol of a running trace."""
    return any(isinstance(each, torch.SymInt) for each in (*meta.shape, *meta.stride))


def without_symbols(key: Any) -> Hashable:
    """A key with strings instead of symbols, which cannot be hashed."""
    if isinstance(key, torch.SymInt):
        return ("size", str(key))
    if isinstance(key, TensorMeta):
        return without_symbols(key.layout)
    if isinstance(key, tuple):
        return tuple(map(without_symbols, cast("tuple[Any, ...]", key)))
    return key


def metas_in(meta: Meta) -> list[TensorMeta]:
    """The metadata of each tensor of a value: of one, of an operator's several, or of none."""
    several = meta if isinstance(meta, tuple) else (meta,)
    return [each for each in several if each is not None]


def device_of(meta: Meta) -> torch.device:
    return metas_in(meta)[0].device
