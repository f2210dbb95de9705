"""Operators that read of an argument its sizes alone: other numbers in it change nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remat._graph import operators
from remat._graph.values import Value
from tests.support import assert_bitwise, seeded

pytestmark = pytest.mark.contract

X2, X3, X4 = seeded(2, 3, 6), seeded(2, 3, 6, 8), seeded(2, 3, 6, 8, 4)
LABELS = torch.zeros(2, 6, 8, dtype=torch.long)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ones_like": lambda: torch.ones_like(X2),
    "zeros_like": lambda: torch.zeros_like(X2),
    "full_like": lambda: torch.full_like(X2, 3.0),
    "new_ones": lambda: X2.new_ones(3),
    "new_zeros": lambda: X2.new_zeros(3),
    "new_full": lambda: X2.new_full((3,), 2.0),
    "avg_pool2d": lambda: F.avg_pool2d(leaf(X3), 2),
    "avg_pool3d": lambda: F.avg_pool3d(leaf(X4), 2),
    "_adaptive_avg_pool2d": lambda: F.adaptive_avg_pool2d(leaf(X3), 3),
    "_adaptive_avg_pool3d": lambda: F.adaptive_avg_pool3d(leaf(X4), 3),
    "max_pool2d_with_indices": lambda: F.max_pool2d(leaf(X3), 2, return_indices=True)[
        0
    ],
    "max_pool3d_with_indices": lambda: F.max_pool3d(leaf(X4), 2),
    "adaptive_max_pool2d": lambda: F.adaptive_max_pool2d(leaf(X3), 3),
    "adaptive_max_pool3d": lambda: F.adaptive_max_pool3d(leaf(X4), 3),
    "reflection_pad1d": lambda: F.pad(leaf(X2), (1, 2), mode="reflect"),
    "reflection_pad2d": lambda: F.pad(leaf(X3), (1, 2) * 2, mode="reflect"),
    "reflection_pad3d": lambda: F.pad(leaf(X4), (1, 2) * 3, mode="reflect"),
    "replication_pad1d": lambda: F.pad(leaf(X2), (1, 2), mode="replicate"),
    "replication_pad2d": lambda: F.pad(leaf(X3), (1, 2) * 2, mode="replicate"),
    "replication_pad3d": lambda: F.pad(leaf(X4), (1, 2) * 3, mode="replicate"),
    "nll_loss": lambda: F.nll_loss(leaf(X2[0]), LABELS[0, 0, :3]),
    "nll_loss2d": lambda: F.nll_loss(leaf(X3), LABELS),
    "convolution, by its input": lambda: F.conv1d(leaf(X2), seeded(4, 3, 2)),
    "convolution, by its weight": lambda: F.conv1d(X2, leaf(seeded(4, 3, 2))),
}


def leaf(tensor: Tensor) -> Tensor:
    """A tensor to differentiate by."""
    return tensor.clone().requires_grad_()


class OtherNumbers(TorchDispatchMode):
    """Runs each operator that reads sizes alone on other numbers there, too."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ):
        result = func(*args, **(kwargs or {}))
        alone = operators.read_by_sizes(Value(func, args))
        if alone:
            self.met.add(operators.short_name(func).removeprefix("aten."))
            others = [
                torch.full_like(arg, float("nan"))
                if any(arg is each for each in alone)
                else arg
                for arg in args
            ]
            assert_bitwise(func(*others, **(kwargs or {})), result)
        return result


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_numbers_change_nothing(name: str) -> None:
    with OtherNumbers() as mode:
        out = FUNCTIONS[name]()
        if out.requires_grad:
            out.sum().backward()

    assert {name, f"{name.partition(',')[0]}_backward"} & mode.met
