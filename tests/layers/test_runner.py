"""The short way of a stage: taken where a program is all that it comes to."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import chain, remat, scan
from remat._regions.traced import TracedRegion
from remat.layers import _chain, _executor
from remat.schedules import AbstractSchedule, Every, Revolve, Sqrt
from tests.support import deterministic, seeded

pytestmark = pytest.mark.contract

LENGTH = 12


def step(w: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(h @ w) + h


def integrate(w: Tensor, h: Tensor, schedule: AbstractSchedule | None) -> Tensor:
    return scan(lambda h, _: (step(w, h), None), h, length=LENGTH, schedule=schedule)[0]


def loop(w: Tensor, h: Tensor) -> Tensor:
    for _ in range(LENGTH):
        h = step(w, h)
    return h


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of regions that have a backward."""
    found: list[Any] = []
    vjp = TracedRegion.vjp

    def noting(self: TracedRegion, roots: Any, asked: Any) -> TracedRegion:
        found.append(asked)
        return vjp(self, roots, asked)

    monkeypatch.setattr(TracedRegion, "vjp", noting)
    return found


def leaves() -> tuple[Tensor, Tensor]:
    return seeded(4, 4).requires_grad_(), seeded(3, 4, seed=1).requires_grad_()


@pytest.mark.parametrize("schedule", [Every(3), Sqrt(), Revolve(2)], ids=repr)
def test_a_stage_asks_for_its_backward_once(
    asked: list[Any], schedule: AbstractSchedule
) -> None:
    """The stages differ in their cotangents' layouts alone; the next step asks no more."""
    (w, h), (w2, h2) = leaves(), leaves()
    for at_most in (2 * 3, 0):  # to learn it, and to run it
        asked.clear()
        grads = torch.autograd.grad(integrate(w, h, schedule).sum(), (w, h))
        assert len(asked) <= at_most
        expected = torch.autograd.grad(loop(w2, h2).sum(), (w2, h2))
        assert all(map(torch.equal, grads, expected))


def test_a_backward_under_other_switches_asks_anew(asked: list[Any]) -> None:
    """Their program may be another, whatever the forward ran under."""
    w, h = leaves()

    def own(h: Tensor, _: None) -> tuple[Tensor, None]:
        return torch.sin(h @ w), None

    for is_deterministic in (False, True):
        total = scan(own, h, length=LENGTH, schedule=Sqrt())[0].sum()
        with deterministic(is_deterministic):
            torch.autograd.grad(total, w)

    assert len({each.numerics for each in asked}) == 2


def transposed(h: Tensor) -> Tensor:
    return h.t().contiguous().t()


@pytest.mark.parametrize(
    "cotangent",
    [
        pytest.param(torch.ones_like, id="dense"),
        pytest.param(lambda h: h.new_ones(()).expand_as(h), id="expanded"),
        pytest.param(lambda h: transposed(torch.ones_like(h)), id="transposed"),
        pytest.param(lambda h: torch.ones_like(h).mul(2)[:], id="view"),
    ],
)
def test_each_layout_of_a_cotangent_has_its_backward(
    cotangent: Callable[[Tensor], Tensor],
) -> None:
    """One after the other, through stages that have learned from the layouts before."""
    for place in (torch.ones_like, cotangent, torch.ones_like):
        (w, h), (w2, h2) = leaves(), leaves()
        out, expected = integrate(w, h, Sqrt()), loop(w2, h2)
        torch.autograd.backward(out, place(out.detach()))
        torch.autograd.backward(expected, place(expected.detach()))
        assert w.grad is not None
        assert w2.grad is not None
        assert torch.equal(w.grad, w2.grad)
        assert h.grad is not None
        assert h2.grad is not None
        assert torch.equal(h.grad, h2.grad)


