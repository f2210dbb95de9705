"""Programs that follow each other in one run of autograd compute a value once."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from remat import policies, remat
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph, Ref, Value
from remat._programs import lending
from remat._programs.program import Program
from remat._torch import autograd
from tests.support import LiveBytes, count_operators, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:.*saves no memory:remat.RematWarning"),
]

WEIGHT = seeded(4, 4)
X = seeded(3, 4, seed=1)


def layer(w: Tensor, x: Tensor) -> Tensor:
    """One product and one hyperbolic tangent."""
    return torch.tanh(x @ w)


def stack(region: Callable[[Tensor, Tensor], Tensor], count: int) -> Any:
    """A second derivative by the weight of as many regions."""

    def loss(w: Tensor) -> Tensor:
        x = X
        for _ in range(count):
            x = region(w, x)
        return x.square().sum()

    return lambda: grad(lambda w: grad(loss)(w).square().sum())(WEIGHT)


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No program takes anything from another one."""
    with monkeypatch.context() as patched:
        patched.setattr(autograd, "graph_task", lambda: -1)
        yield


def tanhs(run: Callable[[], Any]) -> int:
    """How many one run computes, once everything is traced."""
    run()
    return count_operators(run)["aten.tanh"]


def test_the_derivatives_of_one_region_recompute_it_once() -> None:
    """In the forward, in the backward, and in the backward of these."""
    assert tanhs(stack(remat(layer), 1)) == 3


@pytest.mark.usefixtures("_alone")
def test_alone_each_of_them_recomputes_it() -> None:
    """The derivative of the backward, and that of the forward."""
    assert tanhs(stack(remat(layer), 1)) == 4


@pytest.mark.parametrize("count", [2, 3, 6])
def test_of_several_regions_each_is_recomputed_once_while_values_are_few(
    count: int,
) -> None:
    """Although their forwards are differentiated in the opposite order."""
    assert tanhs(stack(remat(layer), count)) == 3 * count


def test_of_several_large_regions_the_last_one_is_recomputed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the others recompute is gone before their forwards are differentiated."""
    monkeypatch.setattr(lending, "_FEW_BYTES", 2 * X.nbytes - 1)
    monkeypatch.setattr(lending, "_MOST_PART", 0)

    assert tanhs(stack(remat(layer), 3)) == 3 * 4 - 1


def test_what_is_lent_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are those of programs that run alone."""
    run = stack(remat(layer), 2)
    first, second, third = run(), run(), run()
    with monkeypatch.context() as patched:
        patched.setattr(autograd, "graph_task", lambda: -1)
        alone = run()

    assert all(torch.equal(each, alone) for each in (first, second, third))


def test_nothing_is_held_after_the_backward() -> None:
    """The last program's values go with the run of autograd that computed them."""
    run = stack(remat(layer), 2)
    run()
    with LiveBytes() as memory:
        found = run()

    assert memory.live == found.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("few_bytes", "most_loans"),
    [(8 * X.nbytes, 16), (2**13, 4)],
    ids=["bytes", "loans"],
)
def test_no_more_than_few_values_are_held(few_bytes: int, most_loans: int) -> None:
    """Of any number of regions: the peak grows as it does without lending."""
    region = remat(layer)

    def peak(count: int) -> int:
        run = stack(region, count)
        run()
        with LiveBytes() as memory:
            run()
        return memory.peak

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lending, "_FEW_BYTES", few_bytes)
        patched.setattr(lending, "_MOST_LOANS", most_loans)
        peaks = [peak(count) for count in (6, 12, 24)]
        patched.setattr(autograd, "graph_task", lambda: -1)
        alone = [peak(count) for count in (6, 12, 24)]

    for each, without in zip(peaks, alone, strict=True):
        assert each <= without + 8 * X.nbytes


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_order_lends_nothing(count: int) -> None:
    """Nobody differentiates its forwards again, so no program of it takes part."""
    region = remat(layer)

    def loss(w: Tensor) -> Tensor:
        return functools.reduce(lambda x, _: region(w, x), range(count), X).sum()

    lending._thread.loans = None
    for _ in range(2):
        grad(loss)(WEIGHT)

    assert not lending._thread.loans


def test_plain_autograd_outside_takes_values_too() -> None:
    """The level below may be a backward without a transform."""
    region = remat(layer)

    def run() -> Tensor:
        w = WEIGHT.clone().requires_grad_()
        grad(lambda w: region(w, X).square().sum())(w).square().sum().backward()
        assert w.grad is not None
        return w.grad

    torch.testing.assert_close(run(), stack(layer, 1)())
    assert tanhs(run) == 3


def test_a_product_of_a_stack_is_one_value_in_whatever_shape() -> None:
    """It waits as a matrix, and reaches the backward of each example as a stack."""
    region, x = remat(layer, policy=policies.save_matmul_outputs), seeded(2, 3, 4)

    def run() -> Tensor:
        def size(w: Tensor) -> Tensor:
            each = grad(lambda w, x: region(w, x[None]).square().sum())
            return vmap(lambda x: each(w, x))(x).square().sum()

        return grad(size)(WEIGHT)

    assert tanhs(run) == 3


def test_a_view_of_its_own_shape_is_what_it_views() -> None:
    """Of dense elements alone: a transpose has others in its places."""
    x = seeded(2, 6)

    assert lending._identity(x) == lending._identity(x.view(3, 4))
    assert lending._identity(x) != lending._identity(x.t())
    assert lending._identity(x[:, :3]) != lending._identity(
        x[:, :3].unflatten(1, (1, 3))
    )


def test_a_tensor_that_was_written_to_is_another_one() -> None:
    """Although its memory and its layout are the same."""
    x = X.clone()
    before = lending._identity(x)
    same = lending._identity(x.detach())
    x.add_(1)

    assert before == same
    assert before != lending._identity(x)


@pytest.mark.parametrize("communicates", [True, False])
def test_what_communicates_lends_nothing(communicates: bool) -> None:
    """Ranks of unlike sizes would lend unlike values, and not all run the same collectives."""
    functional: Any = torch.ops._c10d_functional
    op = functional.wait_tensor.default if communicates else torch.ops.aten.sin.default
    meta = TensorMeta.of(X)
    steps = (Value(None, meta=meta), Value(op, (Ref(0),), meta=meta))
    program = Program(Graph(steps, 1, (Ref(1),)), "backward", is_borrowing=True)

    assert (program._lender is None) == communicates
