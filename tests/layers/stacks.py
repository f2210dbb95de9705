"""Loops that `scan` and `chain` must equal, and functions to run them on."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from remat import scan
from remat.schedules import AbstractSchedule, Every, Revolve, Sqrt
from tests.support import seeded

Step = Callable[[Any, Any], tuple[Any, Any]]
WIDTH, LENGTH = 3, 5
SCHEDULES: list[AbstractSchedule | None] = [
    None, Every(1), Every(3), Sqrt(), Revolve(1), Revolve(3),
]  # fmt: skip


def loop(f: Step, init: Any, xs: Any, *, reverse: bool = False) -> tuple[Any, Any]:
    """`scan` in plain Python."""
    carry, rows = init, []
    count = len(tree_leaves(xs)[0])
    for index in reversed(range(count)) if reverse else range(count):
        carry, y = f(carry, tree_map(lambda x, k=index: x[k], xs))
        rows.append(y)
    rows = rows[::-1] if reverse else rows
    return carry, tree_map(lambda *each: torch.stack(each), *rows)


def tanh_cell(w: Tensor) -> Step:
    """Hands out what it carries."""

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, h

    return step


def swap(w: Tensor) -> Step:
    """Carries a dict, hands back operands and views, counts in integers."""

    def step(c: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Any]:
        new = torch.sin(c["a"] @ w) * c["b"]
        carry = {"b": c["a"], "a": new, "n": c["n"] + 1}
        return carry, (x, new.flip(0), new[:1])

    return step


def ignoring(w: Tensor) -> Step:
    """Carries a slice on, and drops what was carried."""
    return lambda c, x: (x, (c * x @ w).cos())


def scanned(make: Callable[[Tensor], Step], run: Callable[..., Any]) -> Any:
    """A real function of a weight, a first carry, and what is scanned over."""

    def loss(w: Tensor, c: Tensor, xs: Tensor) -> Tensor:
        init: Any = c
        if make is swap:
            init = {"a": c, "b": c.sin(), "n": torch.tensor(0)}
        carry, ys = run(make(w), init, xs)
        # The loop's dict has its keys in another order.
        carry = sorted(carry.items()) if isinstance(carry, dict) else carry
        leaves = [leaf for leaf in tree_leaves((carry, ys)) if isinstance(leaf, Tensor)]
        return torch.stack(
            [(leaf.double() * (k + 1)).square().sum() for k, leaf in enumerate(leaves)]
        ).sum()

    return loss


def by(schedule: AbstractSchedule | None, **options: Any) -> Callable[..., Any]:
    """`scan` with a schedule."""
    return functools.partial(scan, schedule=schedule, **options)


def weight(seed: int = 0) -> Tensor:
    """A weight that neither explodes nor vanishes."""
    return seeded(WIDTH, WIDTH, seed=seed) / 2


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    """A weight, a first carry, and what is scanned over."""
    return weight(), seeded(WIDTH, seed=1), seeded(LENGTH, WIDTH, seed=2)
