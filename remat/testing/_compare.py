"""Two results, compared: where they differ first, and how much."""

import dataclasses
from typing import Any, Self, final

import torch
from torch import Tensor

from remat._errors import RematError
from remat._graph.meta import TensorMeta
from remat._torch import tensors as torch_tensors, trees


class NotEquivalentError(RematError, AssertionError):
    """Two functions gave different results where they should agree."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """How two tensors of one shape differ."""

    index: tuple[int, ...]  # the first element that differs
    # what the first and the second tensor hold there
    values: tuple[float | complex, float | complex]
    num_different: int  # how many elements differ
    num_elements: int  # how many there are
    # the largest difference; zero for equal elements, infinite ones too
    absolute: float
    # the largest difference relative to the first tensor's element; infinite where that
    # is zero
    relative: float

    @classmethod
    def between(cls, one: Tensor, other: Tensor) -> Self:
        """Measures two tensors whose bits differ somewhere."""
        one, other = _comparable_result(one), _comparable_result(other)
        different = (one != other) | (_sign_bits(one) != _sign_bits(other))
        different &= ~(one.isnan() & other.isnan())
        places = different.reshape(-1).nonzero().reshape(-1)
        first = int(places[0]) if len(places) else 0
        index = torch.unravel_index(torch.tensor(first), one.shape) if one.dim() else ()
        gap = (one - other).abs().where(different, 0)
        relative = (gap / one.abs()).where(different, 0)
        values = one.reshape(-1)[first].item(), other.reshape(-1)[first].item()
        most = float(gap.max()), float(relative.nan_to_num(0.0, posinf=torch.inf).max())
        return cls(tuple(map(int, index)), values, len(places), one.numel(), *most)

    def __str__(self) -> str:
        return (
            f"element {self.index} is {self.values[0]!r} in the first and "
            f"{self.values[1]!r} in the second; {self.num_different} of "
            f"{self.num_elements} elements differ, by at most {self.absolute:.3g} "
            f"(relative {self.relative:.3g})."
        )


def _comparable_result(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    # float64 holds the numbers of all types but these.
    is_wide = tensor.is_complex() or tensor.dtype is torch.int64
    return tensor if is_wide else tensor.to(torch.float64)


def _sign_bits(tensor: Tensor) -> Tensor:
    return tensor.real.signbit() if tensor.is_complex() else tensor.signbit()


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two results hold the same numbers; NaN is NaN, -0.0 is not 0.0."""
    if one is None or other is None:
        return one is other
    one, other = (each.detach().resolve_conj().resolve_neg() for each in (one, other))
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if torch_tensors.same_bits(one, other):
        return True
    # Two NaNs of different bits are the same number.
    nan = one.isnan() & other.isnan()
    zero = torch.zeros((), dtype=one.dtype, device=one.device)
    return torch_tensors.same_bits(one.where(~nan, zero), other.where(~nan, zero))


def gap_between(one: Tensor | None, other: Tensor | None) -> Gap | str:
    """How two results differ, or why they cannot be compared by element."""
    if one is None or other is None:
        which = "second" if other is None else "first"
        return f"is missing in the {which} function only."
    if one.shape != other.shape or one.dtype != other.dtype:
        first, second = TensorMeta.of(one), TensorMeta.of(other)
        return f"is {first} in the first and {second} in the second."
    return Gap.between(one, other)


def same_rest(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether results agree but for their tensors: in structure, and in each other leaf."""
    (spec, leaves), (other_spec, others) = one or (None, ()), other or (None, ())
    is_one_tree = spec == other_spec and len(leaves) == len(others)
    return is_one_tree and all(map(_is_same_leaf, leaves, others))


def _is_same_leaf(one: Any, other: Any) -> bool:
    """Whether two leaves of one class are equal; 1 is not 1.0, and NaN is NaN."""
    if one is other or type(one) is not type(other):
        return one is other
    if not trees.is_array(one):
        return bool(one == other or (one != one and other != other))
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def require_numbers(where: str, *results: Tensor | None) -> None:
    """Refuses results without numbers, as all of them would be the same."""
    for each in results:
        if each is not None and each.is_meta:
            raise RematError.of(
                where=f"{where} ({TensorMeta.of(each)})",
                what="is on the meta device.",
                why="Results are compared as numbers, which a meta tensor does not have.",
                do="Pass tensors on a real device, small ones if memory is short.",
            )


def require_same(
    one: Tensor | None, other: Tensor | None, label: str, where: str, *, exact: bool
) -> None:
    """Raises NotEquivalentError if two tensors differ, by a bit or by more than rounding."""
    if same_bits(one, other) or (not exact and _is_close(one, other)):
        return
    what = gap_between(one, other)
    if one is not None and isinstance(what, Gap):
        label = f"{label} ({TensorMeta.of(one)})"
    rounding = "to rounding, by the defaults of torch.testing.assert_close."
    raise NotEquivalentError.of(
        where=f"{where}, {label}",
        what=str(what),
        why=f"They should agree {'to the last bit.' if exact else rounding}",
        do="testing.first_difference(f, g)(*args) names the first operator whose "
        "result differs, also of functions that are transformed.",
    )


def _is_close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        there = other if one is None else one
        # Whether autograd knows that a gradient is zero is not a matter of rounding.
        return there is None or not there.any()
    try:
        torch.testing.assert_close(other, one, equal_nan=True)
    except AssertionError:
        return False
    return True
