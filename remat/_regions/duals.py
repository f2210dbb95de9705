"""Dual tensors: values with the tangents of forward mode."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.autograd import forward_ad

from remat._torch import isolation, levels
from remat._torch.forward_ad import dual_level_is_active

# Public, but torch has not annotated them.
unpack_dual: Callable[[Tensor], forward_ad.UnpackedDualTensor] = forward_ad.unpack_dual  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_make_dual: Callable[[Tensor, Tensor], Tensor] = forward_ad.make_dual  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def unpacked(tensors: Sequence[Tensor]) -> list[forward_ad.UnpackedDualTensor]:
    """The primals and tangents of the innermost level."""
    with isolation.without_inference_mode():
        return [unpack_dual(tensor) for tensor in tensors]


def primal_of(tensor: Tensor) -> Tensor:
    """The tensor without its tangent."""
    return unpack_dual(tensor).primal if dual_level_is_active() else tensor


def dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """An output with its tangent; torch gives the tangent the memory layout of the output."""
    if levels.repeats_itself(primal):
        primal = primal.clone()
    return _make_dual(primal, tangent)
