"""`dynamic_shapes=True`: what a function may ask of a size as of any number."""

import functools
import json
import numbers
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remat import RematWarning, TraceError
from tests.support import assert_bitwise, run
from tests.tracing.sizes import quiet, sequence, traced

pytestmark = [
    # Small functions save too little for some policies to matter.
    pytest.mark.filterwarnings("ignore:.*saves no memory:remat.RematWarning"),
    # What torch says of itself when forward mode or vmap is first used.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


@pytest.mark.contract
def test_a_branch_on_a_size_is_traced_on_both_sides() -> None:
    """Once on each; nothing is said, as both serve many sizes."""

    def fun(x: Tensor) -> Tensor:
        return x.sin().sin() if x.shape[1] > 8 else x.cos().cos()

    region = traced(fun)

    for length in (3, 12, 5, 20, 8, 9):
        quiet(region, sequence(2, length))
        args = (sequence(3, length),)
        assert_bitwise(run(region, args), run(fun, args))

    assert region.cache_info().misses == 2


def looped(x: Tensor) -> Tensor:
    """Needs the length as a number, and the batch size not."""
    for position in range(x.shape[1]):
        x = x.sin() + position
    return x


@pytest.mark.contract
def test_a_size_that_is_needed_as_a_number_is_traced_anew_and_said_once() -> None:
    """The first call cannot know that it will vary; the batch size stays open."""
    region = traced(looped)
    quiet(region, sequence(2, 3))
    quiet(region, sequence(4, 3))
    with pytest.warns(RematWarning, match=r"looped .*each size of dimension 1 of `x`"):
        run(region, (sequence(2, 4),))
    for length in (5, 6):
        quiet(region, sequence(2, length))
        args = (sequence(3, length),)
        assert_bitwise(run(region, args), run(looped, args))

    assert region.cache_info().misses == 4


@pytest.mark.contract
def test_what_cannot_be_traced_with_open_sizes_is_traced_for_each() -> None:
    """A size as the key of a dict: the warning repeats what torch says."""

    def fun(x: Tensor) -> Tensor:
        return {x.shape[1]: x.sin()}[x.shape[1]].cos()

    region = traced(fun)

    with pytest.warns(RematWarning, match="for each size, in spite .*unhashable"):
        run(region, (sequence(2, 3),))
    quiet(region, sequence(2, 4))
    args = (sequence(2, 5),)
    assert_bitwise(run(region, args), run(fun, args))
    assert region.cache_info().misses == 3


SCALES = {"3": 2.0, "4": 3.0, "(2, 5, 8)": 4.0, "1.5": 5.0, "2.00": 6.0, "  5": 7.0}
TEXTS: dict[str, Callable[[Tensor], str]] = {
    "f-string": lambda x: f"{x.shape[1]}",
    "width": lambda x: f"{x.shape[1]:>3d}",
    "quotient": lambda x: f"{x.shape[1] / 2}",
    "digits": lambda x: f"{x.shape[1] / 2:.2f}",
    "str": lambda x: str(x.shape[1]),
    "repr": lambda x: repr(x.shape[1]),
    "percent": lambda x: "%s" % x.shape[1],  # noqa: UP031
    "shape": lambda x: str(tuple(x.shape)),
    "json": lambda x: json.dumps(list(x.shape)),
}


@pytest.mark.contract
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_of_a_size_is_that_of_each(text: Callable[[Tensor], str]) -> None:
    """In keys and in what is returned: a symbol's own text would be silently wrong."""

    def fun(x: Tensor) -> tuple[Tensor, str]:
        return x.sin() * SCALES.get(text(x), 9.0), text(x)

    region, told = traced(fun), list[str]()

    for length in (3, 4, 5):
        x = sequence(2, length)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", RematWarning)
            assert region(x.requires_grad_())[1] == text(x)
        told += [str(each.message) for each in said]
        first, plain = (lambda x: region(x)[0]), (lambda x: fun(x)[0])
        assert_bitwise(run(first, (x,)), run(plain, (x,)))

    assert sum("is traced for each size" in each for each in told) == 1


SCALED: dict[str, Callable[[Tensor], Any]] = {
    "json": lambda x: json.loads(json.dumps({"n": [x.shape[1]]}, default=str))["n"],
    "indented": lambda x: json.loads(
        json.dumps([x.shape[1] / 2], default=str, indent=1)
    ),
    "array": lambda x: np.array([x.shape[1], 2]).astype(np.float32).tolist(),
    "array of quotients": lambda x: np.array([x.shape[1] / 2]).tolist(),
    "dtype": lambda x: [2.0 if np.asarray(x.shape[1]).dtype == np.int64 else 3.0],
    "is True": lambda x: [2.0 if (x.shape[1] > 3) is True else 3.0],
    "is False": lambda x: [2.0 if (x.shape[1] / 2 <= 1.5) is False else 3.0],
    "type": lambda x: [2.0 if type(x.shape[1] == 4) is bool else 3.0],
    "not equal": lambda x: [2.0 if (x.shape[1] != 5) is True else 3.0],
    "equal sizes": lambda x: [2.0 if (x.shape[0] == x.shape[1]) is True else 3.0],
}


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.parametrize("scale", SCALED.values(), ids=SCALED)
def test_a_size_is_to_others_what_a_number_is(scale: Callable[..., Any]) -> None:
    """To json, to numpy, and to who asks whether a comparison is True itself."""

    def fun(x: Tensor) -> Tensor:
        return x.sin() * sum(scale(x))

    region = traced(fun)

    for length in (3, 4, 5, 2):
        x = sequence(2, length)
        assert_bitwise(run(region, (x,)), run(fun, (x,)))


def test_a_comparison_is_traced_on_both_sides() -> None:
    """One trace for each answer, not for each size."""
    region = traced(lambda x: x.sin() if (x.shape[1] > 5) is True else x.cos())

    for length in range(3, 9):
        region(sequence(2, length).requires_grad_())

    assert region.cache_info().misses == 2


@functools.singledispatch
def kind_of(number: object) -> float:
    """What a number is, to who asks by `singledispatch`."""
    return 7.0


kind_of.register(int)(lambda number: 2.0 + number)


def matched(number: object) -> float:
    """What a number is, to who asks by `match`."""
    match number:
        case int():
            return 2.0
        case _:
            return 3.0


KINDS: dict[str, Callable[[Tensor], float]] = {
    "int": lambda x: 2.0 if isinstance(x.shape[1], int) else 3.0,
    "no bool": lambda x: 2.0 if isinstance(x.shape[1], bool) else 3.0,
    "integral": lambda x: 2.0 if isinstance(x.shape[1], numbers.Integral) else 3.0,
    "float": lambda x: 2.0 if isinstance(x.shape[1] / 2, float) else 3.0,
    "bool": lambda x: 2.0 if isinstance(x.shape[1] > 2, bool) else 3.0,
    "match": lambda x: matched(x.shape[1]),
    "singledispatch": lambda x: kind_of(x.shape[1]),
}


@pytest.mark.contract
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_size_is_a_number_to_who_asks(kind: Callable[[Tensor], float]) -> None:
    """And stays open: all sizes have one trace."""

    def fun(x: Tensor) -> Tensor:
        return x.sin() * kind(x)

    region = traced(fun)

    for length in (3, 5, 4):
        args = (sequence(2, length),)
        assert_bitwise(run(region, args), run(fun, args))

    assert region.cache_info().misses == 1


def test_symbols_are_as_they_were_outside_of_a_trace() -> None:
    """What they answer in a trace is undone, also where the trace has failed."""
    before = [vars(kind).copy() for kind in SYMBOLS]

    with pytest.raises(TraceError):
        traced(lambda x: x.sin() if x.sum() > 0 else x)(sequence(2, 3).requires_grad_())

    assert [vars(kind) for kind in SYMBOLS] == before


SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
ROUNDED: dict[str, Callable[[Tensor], Any]] = {
    "returned": lambda x: (x.sin(), x.shape[1] * 0.1 * 3.0),
    "tensor": lambda x: x.sin() * torch.tensor(x.shape[1] * 0.1 * 3.0),
    "float": lambda x: x.sin() * float(x.shape[1] * 0.1 * 3.0),
    "int": lambda x: x.sin() * int(x.shape[1] * 0.1 * 3.0 * 10),
    "sum": lambda x: (x.sin(), x.shape[1] / 2 + x.shape[0] / 3 + x.shape[2] / 7),
}


@pytest.mark.contract
@pytest.mark.parametrize("fun", ROUNDED.values(), ids=ROUNDED)
def test_a_rounded_number_has_the_bits_of_the_function(
    fun: Callable[[Tensor], Any],
) -> None:
    """Torch's symbols reorder factors and terms: 3 * 0.1 * 3.0 is not 0.3 * 3.0."""
    region = traced(fun)

    quiet(region, sequence(2, 3))
    with pytest.warns(RematWarning, match="each size of dimension 1"):
        run(region, (sequence(2, 6),))
    for length in (3, 6, 7):
        x = sequence(2, length).requires_grad_()
        (found, *numbers_), (expected, *others) = listed(region(x)), listed(fun(x))
        assert_bitwise(found, expected)
        assert list(map(repr, numbers_)) == list(map(repr, others))


def listed(result: Any) -> list[Any]:
    """What a function returns, one or several."""
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.contract
def test_a_fifth_trace_is_told_of() -> None:
    """A product that is needed as a number fixes no size: each product is a trace."""

    def fun(x: Tensor) -> Tensor:
        return x.sin() * len(range(x.shape[0] * x.shape[1]))

    region = traced(fun)
    for length in (3, 4, 5, 6):
        quiet(region, sequence(length, 2 * length))
    args = (sequence(7, 14),)
    with pytest.warns(RematWarning, match="for a fifth time, in spite of"):
        assert_bitwise(run(region, args), run(fun, args))

    quiet(region, sequence(8, 16))
    assert region.cache_info().misses == 6


def too_long(x: Tensor) -> Tensor:
    """Refuses some lengths by itself."""
    if x.shape[1] > 4:
        raise ValueError(f"{x.shape[1]} positions are too many")
    return x.sin()


@pytest.mark.contract
def test_an_error_of_the_function_is_its_own() -> None:
    """Its text has the number, its traceback leads into the function."""
    region = traced(too_long)
    quiet(region, sequence(2, 3))

    with pytest.raises(ValueError, match=r"^6 positions are too many$") as raised:
        region(sequence(2, 6).requires_grad_())

    assert raised.traceback[-1].name == "too_long"
    assert raised.value.__context__ is None
    quiet(region, sequence(2, 4))
    assert region.cache_info().misses == 1


@pytest.mark.contract
def test_a_derivative_that_fails_with_symbols_is_traced_for_each() -> None:
    """The variance of one column: its backward divides a size by zero."""
    region = traced(lambda x: x.sin()[..., : x.shape[1] // 2].var(-1))

    args = (sequence(2, 2),)
    with (
        pytest.warns(RematWarning, match="fails: (float )?division by zero"),
        pytest.warns(UserWarning, match="degrees of freedom"),
    ):
        assert_bitwise(run(region, args), run(region.__wrapped__, args))


def test_a_branch_on_a_value_is_refused_as_ever() -> None:
    """The message is that of a trace of one size."""
    region = traced(lambda x: x.sin() if x.sum() > 0 else x)

    with pytest.raises(TraceError, match="value"):
        region(sequence(2, 3).requires_grad_())
