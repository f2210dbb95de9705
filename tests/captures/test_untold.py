"""What a trace reads and no later call compares: told once, by its name, or watched."""

import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from remat import RematWarning, _user_lines, remat
from tests.support import assert_bitwise, grads, seeded

pytestmark = pytest.mark.contract

LARGE = np.arange(2.0**14)
OBJECTS = np.array([3, "text"], dtype=object)
SMALL = np.arange(4.0)
BYTES = bytearray(2**17)
THINGS = {object(), object()}
KEY = nn.Identity()
WEAK: Any = weakref.WeakKeyDictionary({KEY: 2.0})
WEAK_SET: Any = weakref.WeakSet([KEY])
COUNTS = itertools.count(1)

UNTOLD: dict[str, Callable[[Tensor], Tensor]] = {
    "LARGE": lambda x: x * float(LARGE[3]),
    "OBJECTS": lambda x: x * OBJECTS[0],
    "BYTES": lambda x: x * BYTES[3],
    "THINGS": lambda x: x * len(THINGS),
    "WEAK": lambda x: x * WEAK[KEY],
    "WEAK_SET": lambda x: x * len(WEAK_SET),
    "COUNTS": lambda x: x * next(COUNTS),
}


def _told(fun: Callable[[Tensor], Any], x: Tensor, engine: Any = "trace") -> list[str]:
    """The texts of what two calls of a new region warn of."""
    region = remat(fun, engine=engine)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        region(x)
        region(x * 2)
    return [str(each.message) for each in told if each.category is RematWarning]


@pytest.mark.parametrize("name", UNTOLD)
def test_what_is_not_compared_is_told_once(name: str) -> None:
    """The warning names it and its class, the function's line, and says what to do."""
    (text,) = _told(UNTOLD[name], seeded(4).requires_grad_())

    assert f"global `{name}` ({type(globals()[name]).__name__}) is read" in text
    assert "test_untold.py:" in text
    assert "Pass what changes as an argument" in text


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x * float(SMALL[3]),
        lambda x: x * len({1, 2}),
        lambda x: x.sin(),
        lambda x: x * sum(value for value in (1, 2)),
    ],
    ids=["small array", "simple set", "nothing", "own iterator"],
)
def test_what_is_compared_is_not_told(fun: Any) -> None:
    """Nor what the function makes itself."""
    assert _told(fun, seeded(4).requires_grad_()) == []


def test_an_attribute_of_a_captured_tensor_is_watched() -> None:
    """A change of what the code reads of it causes a new trace; of what it does not, none."""
    weight: Any = nn.Parameter(seeded(4))
    weight.scale, weight.other = 2.0, 0

    def fun(x: Tensor) -> Tensor:
        return (x * weight * weight.scale).sin()

    region, x = remat(fun), seeded(4)
    region.cache_clear()
    for weight.scale, weight.other in ((2.0, 0), (3.0, 0), (3.0, 1)):
        assert_bitwise(grads(region, [x]), grads(fun, [x]))

    assert region.cache_info().misses == 2


ASKING: dict[str, Callable[[Any], Tensor]] = {
    "hasattr": lambda x: x * 2 if hasattr(x, "flag") else x * 3,
    "getattr": lambda x: x * getattr(x, "flag", 5),
    "isinstance": lambda x: x * 2 if isinstance(x, nn.Parameter) else x * 3,
}


@pytest.mark.parametrize("name", ASKING)
def test_what_is_asked_of_an_argument_is_told(name: str) -> None:
    """A stand-in has no attributes of its own: with its line; a run again has them."""
    fun = ASKING[name]
    x: Any = nn.Parameter(seeded(4))
    x.flag = 7

    (text,) = _told(fun, x)

    assert "test_untold.py:" in text.partition("): ")[2]
    assert "Read it outside" in text
    assert_bitwise(remat(fun, engine="rerun")(x), fun(x))


def test_attributes_that_nobody_asks_for_are_not_told() -> None:
    """Libraries set some on every parameter."""
    x: Any = nn.Parameter(seeded(4))
    x._is_initialized = True

    assert _told(torch.sin, x) == []


def _marks_result(x: Tensor) -> Tensor:
    y: Any = x.sin()
    y.mark = 3
    return y


def _marks_argument(x: Any) -> Tensor:
    x.mark = 3
    return x.sin()


@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("fun", [_marks_result, _marks_argument])
def test_what_is_set_on_a_stand_in_is_told(
    fun: Callable[[Tensor], Tensor], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors of a call do not get the attribute, with either engine."""
    monkeypatch.setattr(_user_lines, "_said", set())
    (text,) = _told(fun, x := seeded(4).requires_grad_(), engine)

    assert "test_untold.py:" in text
    assert "sets `mark` on a result or an argument" in text
    assert "Return it beside the tensor" in text
    assert not hasattr(x, "mark")
    assert not hasattr(remat(fun, engine=engine)(x), "mark")


def test_what_had_its_attributes_before_is_not_told() -> None:
    """A captured tensor and an argument are returned with what was set on them outside."""
    table, x = seeded(4), seeded(4).requires_grad_()
    table.mark = x.mark = 3  # pyright: ignore[reportAttributeAccessIssue]

    def fun(x: Any) -> Any:
        return x * table.mark, table, x  # pyright: ignore[reportAttributeAccessIssue]

    assert _told(fun, x, "rerun") == []


def test_a_hook_for_all_modules_is_told() -> None:
    """It runs in the trace alone. Those that libraries register for a while are theirs."""
    linear, calls = nn.Linear(4, 4, dtype=torch.float64), [0]

    def hook(*_: Any) -> None:
        calls[0] = 1

    handle = register_module_forward_hook(hook)
    try:
        (text,) = _told(lambda x: linear(x), seeded(4).requires_grad_())
    finally:
        handle.remove()

    assert "hook`, a hook for all modules" in text
    assert calls == [1]
