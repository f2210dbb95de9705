"""Law 7: a function that changes a container among its arguments is refused.

A region calls its function with containers of its own, so that the caller's would silently
stay as they were: a list of skip connections that a block pops, a dict into which it puts a loss.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass, register_pytree_node, tree_flatten

from remat import SideEffectError, disabled, modules, remat
from remat.interop.torch import checkpoint
from tests.support import assert_bitwise, grads, seeded

pytestmark = pytest.mark.contract

W = seeded(4, 4, seed=1).requires_grad_()
Function = Callable[[Tensor, Any], Tensor]


@dataclasses.dataclass
class Skips:
    """Tensors in a class that pytree knows."""

    left: list[Tensor]


register_dataclass(Skips)


class Noted:
    """A tensor with notes, which pytree is told beside it."""

    def __init__(self, x: Tensor, notes: Any) -> None:
        self.x = x
        self.notes = notes

    def __repr__(self) -> str:
        return f"Noted({self.x}, {self.notes})"


register_pytree_node(
    Noted,
    lambda each: ([each.x], each.notes),
    lambda x, notes: Noted(next(iter(x)), notes),
)


def pops(x: Tensor, held: list[Tensor]) -> Tensor:
    return x @ W + held.pop()


def appends(x: Tensor, held: list[Tensor]) -> Tensor:
    held.append(x @ W)
    return held[-1]


def exchanges(x: Tensor, held: list[Tensor]) -> Tensor:
    held[0] = held[0] * 2
    return x @ W + held[0]


def adds_up(x: Tensor, held: dict[str, Tensor]) -> Tensor:
    held["aux"] = held.get("aux", 0) + (x @ W).square().mean()
    return x @ W


def counts(x: Tensor, held: dict[str, Any]) -> Tensor:
    held["calls"] = held.get("calls", 0) + 1
    return x @ W


def pops_inside(x: Tensor, held: dict[str, list[Tensor]]) -> Tensor:
    return x @ W + held["skips"].pop()


def pops_of_an_object(x: Tensor, held: Skips) -> Tensor:
    return x @ W + held.left.pop()


def joins(x: Tensor, held: set[int]) -> Tensor:
    held.add(3)
    return x @ W


def notes(x: Tensor, held: Noted) -> Tensor:
    held.notes.append("seen")
    return x @ W + held.x


CHANGES: list[tuple[Function, Callable[[], Any]]] = [
    (pops, lambda: [seeded(3, 4)]),
    (appends, list),
    (exchanges, lambda: [seeded(3, 4)]),
    (adds_up, dict),
    (counts, dict),
    (pops_inside, lambda: {"skips": [seeded(3, 4)]}),
    (pops_of_an_object, lambda: Skips([seeded(3, 4)])),
    (joins, lambda: {1, 2}),
    (notes, lambda: Noted(seeded(3, 4), [])),
]
each_change = pytest.mark.parametrize(
    ("fun", "make"), CHANGES, ids=[fun.__name__ for fun, _ in CHANGES]
)


@each_change
@pytest.mark.parametrize("engine", ["trace", "rerun", "auto"])
def test_is_refused_by_name_and_line(fun: Any, make: Any, engine: Any) -> None:
    """The caller's container is as it was."""
    held = make()
    region: Any = remat(fun, engine=engine)
    for _ in range(2):
        with pytest.raises(
            SideEffectError,
            match=r"argument `held` of the call at test_law_07_containers.py:\d+: is a "
            r"\w+, and the function changes .* Return what is new",
        ):
            region(seeded(3, 4), held)
    assert str(held) == str(make())


#: What may stand beside the parts of a class, and another of the same class.
NOTES: list[tuple[Any, Any]] = [
    (torch.float32, torch.float64),
    (1.0, -1.0),
    (SimpleNamespace(size=1), SimpleNamespace(size=2)),
    (torch.zeros(3), torch.ones(3)),
]


@pytest.mark.parametrize(
    ("before", "after"), NOTES, ids=[type(each).__name__ for each, _ in NOTES]
)
@pytest.mark.parametrize("engine", ["trace", "rerun", "auto"])
def test_a_note_that_is_exchanged_is_refused(
    before: Any, after: Any, engine: Any
) -> None:
    """Of whatever class it is."""

    def fun(x: Tensor, held: Noted) -> Tensor:
        held.notes = after
        return x @ W

    region: Any = remat(fun, engine=engine)
    with pytest.raises(
        SideEffectError, match=r"`held` .* is a Noted, and the function"
    ):
        region(seeded(3, 4), Noted(seeded(3, 4), before))


@each_change
def test_is_refused_by_keyword_and_by_the_drop_in(fun: Any, make: Any) -> None:
    x = seeded(3, 4)

    region: Any = remat(fun)
    with pytest.raises(SideEffectError, match="`held`"):
        region(x, held=make())
    dropped_in: Any = checkpoint
    with pytest.raises(SideEffectError, match="`held`"):
        dropped_in(fun, x, make(), use_reentrant=False)


@each_change
def test_happens_where_the_function_runs_as_it_is(fun: Any, make: Any) -> None:
    """Without a gradient, and where regions are turned off."""
    plain, without, off = make(), make(), make()
    fun(seeded(3, 4), plain)
    region: Any = remat(fun)
    with torch.no_grad():
        region(seeded(3, 4), without)
    with disabled():
        region(seeded(3, 4), off)

    for held in (without, off):
        (found, spec), (expected, structure) = tree_flatten(held), tree_flatten(plain)
        assert spec == structure
        assert all(map(_are_equal, found, expected))


def _are_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def test_is_refused_in_a_block_of_a_model() -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor, *, skips: list[Tensor]) -> Tensor:
            return self.linear(x) + skips.pop()

    model = modules.apply(nn.Sequential(Up()), "0")

    with pytest.raises(SideEffectError, match="`skips`"):
        model[0](seeded(3, 4), skips=[seeded(3, 4)])


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_copy_may_change_and_what_is_put_back_is_no_change(engine: Any) -> None:
    def fun(x: Tensor, held: dict[str, Any]) -> Tensor:
        held["scale"] = held["scale"] * 1.0
        last = held["skips"].pop()
        held["skips"].append(last)
        held = {**held, "more": [*held["skips"]]}
        held["more"].append(x)
        return (x @ W + last) * held["scale"]

    held = {"scale": 2.0, "skips": [seeded(3, 4, seed=2)]}

    assert_bitwise(
        grads(lambda x: remat(fun, engine=engine)(x, held), [seeded(3, 4)]),
        grads(lambda x: fun(x, held), [seeded(3, 4)]),
    )
