"""A function that catches what only a trace raises, and goes on: on numbers it goes another way."""

import contextlib
import copy
import re
import threading
import unittest
from collections.abc import Callable
from concurrent import futures

import pytest
import torch
from torch import Tensor, nn

from remat import CapturedTensorError, RematError, TraceError, modules, remat
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


def on_a_thread(x: Tensor) -> Tensor:
    answers: list[bool] = []

    def ask() -> None:
        try:
            answers.append(bool(x.sum() > 100))
        except Exception:  # noqa: BLE001
            answers.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return x.sin() if answers[0] else x.cos()


def in_a_pool(x: Tensor) -> Tensor:
    with futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: bool(x.sum() > 0))
        return x.sin() if asked.exception() is None else x.tanh()


def in_a_region_of_a_thread(x: Tensor) -> Tensor:
    """Whose trace would wait for this one to end, which waits for the thread."""
    with futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: remat(torch.sin)(x))
        return x if found.exception() else found.result()


def under_unittest(x: Tensor) -> Tensor:
    """Takes the lines out of the error."""
    with unittest.TestCase().assertRaises(RuntimeError):  # noqa: PT027
        if x.sum() > 0:
            raise RuntimeError("positive")
    return x.tanh()


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    *(by_value, by_count, by_item, by_array, by_shape, in_a_loop, told_otherwise),
    *(on_a_thread, in_a_pool, in_a_region_of_a_thread, under_unittest),
]


@pytest.mark.contract
@pytest.mark.parametrize("fun", FUNCTIONS)
def test_it_is_refused(fun: Callable[[Tensor], Tensor]) -> None:
    """The error names the line, and the way that works does."""
    x = (seeded(4) + 2).requires_grad_()

    with pytest.raises(TraceError) as caught:
        remat(fun)(x)

    assert re.search(r"test_caught_errors\.py:\d+: ", str(caught.value))
    assert "; on numbers it would go another way." in str(caught.value)
    assert_bitwise(remat(fun, engine="rerun")(x), fun(x))


def goes_on(x: Tensor) -> Tensor:
    try:
        return x.sin() if x.sum() > 0 else x.cos()
    except RuntimeError:
        return x.tanh()


def closes_first(x: Tensor) -> float:
    try:
        return x.sum().item()
    finally:
        x.cos()


def goes_on_after_another(x: Tensor) -> Tensor:
    try:
        return x * closes_first(x)
    except RuntimeError:
        return x.tanh()


@pytest.mark.parametrize(("fun", "below"), [(goes_on, 4), (goes_on_after_another, 4)])
def test_the_error_says_where_the_function_goes_on(
    fun: Callable[[Tensor], Tensor], below: int
) -> None:
    """In what catches, as is seen at the next operator, or at the end."""
    line = fun.__code__.co_firstlineno + below

    goes_on = rf"catches this error, and goes on at test_caught_errors\.py:{line};"
    with pytest.raises(TraceError, match=goes_on):
        remat(fun)(seeded(4).requires_grad_())


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


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_copy_that_cannot_be_followed_may_not_be_caught() -> None:
    """`deepcopy` takes the numbers of a tensor without an operator."""

    def fun(x: Tensor) -> Tensor:
        try:
            return x * copy.deepcopy(x.detach())
        except TypeError:
            return x * 0

    with pytest.raises(CapturedTensorError, match=r"test_caught_errors\.py:\d+"):
        remat(fun)(seeded(4).requires_grad_())
