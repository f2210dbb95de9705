"""The errors of tensors that cannot be traced, wherever a region meets them."""

from __future__ import annotations

import torch
from torch import Tensor

from remat._errors import TraceError, refusal

_STRIDED = torch.strided  # the look-up in `torch` takes longer than the comparison


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor has sizes and strides; an older nested one only claims so."""
    return tensor.layout is _STRIDED and not tensor.is_nested


def unstrided(where: str, tensor: Tensor) -> TraceError:
    """The error of a region that is given, or reaches, a tensor without strides."""
    if tensor.is_nested:
        kind, do = "nested tensor", "Pass its values and offsets, or a padded tensor"
    else:
        kind, do = "tensor", "Make it sparse inside the function"
    if tensor.layout is not _STRIDED:
        do += ', or use engine="rerun", which runs the function again in the backward'
    return refusal(
        TraceError,
        where=where,
        what=f"is a {kind} of layout {tensor.layout}, which cannot be traced.",
        why="A trace lays out its inputs by their strides, and it has none.",
        do=f"{do}.",
    )


def overriding(kind: type[Tensor]) -> TraceError:
    """The error of a region that is given, or reaches, a tensor of such a class."""
    return refusal(
        TraceError,
        where=f"a tensor of the class {kind.__qualname__}",
        what="has a `__torch_function__` of its own, and cannot be traced.",
        why="It would run with the region's programs, in the forward and again in "
        "the backward, but not in the trace that they are made from.",
        do="Pass `x.as_subclass(torch.Tensor)`, or use "
        'engine="rerun", which runs the function again in the backward.',
    )
