"""A trace for a further size: what the first traces have shown is not traced again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import remat
from tests.support import seeded


@pytest.mark.contract
def test_a_further_size_is_traced_for_the_cotangents_that_were_met() -> None:
    """Once backwards had cotangents like the outputs, and none of one number, as of a sum."""
    region: Any = remat(lambda x: torch.sin(torch.sin(x)))

    def joints(size: int, backward: Callable[[Tensor], None]) -> int:
        x = seeded(size).requires_grad_()
        out = region(x)
        backward(out)
        assert x.grad is not None
        return len(region.entry_of((x,), {})[0].stages.joints)

    def like(out: Tensor) -> None:
        out.backward(torch.ones_like(out))

    assert [joints(size, like) for size in (2, 3, 4)] == [2, 1, 1]
    assert [joints(size, lambda out: out.sum().backward()) for size in (5, 6)] == [1, 2]
