"""Torch-function modes of users' around regions: what they change is changed once, and only there."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from remat import RematWarning, policies, remat
from tests.support import assert_bitwise, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:.*a torch-function mode, Scaling"),
]


@dataclass
class Scaling(TorchFunctionMode):
    """Scales each sine; as a dataclass that compares, it has no hash."""

    scale: float

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.scale if func is torch.sin else result


def fun(x: Tensor) -> Tensor:
    return torch.sin(x) * x


Place = Callable[[], AbstractContextManager[Any]]
#: Where the forward and the backward of each step run.
STEPS: list[tuple[Place, Place]] = [
    (lambda: Scaling(2.0), nullcontext),
    (nullcontext, nullcontext),
    (nullcontext, lambda: Scaling(3.0)),
    (lambda: Scaling(3.0), lambda: Scaling(5.0)),
    (lambda: Scaling(2.0), lambda: Scaling(2.0)),
    (nullcontext, nullcontext),
]


def step(f: Callable[[Tensor], Tensor], places: tuple[Place, Place]) -> list[Tensor]:
    """The value, the gradient and the one of that, each computed where it belongs."""
    x = seeded(4).requires_grad_()
    forward, backward = places
    with forward():
        y = f(x)
    with backward():
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x)
    return [y.detach(), gradient.detach(), second]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {"policy": policies.nothing_saveable},
        {"policy": policies.everything_saveable},
        {"engine": "rerun"},
    ],
    ids=["nothing", "everything", "rerun"],
)
def test_a_mode_changes_the_forward_that_it_is_around(
    options: dict[str, Any], first: int
) -> None:
    """Its recomputation, too, wherever the backward runs, and nothing else."""
    region = remat(fun, **options)

    for places in STEPS[first:]:
        assert_bitwise(step(region, places), step(fun, places))


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_modes_hold_under_transforms(engine: Any) -> None:
    """Around a transform, and around the pullback of another place."""
    region, x = remat(fun, engine=engine), seeded(3, 4)

    def nests(f: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
        def loss(x: Tensor) -> Tensor:
            return f(x).sum()

        with Scaling(2.0):
            per_example = torch.func.vmap(torch.func.grad(loss))(x)
            made: Any = torch.func.vjp(f, x)
        with Scaling(3.0):
            return per_example, *made[1](x), torch.func.jvp(loss, (x,), (x,))[1]

    for _ in range(2):
        assert_bitwise(nests(region), nests(fun))


def test_a_mode_is_told() -> None:
    """What it reads is not compared from call to call."""
    with pytest.warns(RematWarning, match="mode, _Told, hears") as told, _Told(2.0):
        remat(lambda x: x.sin())(seeded(3).requires_grad_())

    assert "Make a new one when its effect is to change" in str(told[0].message)


class _Told(Scaling):
    """Another name: each warning is said once."""
