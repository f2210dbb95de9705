"""Regions that `torch.compile` puts into no graph: they run between two, or it says why."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported

from remat import checkpoint_name, policies, remat, storage
from tests.calls.graphs import compiled
from tests.support import assert_bitwise, assert_close, seeded

pytestmark = [
    pytest.mark.apart,
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Dynamo's own, of what is between two graphs.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


offloaded = remat(lambda x: x.sin().sin(), saved_inputs=storage.Cast(torch.float32))
by_name = remat(
    lambda x: x.sin().sin(), saved_inputs={"x": storage.Cast(torch.float32)}
)
run_again = remat(lambda x: x.sin().sin(), engine="rerun")
compared = remat(
    lambda x: x.sin().sin(), verify=True, policy=policies.everything_saveable
)
APART: dict[str, tuple[Any, str]] = {
    "storage": (offloaded, "stores values in Cast"),
    "storage by name": (by_name, "saved_inputs"),
    "rerun": (run_again, "rerun"),
    "verify": (compared, "verify"),
}
each_apart = pytest.mark.parametrize(("region", "why"), APART.values(), ids=APART)


@each_apart
def test_what_stays_apart_runs_between_graphs(region: Any, why: str) -> None:
    """As it does outside: the same draws, the same gradients."""
    x = seeded(3, 4).requires_grad_()
    found: list[Any] = []

    def fun(x: Tensor) -> Tensor:
        return region(x.exp()).sum() + 1

    for each in (fun, compiled(fun, fullgraph=False)):
        torch.manual_seed(3)
        out = each(x)
        found.append((out, torch.autograd.grad(out, x), torch.get_rng_state()))

    assert_close(found[1], found[0])


@each_apart
def test_what_stays_apart_is_refused_in_one_graph(region: Any, why: str) -> None:
    """The error says what to do."""
    with pytest.raises(Unsupported, match=why):
        compiled(lambda x: region(x.exp()).sum())(seeded(3, 4).requires_grad_())


def test_side_effects_stay_apart() -> None:
    """Dynamo does not take a region that changes what is outside of it."""
    log: list[int] = []
    region = remat(lambda x: x.sin() if log.append(1) else x.cos(), engine="rerun")  # type: ignore[func-returns-value]

    with pytest.raises(Unsupported):
        compiled(lambda x: region(x).sum())(seeded(3, 4).requires_grad_())


def test_names_outside_of_regions_are_nothing() -> None:
    """They leave no trace in a compiled graph."""
    fun = compiled(lambda x: checkpoint_name(x.sin(), "a").sum())

    assert_close(fun(seeded(3)), seeded(3).sin().sum())


def test_a_graph_that_ends_inside_a_region() -> None:
    """With `nested_graph_breaks` the function comes without a graph; it is a region all the same."""

    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    region, x = remat(fun), seeded(3, 4).requires_grad_()
    with torch._dynamo.config.patch(nested_graph_breaks=True):
        each = torch.compile(lambda x: region(x.exp()), backend="eager")
        found, _ = each(x), each(x)

    assert_bitwise(found, fun(x.exp()))
    assert_bitwise(
        torch.autograd.grad(found.sum(), x), torch.autograd.grad(fun(x.exp()).sum(), x)
    )
    assert region.cache_info().misses <= 1
