"""Law 6, where a function writes to an argument without a gradient what has one.

After the write the argument is an output like any other: it is returned or not, the caller
reads it, and gradients flow back through it.
"""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp

from remat import MutationError, layers, policies, remat, schedules
from tests.support import assert_bitwise, assert_close, seeded, tensors_in

# Small functions save no memory under some of the policies, and law 5 tests that warning.
pytestmark = [
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

WAYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "matmuls": {"policy": policies.save_matmul_outputs},
    "everything": {"policy": policies.everything_saveable},
    "rerun": {"engine": "rerun"},
}
ENGINES = ["trace", "rerun"]


def filled(out: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return out.copy_(torch.tanh(x @ w))


def added_to(out: Tensor, x: Tensor, w: Tensor) -> Tensor:
    out += x @ w
    return out


def partly(out: Tensor, x: Tensor, w: Tensor) -> Tensor:
    out[0] = (x @ w).sin()[0]
    return out


def read_after(out: Tensor, x: Tensor, w: Tensor) -> Tensor:
    out.add_(x @ w)
    return (out * w).sum()


def not_returned(out: Tensor, x: Tensor, w: Tensor) -> None:
    out.add_(x @ w).sin_()


def in_views(out: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tail = out[1:].mul_((x @ w)[1:]).sin_()
    return tail, out.T, out.exp()


def detached(out: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    out.add_(x @ w)
    return out.detach(), out


FUNCTIONS: list[Callable[[Tensor, Tensor, Tensor], Any]] = [
    *(filled, added_to, partly, read_after, not_returned, in_views, detached)
]


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    """What is written to, data, and a weight."""
    return seeded(3, 3), seeded(3, 3, seed=1), seeded(3, 3, seed=2)


def trained(f: Callable[..., Any]) -> tuple[list[Tensor], list[tuple[bool, ...]]]:
    """Numbers and gradients of a call whose argument is read afterwards, and what is it."""
    out, x, w = arguments()
    w.requires_grad_()
    found = tensors_in(f(out, x, w))
    read = [each for each in (*found, out) if each.requires_grad]
    torch.stack([(each.sin() * 0.3).sum() for each in read]).sum().backward()
    assert w.grad is not None
    own = [(each is out, each.requires_grad) for each in found]
    return [each.detach() for each in (*found, out, w.grad)], own


@pytest.mark.contract
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fun", FUNCTIONS)
def test_what_is_written_has_its_gradient(fun: Any, way: str) -> None:
    """To the bit; the argument itself comes back where it does without a region."""
    numbers, own = trained(remat(fun, **WAYS[way]))
    expected, alike = trained(fun)
    # The cotangents of several views of it are summed before the call gets them (law 1).
    same = assert_close if fun is in_views else assert_bitwise

    assert_bitwise(numbers[:-1], expected[:-1])
    same(numbers[-1:], expected[-1:])
    assert own == alike


def test_what_is_returned_of_it_is_its_view() -> None:
    """The caller may write to it once more, and sees that in both."""
    out, x, w = arguments()

    tail, turned, _ = remat(in_views)(out, x, w.requires_grad_())
    out[1:] = 0

    assert tail._base is turned._base is out
    assert not tail.any()
    assert not turned[:, 1:].any()


def loss(f: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """A number of a weight, by way of what a function writes."""

    def of(w: Tensor) -> Tensor:
        out = torch.zeros_like(w)
        f(out, seeded(3, 3, seed=1), w)
        return out.sin().sum()

    return of


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], Tensor], Any]] = {
    "grad": lambda f, w: grad(f)(w),
    "grad(grad)": lambda f, w: grad(lambda w: grad(f)(w).sin().sum())(w),
    "jvp": lambda f, w: jvp(f, (w,), (w.cos(),)),
    "jvp(grad)": lambda f, w: jvp(grad(f), (w,), (w.cos(),)),
}


@pytest.mark.parametrize(
    ("transform", "engine"),
    [*((each, "trace") for each in TRANSFORMS), ("grad", "rerun"), ("jvp", "rerun")],
)
@pytest.mark.parametrize("fun", [filled, added_to, not_returned])
def test_under_transforms(fun: Any, transform: str, engine: Any) -> None:
    """Of what the transformed function makes and hands over to be written to."""
    w = seeded(3, 3, seed=2)

    found = TRANSFORMS[transform](loss(remat(fun, engine=engine)), w)

    assert_close(found, TRANSFORMS[transform](loss(fun), w))


class Embedding(nn.Module):
    """A first layer, which adds positions to its data in place."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(seeded(3, 3))
        self.out = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x += self.positions
        return self.out(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_that_is_added_in_place_gets_its_gradient(engine: Any) -> None:
    """In two calls, each with data of its own."""
    model = Embedding()
    found: list[list[Tensor | None]] = []

    for run in (model, remat(model, engine=engine)):
        model.zero_grad()
        for seed in range(2):
            run(seeded(3, 3, seed=seed)).sin().sum().backward()
        found.append([each.grad for each in model.parameters()])

    assert_bitwise(*found)


class Accumulates(nn.Module):
    """Adds what has a gradient to a buffer."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x
        return x * 2


CAPTURED = seeded(3, 3)


def writes_to_a_global(x: Tensor) -> Tensor:
    CAPTURED.mul_(x)
    return x * 2


@pytest.mark.parametrize(
    ("fun", "name"),
    [(Accumulates, "self.total"), (lambda: writes_to_a_global, "global `CAPTURED`")],
    ids=["a buffer", "a global"],
)
def test_a_captured_tensor_that_would_get_a_gradient_is_refused(
    fun: Any, name: str
) -> None:
    """Whoever reads it afterwards would get none; it keeps its numbers."""
    before, region = CAPTURED.clone(), cast(Any, remat(fun()))

    with pytest.raises(MutationError) as caught:
        region(seeded(3, 3).requires_grad_())

    text = str(caught.value)
    assert text.startswith(f"{name} (float64[3, 3]): ")
    assert "gets a gradient by what the function writes to it." in text
    assert "or pass the tensor as an argument." in text
    assert torch.equal(CAPTURED, before)


def test_a_buffer_is_refused_where_a_function_runs_again() -> None:
    """It has no gradient afterwards, and the numbers that it had."""
    model = Accumulates()

    with pytest.raises(MutationError, match=r"a captured tensor .* gets a gradient by"):
        remat(model, engine="rerun")(seeded(3, 3).requires_grad_())

    assert not model.total.requires_grad
    assert not model.total.any()


def test_a_stage_of_a_schedule_that_writes_so_is_refused() -> None:
    """It would run several times, from the same input."""
    last = nn.Linear(3, 3, dtype=torch.float64)
    chain = layers.chain([Embedding(), last], schedule=schedules.Every(1))

    with pytest.raises(MutationError, match="changes its argument in place"):
        chain(seeded(3, 3))
