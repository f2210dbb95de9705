"""Arguments that are no tensors: static values, numpy arrays.

"Tensors are dynamic, numpy arrays are an error that says how; every other leaf is static,
compared by type and value." "`static_argnums`, `static_argnames` (by position or
keyword): the whole argument is compared by `==` and hash, not walked. A tenth retrace
because of one static value warns, and says: pass a 0-d tensor."
"""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remat import StaticArgumentError, remat
from tests.support import assert_bitwise, grads, seeded


def double_sine(x: Tensor, factor: float = 1.0) -> Tensor:
    """Two sines."""
    return torch.sin(torch.sin(x) * factor)


def powered(x: Tensor, how: Any, *, times: Any = 1) -> Tensor:
    """Uses two objects that are not walked."""
    return (
        torch.sin(torch.sin(x) ** how["n"] if isinstance(how, dict) else x**how) * times
    )


class Config(dict):  # a dict that compares and hashes as a whole
    """A hashable mapping."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


@pytest.mark.contract
@pytest.mark.parametrize(
    "options",
    [{"static_argnums": 1}, {"static_argnums": (1,)}, {"static_argnames": "how"}, {"static_argnames": ("how", "times")}],
    ids=["num", "nums", "name", "names"],
)  # fmt: skip
@pytest.mark.parametrize("by_keyword", [False, True], ids=["positional", "keyword"])
def test_static_arguments(options: Any, by_keyword: bool) -> None:
    """Equal values share a trace, unequal ones do not, by position and by keyword."""
    region: Any = remat(powered, **options)
    region.cache_clear()  # traces belong to the code, which other tests share

    def call(n: int) -> None:
        how = Config(n=n)
        args, kwargs = ((), {"how": how}) if by_keyword else ((how,), {})
        found = grads(lambda x: region(x, *args, **kwargs), [seeded(3)])
        expected = grads(lambda x: powered(x, *args, **kwargs), [seeded(3)])
        assert_bitwise(found, expected)

    for n in (2, 2, 3, 2, 3):
        call(n)

    assert region.cache_info().misses == 2


def test_an_unhashable_static_argument_is_an_error() -> None:
    """The message names the argument, its type, and says what to do."""
    region = remat(powered, static_argnames="how")

    with pytest.raises(StaticArgumentError, match=r"(?s)how.*hash"):
        region(seeded(3).requires_grad_(), {"n": 2})


@pytest.mark.contract
@pytest.mark.parametrize("static", [(), ("factor",)], ids=["leaf", "static"])
def test_the_tenth_value_warns(static: Any) -> None:
    """Ten traces that differ in one Python number: pass a 0-d tensor, says the warning."""
    region = remat(lambda x, factor: double_sine(x, factor), static_argnames=static)
    texts = []
    for i in range(13):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            region(seeded(3).requires_grad_(), float(i))
        texts += [(i, str(warning.message)) for warning in caught]

    ((when, text),) = texts
    assert when in (9, 10)  # the tenth value, or the tenth trace that is a retrace
    assert "factor" in text
    assert "0-d tensor" in text


@pytest.mark.contract
@pytest.mark.parametrize(
    "nest", [lambda a: a, lambda a: {"k": [a]}], ids=["bare", "nested"]
)
def test_a_numpy_array_is_an_error(nest: Any) -> None:
    """It says which argument, and how to convert it."""
    region = remat(lambda x, array: torch.sin(x))

    with pytest.raises((TypeError, StaticArgumentError), match="array") as error:
        region(seeded(3).requires_grad_(), nest(np.ones(3)))
    assert "torch.from_numpy" in str(error.value) or "torch.as_tensor" in str(
        error.value
    )
