"""A function that catches what only a trace raises, and goes on: on numbers it goes another way."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from remat import RematError, TraceError, modules, remat
from tests.support import assert_bitwise, seeded


def by_value(x: Tensor) -> Tensor:
    try:
        if torch.isnan(x).any():
            raise ValueError("not a number")  # noqa: TRY301  as users write it
        return x / x.norm()
    except Exception:  # noqa: BLE001
        return torch.zeros_like(x)


def by_count(x: Tensor) -> Tensor:
    count = 7
    with contextlib.suppress(RuntimeError):
        count = int((x > 0).sum())
    return x * count


def by_item(x: Tensor) -> Tensor:
    scale = 5.0
    with contextlib.suppress(Exception):
        scale = x.sum().item()
    return x * scale


def by_array(x: Tensor) -> Tensor:
    try:
        return x * float(x.detach().numpy()[0])
    except Exception:  # noqa: BLE001
        return x


def by_shape(x: Tensor) -> Tensor:
    try:
        return x[x > 0].sum()
    except Exception:  # noqa: BLE001
        return x.sum()


def in_a_loop(x: Tensor) -> Tensor:
    try:
        return x * next(each for each in x if each > 0)
    except Exception:  # noqa: BLE001
        return x


def told_otherwise(x: Tensor) -> Tensor:
    try:
        return x * x.tolist()[0]
    except Exception as error:
        raise ValueError("no list") from error


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    *(by_value, by_count, by_item, by_array, by_shape, in_a_loop, told_otherwise)
]


@pytest.mark.contract
@pytest.mark.parametrize("fun", FUNCTIONS)
def test_it_is_refused(fun: Callable[[Tensor], Tensor]) -> None:
    """The error names the line, and the way that works does."""
    x = (seeded(4) + 2).requires_grad_()

    with pytest.raises(TraceError) as caught:
        remat(fun)(x)

    assert "test_caught_errors.py:" in str(caught.value)
    assert_bitwise(remat(fun, engine="rerun")(x), fun(x))


class Block(nn.Module):
    """Normalizes, where nothing is wrong."""

    def forward(self, x: Tensor) -> Tensor:
        return by_value(x)


def test_it_is_refused_in_a_model() -> None:
    """Whose blocks are regions."""
    model = nn.Sequential(Block(), Block())
    modules.apply(model, Block)

    with pytest.raises(TraceError, match=r"test_caught_errors\.py:"):
        model(seeded(4).requires_grad_())


def of_either_shape(x: Tensor) -> Tensor:
    """Raises, and catches, the same on numbers."""
    try:
        return x.view(100)
    except RuntimeError:
        return x.view(2, 2).sin()


def test_what_numbers_raise_too_may_be_caught() -> None:
    """A shape that does not fit is no error of the trace's."""
    x = seeded(4).requires_grad_()

    assert_bitwise(remat(of_either_shape)(x), of_either_shape(x))


def catches_a_region(x: Tensor) -> Tensor:
    """Tries a region first."""
    try:
        return remat(by_item)(x)
    except RematError:
        return x.sin()


def test_a_region_inside_that_is_refused_may_be_caught() -> None:
    """It is refused on numbers too."""
    x = seeded(4).requires_grad_()

    assert_bitwise(remat(catches_a_region)(x), catches_a_region(x))
