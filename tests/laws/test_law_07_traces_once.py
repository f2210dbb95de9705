"""Law 7: what has not changed is not traced again.

"A change retraces. Python side effects run once, at trace time, as under jit." And
from the engine notes: equal blocks (32 layers of one class; their `layer_idx` differ)
must share one trace.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import remat
from tests.support import assert_bitwise, seeded


def value_and_gradient(fun: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """The output at a fixed input, and the gradient there."""
    x = seeded(2, 3, seed=3).requires_grad_()
    y = fun(x, *args)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return y.detach(), grad


def scaled(x: Tensor, factor: float) -> Tensor:
    """Depends on a number."""
    return torch.sin(torch.sin(x) * factor)


def loud(x: Tensor, factor: Any) -> Tensor:
    """Prints when it runs in Python."""
    print("runs")  # noqa: T201
    return scaled(x, factor)


@pytest.mark.contract
def test_python_runs_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A print runs at trace time only, whatever the number of calls and backwards."""
    region = remat(loud)
    for _ in range(3):
        value_and_gradient(region, 2.0)

    assert capsys.readouterr().out.count("runs") == 1


@pytest.mark.contract
def test_a_backward_does_not_run_python(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does a backward whose cotangent is one number everywhere, as after `.sum()`."""
    x = seeded(2, 3).requires_grad_()
    y = remat(loud)(x, 2.0)
    capsys.readouterr()
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones_like(y))

    assert "runs" not in capsys.readouterr().out


@pytest.mark.filterwarnings(r"ignore:.*\(count\) is read:remat.RematWarning")
def test_the_backward_belongs_to_its_forward() -> None:
    """A counter that no check covers gives one value to a forward and its backward."""
    counter = itertools.count(1)

    def fun(x: Tensor) -> Tensor:
        return scaled(x, float(next(counter)))

    x = seeded(3).requires_grad_()
    found = torch.autograd.grad(remat(fun)(x).sum(), x)

    assert_bitwise(found, torch.autograd.grad(scaled(x, 1.0).sum(), x))


@pytest.mark.contract
@pytest.mark.parametrize("order", [1, 2])
def test_a_change_between_forward_and_backward_does_not_matter(order: int) -> None:
    """The derivatives, also those traced late, are those of the forward's state."""
    held = SimpleNamespace(factor=2.0)

    def gradient(fun: Any, later: float) -> list[Tensor]:
        held.factor = 2.0
        x = seeded(3).requires_grad_()
        y = fun(x).sum()
        held.factor = later
        found = []
        for _ in range(order):
            (y,) = torch.autograd.grad(y, x, create_graph=True)
            found.append(y.detach())
            y = y.sum()
        assert held.factor == later
        return found

    def fun(x: Tensor) -> Tensor:
        return scaled(x, held.factor)

    torch.testing.assert_close(gradient(remat(fun), 3.0), gradient(fun, 3.0))


def test_an_unchanged_nan_does_not_retrace(capsys: pytest.CaptureFixture[str]) -> None:
    """A static value that is not equal to itself is still the same value."""
    region = remat(loud)
    for _ in range(3):
        value_and_gradient(region, float("nan"))

    assert capsys.readouterr().out.count("runs") == 1


def test_a_lambda_made_again_is_not_traced_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One code object with equal cells is one function, and a new cell is another."""

    def call(factor: float) -> None:
        region = remat(lambda x: loud(x, factor))
        plain = value_and_gradient(lambda x: scaled(x, factor))
        assert_bitwise(value_and_gradient(region), plain)

    for factor in (2.0, 2.0, 3.0, 3.0, 2.0):
        call(factor)

    assert capsys.readouterr().out.count("runs") == 2


class Block(nn.Module):
    """A block that knows its index, and may read it."""

    def __init__(self, layer_idx: int, *, reads: bool = False) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.reads = reads
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return loud(self.linear(x), float(self.layer_idx) if self.reads else 1.0)


class Decorated(Block):
    """The same with a decorated method."""

    @remat
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


@pytest.mark.contract
@pytest.mark.parametrize("way", ["wrapped", "decorated", "lambda"])
def test_equal_blocks_share_one_trace(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """32 blocks of one class are traced once, and each uses its own weights."""
    torch.manual_seed(0)
    blocks = [Block(i) for i in range(32)]
    regions: list[Any] = [remat(block) for block in blocks]
    if way == "decorated":
        regions = [Decorated(i) for i in range(32)]
        for region, block in zip(regions, blocks, strict=True):
            region.load_state_dict(block.state_dict())
    if way == "lambda":
        regions = [remat(lambda x, block=block: block(x)) for block in blocks]
    plain = [value_and_gradient(block) for block in blocks]
    capsys.readouterr()

    assert_bitwise([value_and_gradient(region) for region in regions], plain)
    assert capsys.readouterr().out.count("runs") == 1


def test_blocks_that_read_their_index_differ() -> None:
    """An index that the function reads is part of what is traced."""
    blocks = [Block(i, reads=True) for i in range(4)]

    for block in blocks:
        assert_bitwise(value_and_gradient(remat(block)), value_and_gradient(block))
