"""Tensors that a region makes from arrays of numpy: constants, whose arrays are compared.

Oracle: the function without a region.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from remat import CapturedTensorError, MutationError, remat
from tests.support import assert_bitwise, seeded

pytestmark = pytest.mark.contract
TABLE = np.linspace(1.0, 2.0, 3)
PLACES = np.array([2, 0])
MASKED: Any = np.ma.masked_array(TABLE.copy())  # pyright: ignore[reportUnknownMemberType]


def set_at(x: Tensor) -> Tensor:
    spread = x.new_zeros(3, 3)
    spread[PLACES] = x[:2].sin()
    return spread * torch.arange(3)


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda x: (x * torch.tensor(TABLE)).sin(),
    "rows": lambda x: (x * torch.tensor(np.stack([TABLE, TABLE]))[0]).sin(),
    "new_tensor": lambda x: (x * x.new_tensor(TABLE)).sin(),
    "as_tensor": lambda x: (x * torch.as_tensor(TABLE)).sin(),
    "asarray": lambda x: (x * torch.asarray(TABLE)).sin(),
    "from_numpy": lambda x: (x * torch.from_numpy(TABLE * 2)).sin(),
    "masked": lambda x: (x * torch.tensor(MASKED)).sin(),
    "index": lambda x: x[PLACES].sin(),
    "indices of two kinds": lambda x: x[torch.from_numpy(PLACES), :2].sin(),
    "set at": set_at,
    "made inside": lambda x: (x * torch.from_numpy(np.arange(3.0))).sin(),
}


@pytest.fixture(autouse=True)
def as_they_were() -> None:
    TABLE[:] = np.linspace(1.0, 2.0, 3)
    MASKED[:] = TABLE
    PLACES[:] = 2, 0


def change() -> None:
    TABLE[0] += 1
    MASKED[0] += 1
    PLACES[:] = 1, 2


def outcome(fun: Any, between: Callable[[], None] = lambda: None) -> list[Tensor]:
    """What it returns and the gradient, with something that happens between the two halves."""
    x = seeded(3, 3).requires_grad_()
    y = fun(x)
    between()
    return [y, *torch.autograd.grad(y.sin().sum(), x)]


@pytest.mark.parametrize("use", USES)
def test_a_change_is_seen_by_the_next_call(use: str) -> None:
    fun = USES[use]
    region = remat(fun)

    for _ in range(3):
        assert_bitwise(outcome(region), outcome(fun))
        change()


@pytest.mark.parametrize("use", USES)
def test_a_change_is_not_seen_by_the_backward(use: str) -> None:
    """Where the array lies in a tensor's memory, plain torch computes with what it holds then."""
    expected = outcome(USES[use])

    assert_bitwise(outcome(remat(USES[use]), change), expected)


@pytest.mark.parametrize("use", USES)
def test_a_run_again_finds_the_array_as_it_was(use: str) -> None:
    """And leaves it as it is now: what lies in its memory is that of plain torch."""
    fun: Any = USES[use]
    expected = outcome(fun, change)
    TABLE[0], MASKED[0], PLACES[:] = 1.0, 1.0, [2, 0]

    region = remat(fun, engine="rerun")
    assert_bitwise(outcome(region, change), expected)


def test_one_that_is_too_large_to_be_compared_is_refused() -> None:
    table = np.zeros(2**13 + 1)

    with pytest.raises(
        CapturedTensorError,
        match=r"test_arrays.*65,544 bytes.*Make the tensor outside",
    ):
        remat(lambda x: x * torch.from_numpy(table)[:3])(seeded(3).requires_grad_())


def changes_the_array(x: Tensor) -> Tensor:
    table = np.ones(3)
    known = torch.from_numpy(table)
    y = x * known
    table[0] = 2
    return y * known


def changes_the_tensor(x: Tensor) -> Tensor:
    torch.as_tensor(TABLE).add_(1)
    return x * torch.tensor(TABLE)


@pytest.mark.parametrize("fun", [changes_the_array, changes_the_tensor])
def test_memory_of_both_that_changes_is_refused(fun: Any) -> None:
    own, region = torch.from_numpy, cast("Any", remat(fun))

    with pytest.raises(
        MutationError, match=r"test_arrays.*memory of a numpy array.*torch\.tensor"
    ):
        region(seeded(3).requires_grad_())
    assert torch.from_numpy is own


def test_a_copy_leaves_the_array_to_be_changed() -> None:
    """As a loop does that fills one array for each row."""

    def fun(x: Tensor) -> Tensor:
        row = np.zeros(3)
        for index in range(3):
            row[index] = 1
            x = (x * torch.tensor(row)).sin()
        return x

    region = remat(fun)
    assert_bitwise(outcome(region), outcome(fun))
