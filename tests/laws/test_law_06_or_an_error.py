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

from remat import CapturedTensorError, SideEffectError, chain, remat, scan, schedules
from tests.support import assert_bitwise, seeded


def mix(x: Tensor, w: Tensor) -> Tensor:
    """What every case computes: its derivative in `w` depends on `x` and on `w`."""
    return torch.sin(torch.sin(x * w) * w)


def gradient(fun: Callable[[Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    """The gradient of one call with respect to `w`."""
    output = fun(x)
    return torch.autograd.grad(output, [w], torch.cos(output.detach()))[0]


class Frozen:
    """A property that builds a tensor from numpy, anew at each look."""

    def __init__(self, w: Tensor) -> None:
        self.array = w.detach().numpy()

    @property
    def w(self) -> Tensor:
        return torch.from_numpy(self.array)


def iterator(w: Tensor) -> Callable[[], Tensor]:
    held = itertools.repeat(w)
    return lambda: next(held)


def generator(w: Tensor) -> Callable[[], Tensor]:
    held = (each for each in [w] * 1000)
    return lambda: next(held)


def member_of_a_set(w: Tensor) -> Callable[[], Tensor]:
    held = {w}
    return lambda: next(iter(held))


def numpy_property(w: Tensor) -> Callable[[], Tensor]:
    held = Frozen(w)
    return lambda: held.w


def weak_reference(w: Tensor) -> Callable[[], Tensor]:
    held = weakref.ref(w)
    return lambda: held()  # type: ignore[return-value]


def cache(w: Tensor) -> Callable[[], Tensor]:
    held = functools.lru_cache(lambda: w)
    return lambda: held()


@pytest.mark.contract
@pytest.mark.parametrize("way", [iterator, generator, member_of_a_set, numpy_property])
def test_a_tensor_that_cannot_be_followed_is_an_error(way: Any) -> None:
    """It says which tensor, where it is used, and what to do."""
    w, x = seeded(3).requires_grad_(), seeded(2, 3, seed=1).requires_grad_()
    get = way(w)

    with pytest.raises(CapturedTensorError, match="argument") as error:
        remat(lambda x: mix(x, get()))(x)

    assert "float64[3]" in str(error.value)
    assert "test_law_06" in str(error.value)


@pytest.mark.contract
@pytest.mark.parametrize("way", [iterator, generator, member_of_a_set, numpy_property])
@pytest.mark.parametrize("schedule", [None, schedules.Every(2), schedules.Revolve(1)])
def test_a_stage_that_cannot_be_followed_is_an_error(schedule: Any, way: Any) -> None:
    """In stacks too, by schedule or not."""
    w, x = seeded(3).requires_grad_(), seeded(2, 3, seed=1).requires_grad_()
    get = way(w)

    def step(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return mix(c, get()), x

    with pytest.raises(CapturedTensorError, match="argument"):
        scan(step, x, x.expand(4, 2, 3), schedule=schedule)
    with pytest.raises(CapturedTensorError, match="argument"):
        chain([torch.sin, lambda x: mix(x, get())], schedule=schedule)(x)


@pytest.mark.contract
@pytest.mark.parametrize("schedule", [None, schedules.Every(2), schedules.Revolve(1)])
def test_a_stage_that_leaves_a_tensor_elsewhere_is_an_error(schedule: Any) -> None:
    """Its gradient could not come back to the stack."""
    x, kept = seeded(2, 3).requires_grad_(), list[Tensor]()

    def leaving(x: Tensor) -> Tensor:
        kept.append(x.exp())
        return torch.sin(x)

    with pytest.raises(SideEffectError, match="Return"):
        chain([torch.sin, leaving], schedule=schedule)(x)
    assert kept == []


@pytest.mark.parametrize("way", [weak_reference, cache])
def test_a_tensor_behind_a_call_is_followed_or_an_error(way: Any) -> None:
    """Weak references and caches hand out a tensor without a path of their own."""
    w, x = seeded(3).requires_grad_(), seeded(2, 3, seed=1)
    get = way(w)

    def fun(x: Tensor) -> Tensor:
        return mix(x, get())

    try:
        found = gradient(remat(fun), x, w)
    except CapturedTensorError:
        return
    assert_bitwise(found, gradient(fun, x, w))


def test_an_array_that_changes_is_noticed_or_an_error() -> None:
    """A tensor made from a reachable numpy array is never stale."""
    w, x = seeded(3), seeded(2, 3, seed=1).requires_grad_()
    held = Frozen(w)

    def fun(x: Tensor) -> Tensor:
        return mix(x, held.w)

    region = remat(fun)
    try:
        for _ in range(2):
            assert_bitwise(gradient(region, x, x), gradient(fun, x, x))
            held.array = held.array * 2
    except CapturedTensorError:
        return


def _scripted_module(w: Tensor) -> Callable[[Tensor], Tensor]:
    layer = torch.nn.Linear(3, 3).to(w.dtype)
    layer.weight = torch.nn.Parameter(w.detach())
    return torch.jit.script(layer)


def _scripted_function(w: Tensor) -> Callable[[Tensor], Tensor]:
    scripted = torch.jit.script(mix)
    return lambda x: scripted(x, w) + w


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("make", [_scripted_module, _scripted_function])
def test_a_parameter_that_torchscript_uses_raises(make: Any) -> None:
    """Its interpreter calls operators below autograd, where a gradient would be lost."""
    fun = make(seeded(3, 3, seed=1).requires_grad_())
    region = remat(lambda x: fun(x).sin())

    with pytest.raises(CapturedTensorError, match=r"before torch\.jit\.script"):
        region(seeded(3, 3).requires_grad_())
