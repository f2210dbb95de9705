"""Iterators that a function captures: nothing puts one back, so that it must not be run again."""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import StaticArgumentError, remat
from tests.support import assert_bitwise, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
]
NUMBERS = (2.0, 3.0, 5.0, 7.0)


def yielding(numbers: Any = NUMBERS) -> Iterator[float]:
    yield from numbers


MAKE: dict[str, Callable[[], Iterator[Any]]] = {
    "list": lambda: iter([*NUMBERS]),
    "dict": lambda: iter(dict.fromkeys(NUMBERS)),
    "deque": lambda: iter(deque(NUMBERS)),
    "zip": lambda: zip(NUMBERS, NUMBERS, strict=True),
    "map": lambda: map(abs, NUMBERS),
    "enumerate": lambda: enumerate(NUMBERS),
    "generator": lambda: (each for each in NUMBERS),
    "yield from": lambda: yielding([*NUMBERS]),
    "one that is under way": lambda: _started(yielding([*NUMBERS])),
}
if sys.version_info < (3, 14):  # from then on these do not tell where they stand
    MAKE |= {
        "chain": lambda: itertools.chain([NUMBERS[0]], NUMBERS[1:]),
        "islice": lambda: itertools.islice(NUMBERS, 4),
        "cycle": lambda: itertools.islice(itertools.cycle(NUMBERS), 4),
        "accumulate": lambda: itertools.accumulate(NUMBERS),
        "permutations": lambda: itertools.permutations(NUMBERS, 2),
    }


def _started(numbers: Iterator[float]) -> Iterator[float]:
    next(numbers)
    return numbers


class Scaled(nn.Module):
    """Takes from an iterator, all of it or one part, and branches on a value, or not."""

    def __init__(self, numbers: Iterator[Any], whole: bool, branches: bool) -> None:
        super().__init__()
        self.numbers, self.whole, self.branches = numbers, whole, branches

    def forward(self, x: Tensor) -> Tensor:
        taken = [*self.numbers] if self.whole else [next(self.numbers)]
        scale = sum(each if isinstance(each, float) else each[0] for each in taken)
        return (x * scale).sin() if self.branches and x.sum() > -100 else x * scale


@pytest.mark.parametrize("engine", ["rerun", "auto"])
@pytest.mark.parametrize("whole", [False, True], ids=["a part", "all"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_one_that_a_run_would_find_elsewhere_is_refused(
    make: Callable[[], Iterator[Any]], whole: bool, engine: Any
) -> None:
    """A run in the backward, or the call itself after a trace that is refused."""
    x = seeded(3).requires_grad_()
    by = "first run" if engine == "rerun" else "trace that is refused"

    for _ in range(2):
        module = Scaled(make(), whole, branches=True)
        with pytest.raises(
            StaticArgumentError, match=rf"self\.numbers \(\w+\).*{by}.*a tuple"
        ):
            remat(module, engine=engine)(x)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_trace_takes_from_it_once(make: Callable[[], Iterator[Any]]) -> None:
    """It is told that this becomes a constant."""
    x = seeded(3).requires_grad_()
    plain, module = (Scaled(make(), False, branches=False) for _ in range(2))

    region: Any = remat(module, engine="auto")
    region.cache_clear()  # another module of the class had a trace for what that took

    found, expected = region(x), plain(x)

    assert_bitwise(found, expected)
    assert_bitwise(
        torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x)
    )


@pytest.mark.parametrize("engine", ["rerun", "auto"])
def test_one_that_it_holds_and_leaves_alone(engine: Any) -> None:
    """As a model that keeps the parameters of another, which it was copied from."""
    module = Scaled(nn.Linear(2, 2).parameters(), False, branches=True)
    module.forward = lambda x: x.sin() if module.numbers and x.sum() > -9 else x  # pyright: ignore[reportAttributeAccessIssue]
    x = seeded(3).requires_grad_()

    for _ in range(2):
        (found,) = torch.autograd.grad(remat(module, engine=engine)(x).sum(), x)
        assert_bitwise(found, x.cos())
