"""The short way of a call is not taken where state or switches have changed since."""

import functools
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from remat import disabled, first_order, random, remat
from remat._regions import rules
from tests.calls.derivatives import cosine, counts, gradient, leaf, slope
from tests.support import seeded

pytestmark = pytest.mark.contract


def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    """A function of a tensor and a number."""
    return (x * by).sin()


def slopes(fun: Callable[..., Tensor], *args: Any) -> Tensor:
    """The same for each number apart."""
    x, *rest = args
    return vmap(grad(lambda x: fun(x, *rest).sum()))(x.detach())


#: Each has a short way of its own.
by_each = pytest.mark.parametrize("derivative", [gradient, slope, slopes])


ELSEWHERE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "disabled": disabled,
    "checking": random.checking,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("context", ELSEWHERE.values(), ids=ELSEWHERE)
def test_where_regions_are_off_it_is_not_taken(
    context: Callable[[], AbstractContextManager[Any]], looked_up: list[int]
) -> None:
    """After calls that took it, and only there."""
    region = remat(scaled)
    for _ in range(2):
        region(leaf())
    looked_up.clear()

    with context():
        found = region(leaf())
    assert len(looked_up) == 1
    assert "FastPath" not in type(found.grad_fn).__name__

    assert "FastPath" in type(region(leaf()).grad_fn).__name__
    assert len(looked_up) == 1


@pytest.mark.parametrize(
    "context", [context for name, context in ELSEWHERE.items() if name != "inference"]
)
@pytest.mark.parametrize("derivative", [slope, slopes])
def test_under_a_transform_it_is_not_taken_where_regions_are_off(
    derivative: Callable[..., Tensor],
    context: Callable[[], AbstractContextManager[Any]],
    looked_up: list[int],
) -> None:
    """What a block of `no_grad` cuts off is cut off there too."""
    region = remat(scaled)
    for _ in range(2):
        derivative(region, leaf())

    def half_off(fun: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with context():
                off = fun(x)
            return fun(x) * off

        return run

    looked_up.clear()
    found = derivative(half_off(region), leaf())

    assert torch.allclose(found, derivative(half_off(scaled), leaf()))
    assert len(looked_up) == 1


def test_another_threads_blocks_do_not_switch_this_one_off() -> None:
    """They only take the short way from it."""
    region = remat(scaled)
    entered, leave = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with disabled():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=elsewhere)
    region(leaf())
    thread.start()
    entered.wait()
    try:
        found = region(leaf())
    finally:
        leave.set()
        thread.join()

    assert "FastPath" in type(found.grad_fn).__name__


def test_first_order_holds_for_calls_like_those_before() -> None:
    """A second derivative is refused, not forgotten to be refused."""
    region = remat(scaled)
    for _ in range(2):
        region(leaf())
    x = leaf()
    with first_order():
        (slope,) = torch.autograd.grad(region(x).sum(), x, create_graph=True)

    with pytest.raises(RuntimeError, match="first_order"):
        torch.autograd.grad(slope.sum(), x)


@pytest.mark.parametrize("mapped", [lambda f: f, vmap], ids=["as it is", "mapped"])
def test_first_order_holds_for_calls_like_those_before_a_transform(
    mapped: Callable[[Any], Callable[[Tensor], Tensor]],
) -> None:
    """In a call that differs from those before by the block alone."""
    region = remat(scaled)

    def twice() -> Tensor:
        first = mapped(grad(lambda x: region(x).sum()))
        return grad(lambda x: first(x).sum())(seeded(3))

    for _ in range(2):
        twice()

    with first_order(), pytest.raises(RuntimeError, match="first_order"):
        twice()
    assert torch.allclose(twice(), -4 * (2 * seeded(3)).sin())


class Config:
    """What a function may be told by others than its arguments."""

    by = 2.0
    scale: Callable[[Tensor], Tensor]


def changing(told: str) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """A function of a tensor, and what changes what it computes."""
    by, config, steps = 2.0, Config(), [2.0]

    def by_cell(x: Tensor) -> Tensor:
        return scaled(x, by)

    def change_cell() -> None:
        nonlocal by
        by = 3.0

    def by_attribute(x: Tensor) -> Tensor:
        return scaled(x, config.by)

    def by_default(x: Tensor, by: float = 2.0) -> Tensor:
        return scaled(x, by)

    def by_list(x: Tensor) -> Tensor:
        return scaled(x, steps[0])

    def by_method(x: Tensor) -> Tensor:
        return config.scale(x)

    config.scale = scaled
    kinds = {
        "cell": (by_cell, change_cell),
        "attribute": (by_attribute, lambda: setattr(config, "by", 3.0)),
        "default": (by_default, lambda: setattr(by_default, "__defaults__", (3.0,))),
        "list": (by_list, lambda: steps.__setitem__(0, 3.0)),
        "partial": (
            part := functools.partial(scaled, by=2.0),
            lambda: part.keywords.update(by=3.0),
        ),
        "method": (
            by_method,
            lambda: setattr(config, "scale", lambda x: scaled(x, 3.0)),
        ),
    }
    return kinds[told]