def moved(w: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(h @ w)


Step = Callable[[Tensor, Any], tuple[Any, Any]]

#: From the weight and the carry, a pair of 3 x 4 tensors, to the next one and what is
#: stacked; what is the same tensor, an operand, cut off or a view has a gradient of its own.
STEPS: dict[str, Step] = {
    "carry twice": lambda w, c: ((moved(w, c[0]) + c[1], c[1]), c[0]),
    "new twice": lambda w, c: (lambda new: ((new, new), c[1]))(moved(w, c[0]) + c[1]),
    "new three times": lambda w, c: (lambda new: ((new, new), new))(
        moved(w, c[0] + c[1])
    ),
    "swapped": lambda w, c: ((c[1], moved(w, c[0])), c[0] + c[1]),
    "cut off": lambda w, c: (lambda new: ((new, c[1]), new.detach()))(moved(w, c[0])),
    "a view": lambda w, c: (lambda new: ((new, c[1]), new[0]))(moved(w, c[0])),
    "transposed": lambda w, c: (lambda new: ((new, c[1]), new.t()))(moved(w, c[0])),
    "weight": lambda w, c: ((moved(w, c[0]), c[1]), w),
    "nothing moves": lambda w, c: (c, c[0]),
}

SUMS_OF_THREE = ("new three times", "weight")


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_what_is_returned_twice_or_passed_on_has_its_gradients(
    name: str, is_reversed: bool, asked: list[Any]
) -> None:
    """As in the loop, the second time too; to the bit, but for the order of a sum of three."""

    form, tolerance = STEPS[name], 1e-14 * (name in SUMS_OF_THREE)

    def by_loop(w: Tensor, a: Tensor, b: Tensor) -> tuple[Any, Tensor]:
        carry, rows = (a, b), []
        for _ in range(LENGTH):
            carry, row = form(w, carry)
            rows.append(row)
        return carry, torch.stack(rows[::-1] if is_reversed else rows)

    def scanned(w: Tensor, a: Tensor, b: Tensor) -> tuple[Any, Tensor]:
        def one(carry: Any, _: None) -> tuple[Any, Any]:
            return form(w, carry)

        return scan(one, (a, b), length=LENGTH, schedule=Sqrt(), reverse=is_reversed)

    def gradients(run: Callable[..., tuple[Any, Tensor]]) -> list[Tensor | None]:
        given = [seeded(4, 4), seeded(3, 4, seed=1), seeded(3, 4, seed=2)]
        for each in given:
            each.requires_grad_()
        (a, b), rows = run(*given)
        (a.sin().sum() + b.cos().sum() + rows.tanh().sum()).backward()
        return [each.grad for each in given]

    for _ in range(2):
        asked.clear()
        pairs = zip(gradients(scanned), gradients(by_loop), strict=True)
        for one, other in pairs:
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=tolerance, atol=0)
    assert not asked or name in ("a view", "transposed", "new three times")


def test_a_sum_changes_nobodys_gradient() -> None:
    """What comes first may be a cotangent; only a sum of its own grows in place."""
    first, second, third = (seeded(3, seed=seed) for seed in range(3))
    kept = [each.clone() for each in (first, second, third)]
    total = _executor._GradientSum(is_quiet=True)  # pyright: ignore[reportPrivateUsage]
    for each in (None, first, None, second, third):
        total.add(each)

    assert total.tensor is not None
    assert torch.equal(total.tensor, kept[0] + kept[1] + kept[2])
    assert all(map(torch.equal, (first, second, third), kept))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_gradients_are_summed() -> None:
    """What is captured may have a gradient that is not dense."""
    table, index = seeded(6, 3), torch.tensor([0, 2, 2])

    def looked_up(table: Tensor, schedule: AbstractSchedule | None) -> Tensor:
        def one(h: Tensor, _: None) -> tuple[Tensor, None]:
            return torch.sin(h + F.embedding(index, table, sparse=True)), None

        return scan(one, seeded(3, 3, seed=1), length=4, schedule=schedule)[0].sum()

    def by_loop(table: Tensor) -> Tensor:
        h = seeded(3, 3, seed=1)
        for _ in range(4):
            h = torch.sin(h + F.embedding(index, table, sparse=True))
        return h.sum()

    one, other = (table.clone().requires_grad_() for _ in range(2))
    looked_up(one, Sqrt()).backward()
    by_loop(other).backward()
    assert one.grad is not None
    assert other.grad is not None
    assert one.grad.is_sparse
    torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense())


@pytest.mark.parametrize("schedule", [None, Sqrt()], ids=repr)
def test_a_chain_makes_its_regions_once(
    schedule: AbstractSchedule | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of functions that change their argument too: made anew, they know no call."""
    made: list[object] = []

    def noting(f: Any, **options: Any) -> Any:
        made.append(f)
        return remat(f, **options)

    monkeypatch.setattr(_chain, "remat", noting)
    run = chain([nn.Linear(4, 4), torch.tanh, lambda x: x.mul_(2)], schedule=schedule)
    for count in (4, 4):  # the last one, and the last one on copies
        run(leaves()[1].float()).sum().backward()
        assert len(made) == count


def test_a_chain_that_has_run_can_be_copied_and_pickled() -> None:
    """A copy has functions of its own, and is equal where these are."""
    run = chain([nn.Linear(4, 4), torch.tanh], schedule=Sqrt())
    x = seeded(3, 4).float()
    run(x).sum().backward()
    for other in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert other.fs[0] is not run.fs[0]
        assert torch.equal(other(x), run(x))
    assert copy.copy(run) == run
