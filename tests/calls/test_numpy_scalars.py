"""A scalar of numpy is a static number: it cannot change, and is compared by type and bits."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from remat import StaticArgumentError, remat
from tests.support import assert_bitwise, seeded

pytestmark = pytest.mark.contract
GLOBAL: Any = np.float32(2.5)


class Scaled(nn.Module):
    """Keeps scalars as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = np.float64(3)
        self.powers = [np.int64(2)]

    def forward(self, x: Any) -> Tensor:
        return (x * self.scale) ** self.powers[0]


def of_linspace(x: Tensor) -> Tensor:
    """An array of its own, read number by number."""
    return torch.stack([x * np.linspace(0, 1, 4)[i] for i in range(4)])


def written(x: Tensor) -> Tensor:
    y: Any = x.sin()
    y[0] = np.float64(3)
    return y.masked_fill(y > 0.9, np.float32(2))


CASES: dict[str, Callable[[Any], Any]] = {
    "sqrt": lambda x: x.sin() / np.sqrt(x.shape[-1]),
    "prod": lambda x: x.sin().reshape(np.prod(x.shape)),
    "linspace": of_linspace,
    "on the left": lambda x: np.float64(2) * x.sin() - np.float32(1),
    "made a tensor": lambda x: x.sin() * torch.tensor([np.float32(2)] * 3),
    "filled": lambda x: torch.where(x > 0, x.sin(), np.float64(2)),
    "written": written,
    "global": lambda x: x.sin() * GLOBAL,
    "partial": functools.partial(lambda scale, x: x.sin() * scale, np.float64(2)),
    "attributes": Scaled(),
}
SCALARS = [
    *(np.float32(0.0), np.float32(-0.0), np.float64(0.0), np.float64(-0.0), 0.0, -0.0),
    *(np.float32("nan"), np.int64(1), np.int32(1), 1, np.bool_(True), np.bool_(False)),
    *(
        np.complex64(1),
        np.str_("1"),
        np.datetime64("2020-01-01"),
        np.datetime64("2020"),
    ),
]


def told(x: Tensor, scalar: Any) -> tuple[Tensor, str]:
    """What differs for any two of them."""
    return x.sin(), f"{scalar!r} {type(scalar)}"


def by_global(x: Tensor) -> tuple[Tensor, str]:
    return told(x, GLOBAL)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_function(name: str) -> None:
    """One trace serves every call."""
    fun, region = CASES[name], remat(CASES[name])
    x = seeded(2, 3).requires_grad_()

    for _ in range(2):
        found, expected = region(x), fun(x)
        assert_bitwise(found, expected)
        assert_bitwise(
            torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x)
        )
    assert region.cache_info().misses == 1


@pytest.mark.filterwarnings("ignore:.*traced")  # for the tenth value
@pytest.mark.parametrize("nest", ["plain", "in a list", "by keyword"])
def test_arguments_are_told_by_type_and_bits(nest: str) -> None:
    """A trace for each, used again for an equal one that is another object."""
    x = seeded(3).requires_grad_()
    region = remat(lambda x, given: told(x, given[0] if type(given) is list else given))

    def call(scalar: Any) -> str:
        if nest == "by keyword":
            return region(x, given=scalar)[1]
        return region(x, [scalar] if nest == "in a list" else scalar)[1]

    region.cache_clear()  # of the other parameters
    for scalar in SCALARS * 2:
        again = scalar.copy() if isinstance(scalar, np.generic) else scalar
        assert call(again) == told(x, scalar)[1]
    assert region.cache_info().misses == len(SCALARS)


@pytest.mark.filterwarnings("ignore:.*was traced for a tenth time")
def test_captured_ones_are_told_by_type_and_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A global that changes from one to the next, and back."""
    x, region = seeded(3).requires_grad_(), remat(by_global)

    for scalar in SCALARS * 2:
        again = scalar.copy() if isinstance(scalar, np.generic) else scalar
        monkeypatch.setitem(globals(), "GLOBAL", again)
        assert region(x)[1] == told(x, scalar)[1]
    assert region.cache_info().misses == len(SCALARS)


@pytest.mark.filterwarnings("ignore:.*is traced for each size")
def test_a_size_may_vary() -> None:
    """Numpy gets the number, and the trace holds for that size alone."""
    fun = lambda x: x.sin().reshape(np.prod(x.shape)) / np.sqrt(x.shape[0])  # noqa: E731
    region = remat(fun, dynamic_shapes=True)

    for size in (3, 4, 5):
        x = seeded(size, 2).requires_grad_()
        assert_bitwise(region(x), fun(x))


ARRAYS = {
    "array": np.ones(3),
    "of no dimension": np.array(2.0),
    "masked": np.ma.masked_array(np.ones(3)),
    "record": np.zeros(1, dtype=[("a", "f4")])[0],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_what_may_change_is_refused_as_an_argument(name: str) -> None:
    """A record is a view of its array."""
    with pytest.raises(StaticArgumentError, match="is a numpy"):
        remat(lambda x, array: x.sin())(seeded(3).requires_grad_(), ARRAYS[name])