@by_each
@pytest.mark.parametrize(
    "told", ["cell", "attribute", "default", "list", "partial", "method"]
)
def test_changed_state_is_another_call(
    told: str, derivative: Callable[..., Tensor], looked_up: list[int]
) -> None:
    """Law 7: it is traced again, once."""
    fun, change = changing(told)
    region = remat(fun)
    region.cache_clear()
    for by in (2.0, 3.0):
        looked_up.clear()
        for _ in range(3):
            assert torch.allclose(derivative(region, leaf()), cosine(by))
        assert len(looked_up) == 1
        change()

    assert region.cache_info().currsize == 2


@by_each
def test_a_call_that_fails_leaves_it_open(
    derivative: Callable[..., Tensor], looked_up: list[int]
) -> None:
    """Law 11: the error is the function's own, and the next call is as those before."""

    def root(x: Tensor) -> Tensor:
        return torch.linalg.cholesky(x.reshape(1, 1)).sin()

    region = remat(root)
    region.cache_clear()
    x = seeded(1).abs().requires_grad_()
    expected = derivative(root, x)
    for _ in range(2):
        derivative(region, x)
    looked_up.clear()

    for _ in range(2):
        with pytest.raises(RuntimeError, match="positive-definite"):
            derivative(region, (-x).detach().requires_grad_())
        assert torch.allclose(derivative(region, x), expected)
    assert not looked_up


def test_another_number_of_threads_is_learned(looked_up: list[int]) -> None:
    """torch's own guard fails for it; the call that is looked up puts another in place."""
    region = remat(scaled)
    region.cache_clear()
    number = torch.get_num_threads()
    for _ in range(2):
        region(leaf())
    looked_up.clear()
    try:
        torch.set_num_threads(number + 1)
        for _ in range(3):
            region(leaf())
        assert len(looked_up) == 1
    finally:
        torch.set_num_threads(number)


def as_deterministic_as_before() -> None:
    """As all tests are: on a device, where it can be had."""
    is_device = torch.get_default_device().type != "cpu"
    torch.use_deterministic_algorithms(is_device, warn_only=is_device)


@pytest.mark.parametrize(
    ("switch", "undo"),
    [
        (
            lambda: torch.set_float32_matmul_precision("high"),
            lambda: torch.set_float32_matmul_precision("highest"),
        ),
        (lambda: torch.use_deterministic_algorithms(True), as_deterministic_as_before),
        (
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
        ),
        (
            lambda: torch.backends.cuda.enable_math_sdp(False),
            lambda: torch.backends.cuda.enable_math_sdp(True),
        ),
    ],
    ids=["matmul precision", "determinism", "default dtype", "attention kernels"],
)
@by_each
def test_other_switches_are_another_signature(
    switch: Callable[[], None],
    undo: Callable[[], None],
    derivative: Callable[..., Tensor],
) -> None:
    """Law 12: each has its own trace, and back again the first one serves."""
    region, x = remat(scaled), leaf()
    region.cache_clear()
    for _ in range(2):
        derivative(region, x)
    switch()
    try:
        for _ in range(2):
            derivative(region, x)
    finally:
        undo()
    derivative(region, x)

    assert counts(region) == (3, 2, 2)


@pytest.fixture
def precise() -> Generator[None]:
    """Puts the precision of float32 products back."""
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("precise")
@by_each
def test_a_switch_that_the_function_sets_is_another_signature(
    derivative: Callable[..., Tensor],
) -> None:
    """A call under what the trace has left is not one like the call that was traced."""

    def sets(x: Tensor) -> Tensor:
        torch.set_float32_matmul_precision("high")
        return x.sin()

    region = remat(sets)
    region.cache_clear()
    for expected in ((0, 1, 1), (0, 2, 2), (1, 2, 2)):
        derivative(region, leaf())
        assert counts(region) == expected


@pytest.mark.usefixtures("precise")
def test_a_switch_that_a_backwards_trace_sets_is_another_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is looked up for the switches that are in force when it runs."""
    asked: list[str] = []
    pulled_back = rules.pulled_back

    def leaves_high(ctx: Any, cotangents: Any) -> Any:
        asked.append(torch.get_float32_matmul_precision())
        found = pulled_back(ctx, cotangents)
        torch.set_float32_matmul_precision("high")
        return found

    monkeypatch.setattr(rules, "pulled_back", leaves_high)
    region, x = remat(lambda x: x.sin().sin()), leaf()
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision("highest")
        out = region(x).sum()
        torch.set_float32_matmul_precision(precision)
        torch.autograd.grad(out, x)

    assert asked == ["highest", "high"]


@by_each
def test_medium_precision_is_not_high(derivative: Callable[..., Tensor]) -> None:
    """Torch's guard sees that they are not the highest, but not which of them it is."""
    region = remat(scaled)
    region.cache_clear()
    try:
        for precision in ("high", "high", "medium", "medium", "high"):
            torch.set_float32_matmul_precision(precision)
            derivative(region, leaf())
    finally:
        torch.set_float32_matmul_precision("highest")

    assert counts(region) == (3, 2, 2)


def test_the_cache_may_be_cleared_while_a_call_runs() -> None:
    """The call goes on, and the next one traces."""
    region: Any = remat(scaled)
    region.cache_clear()
    for x in (seeded(2).requires_grad_(), leaf()):
        region(x)

    def pack(tensor: Tensor) -> Tensor:
        region.cache_clear()
        return tensor

    x = leaf()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        out = region(x)
    (found,) = torch.autograd.grad(out.sum(), x)

    assert torch.allclose(found, cosine(2.0))
    assert region.cache_info().currsize == 0
    region(leaf())
    assert region.cache_info().currsize == 1
