"""Law 6, its second half.

"Each gets its gradient, or the call raises `CapturedTensorError`. Never zero, never
stale, never None."
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import CapturedTensorError, remat
from tests.support import assert_bitwise, seeded


def mix(x: Tensor, w: Tensor) -> Tensor:
    """What every case computes: its derivative in `w` depends on `x` and on `w`."""
    return torch.sin(torch.sin(x * w) * w)


def gradient(fun: Callable[[Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    """The gradient of one call with respect to `w`."""
    output = fun(x)
    return torch.autograd.grad(output, [w], torch.cos(output.detach()))[0]


class Unfollowable:
    """Ways to a tensor that no path describes."""

    def __init__(self, w: Tensor) -> None:
        self.array = w.detach().numpy()
        self.iterator = itertools.repeat(w)
        self.generator = (w for _ in range(1000))
        self.set = {w}
        self.reference = weakref.ref(w)
        self.cached = functools.lru_cache(lambda: w)

    @property
    def from_numpy(self) -> Tensor:
        return torch.from_numpy(self.array).requires_grad_()


UNFOLLOWABLE: dict[str, Callable[[Unfollowable], Tensor]] = {
    "iterator": lambda u: next(u.iterator),
    "generator": lambda u: next(u.generator),
    "set": lambda u: next(iter(u.set)),
    "property": lambda u: u.from_numpy,
}


@pytest.mark.contract
@pytest.mark.parametrize("way", UNFOLLOWABLE.values(), ids=UNFOLLOWABLE)
def test_a_tensor_that_cannot_be_followed_is_an_error(way: Any) -> None:
    """It says which tensor, where it is used, and what to do."""
    w, x = seeded(3).requires_grad_(), seeded(2, 3, seed=1)
    held = Unfollowable(w)

    with pytest.raises(CapturedTensorError, match="argument") as error:
        remat(lambda x: mix(x, way(held)))(x.requires_grad_())

    assert "float64[3]" in str(error.value)
    assert "test_law_06" in str(error.value)


@pytest.mark.parametrize("way", ["reference", "cached"])
def test_a_tensor_behind_a_call_is_followed_or_an_error(way: str) -> None:
    """Weak references and caches hand out a tensor without a path of their own."""
    w, x = seeded(3).requires_grad_(), seeded(2, 3, seed=1)
    held = Unfollowable(w)

    def fun(x: Tensor) -> Tensor:
        return mix(x, getattr(held, way)())

    try:
        found = gradient(remat(fun), x, w)
    except CapturedTensorError:
        return
    assert_bitwise(found, gradient(fun, x, w))
