"""Zeros that forward mode computes with, although nobody asked for them.

The tangent of `x @ w` where only `x` has one is `dx @ w + x @ 0`: where a kernel cannot read
zeros without memory, torch gives it zeros with memory, one number in all places, and multiplies
by these. Here such a product, and what is made of it alone, is known to be zero, so that
nothing reads it any more. As in JAX, where a missing tangent is a symbolic zero, a product of
zero and infinity does not become NaN there.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch

from remat._graph import operators
from remat._graph.meta import is_alike
from remat._graph.values import Ref, Value, replace_refs

_aten: Any = torch.ops.aten

# Zero if one of the tensors that they read is.
_PRODUCTS = frozenset(
    {_aten.mm.default, _aten.bmm.default, _aten.mv.default, _aten.dot.default}
    | {_aten.mul.Tensor}
)
# Zero if the first tensor that they read is.
_LINEAR = frozenset(
    {_aten.neg.default, _aten.sum.default, _aten.sum.dim_IntList}
    | {_aten.div.Tensor, _aten.tanh_backward.default, _aten.sigmoid_backward.default}
    | {_aten.mul.Scalar, _aten.div.Scalar, _aten.clone.default}
)


def without_zeros(
    values: Sequence[Value], outputs: Collection[Ref | None]
) -> tuple[Value, ...]:
    """The same steps, none of which adds a zero of forward mode; each output stays a value."""
    kept = list(values)
    zeros: set[int] = set()
    same: dict[int, int] = {}
    returned = {ref.index for ref in outputs if ref is not None}

    def known(index: int) -> Ref:
        return Ref(same.get(index, index))

    for index, value in enumerate(values):
        if value.op is None:
            continue
        if same:
            args, kwargs = replace_refs((value.args, value.kwargs), known)
            kept[index] = value = dataclasses.replace(value, args=args, kwargs=kwargs)
        if _is_zero(value, zeros):
            zeros.add(index)
            continue
        other = _other_summand(value, zeros)
        if other is None or not is_alike(kept[other].meta, value.meta):
            continue
        if index in returned or value.names:
            kept[index] = dataclasses.replace(
                value, op=_aten.clone.default, args=(Ref(other),), kwargs=()
            )
        else:
            same[index] = other
    return tuple(kept)


def _is_zero(value: Value, zeros: set[int]) -> bool:
    if value.op is _aten.zeros.default:
        # Of what users ask for, the function is known.
        return value.args[0] == [] and "zeros" not in value.function
    if operators.short_name(value.op) == "aten._efficientzerotensor":
        return True
    if not zeros or not zeros.intersection(value.uses):
        return False
    if value.op in _PRODUCTS:
        return True
    if value.op is _aten.convolution.default:
        return value.args[2] is None  # without a bias
    if value.op is _aten.add.Tensor:
        return len(value.uses) == 2 and zeros.issuperset(value.uses)
    is_linear = value.op in _LINEAR or operators.viewed(value) is not None
    is_linear = is_linear or operators.short_name(value.op) == "aten._to_copy"
    return is_linear and value.uses[0] in zeros


def _other_summand(value: Value, zeros: Collection[int]) -> int | None:
    """What a sum or difference with a zero is equal to; None for anything else."""
    args: tuple[Any, ...] = value.args
    if value.op not in (_aten.add.Tensor, _aten.sub.Tensor) or len(value.uses) != 2:
        return None
    first, second = value.uses
    if second in zeros:
        return first
    is_plain = value.op is _aten.add.Tensor and not value.kwargs and len(args) == 2
    return second if is_plain and first in zeros else None
