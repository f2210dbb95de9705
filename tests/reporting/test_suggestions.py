"""The report's suggestions: what saving a value would cost and cut, and whether it does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat import Report, checkpoint_name, policies, remat, report
from tests.reporting.models import batch, block, loss_of, parameters

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:remat.RematWarning"),
]


def test_the_suggestion_holds() -> None:
    """What saving the value costs and cuts is what the next report finds."""
    before = report(loss_of(remat(block)), parameters(), batch())
    suggestion = before.suggestion
    assert suggestion.kind == "save"
    names = suggestion.value.strip("`")

    policy = policies.save_only_these_names(names)
    after = report(loss_of(remat(block, policy=policy)), parameters(), batch())

    assert after.held_bytes - before.held_bytes == suggestion.size_bytes
    assert before.recompute_flops is not None
    assert after.recompute_flops is not None
    part = 1 - after.recompute_flops / before.recompute_flops
    assert part == pytest.approx(-suggestion.fraction, abs=0.05)
    assert f"{-suggestion.fraction:.0%}" in suggestion.text


def experts(ws: list[Tensor], x: Tensor) -> Tensor:
    """Several products by one line of code."""
    return x + torch.stack([torch.tanh(x @ w) for w in ws]).sum(0)


@pytest.mark.parametrize("sizes", [(8, 8), (4, 16, 64)], ids=["equal", "unequal"])
def test_a_line_that_makes_several_values_is_one_suggestion(
    sizes: tuple[int, ...],
) -> None:
    """In every trace of the function; what it costs and cuts comes true where it is followed."""
    ws = [torch.linspace(-1, 1, 64).view(8, 8) / k for k in (1, 2, 3)]

    def step(policy: Callable[[policies.Value], bool] | None = None) -> Report:
        region = remat(experts, policy=policy)
        return report(
            lambda *xs: sum(region(ws, x).sum() for x in xs),
            *(torch.linspace(-1, 1, 8 * size).view(size, 8) for size in sizes),
        )

    before = step()
    op, source = before.suggestion.value.split(" at ")
    after = step(lambda value: str(value.op).startswith(op) and value.source == source)

    assert after.held_bytes - before.held_bytes == before.suggestion.size_bytes
    assert after.recompute_flops == 0
    assert before.suggestion.fraction < -0.9


def named_tanh(w: Tensor, x: Tensor) -> Tensor:
    """A layer that ends in the value that is worth saving."""
    return checkpoint_name(torch.tanh(x @ w), "out")


def named_attention(w: Tensor, x: Tensor) -> Tensor:
    """The same, where the operator that makes it returns more."""
    q = (x * w[0]).view(1, 2, 8, 8)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        return checkpoint_name(
            F.scaled_dot_product_attention(q, q, q).view(16, 8), "out"
        )


@pytest.mark.parametrize("layer", [named_tanh, named_attention])
@pytest.mark.parametrize(
    "end",
    [lambda y: y.sum(), lambda y: y.square().mean(), lambda y: y],
    ids=["dropped", "held outside", "returned"],
)
def test_an_output_that_lives_anyway_costs_nothing(layer: Any, end: Any) -> None:
    """The next region holds it as its input, the loss or the caller the last one."""
    w, x = torch.eye(8) + 0.1, torch.linspace(-1, 1, 128).view(16, 8)

    def step(policy: policies.AbstractPolicy) -> Report:
        region: Any = remat(layer, policy=policy)
        return report(lambda w, x: end(region(w, region(w, region(w, x)))), w, x)

    before = step(policies.nothing_saveable)
    after = step(policies.save_only_these_names("out"))

    assert before.suggestion.value == "`out`"
    assert after.held_bytes - before.held_bytes == before.suggestion.size_bytes
    assert after.frontier[0].saved_bytes == 0
    everything = step(policies.everything_saveable)
    most = before.frontier[-1].saved_bytes
    assert everything.held_bytes - before.held_bytes == most


def test_what_a_region_reads_too_is_held_by_it() -> None:
    """A value that plain autograd holds and a region takes is not to be wrapped."""
    region = remat(lambda x: x.sin().sin())

    found = report(lambda x: region(x.exp()).sum(), torch.ones(64))

    assert found.outside_bytes == 0
    assert found.regions[0].held_bytes == found.regions[0].predicted_held_bytes == 256
    assert found.values[0].region == found.regions[0].name
    assert found.values[0].consumers[0] == "ExpBackward0"
    assert found.suggestion.kind != "wrap"


def test_what_is_returned_is_not_to_be_wrapped() -> None:
    """It lives on, whether or not plain autograd holds it."""
    found = report(lambda x: x.sin().exp(), torch.ones(64))

    assert found.outside_bytes == 256
    assert found.suggestion.kind == "none"


def test_a_suggestion_is_not_taken_back() -> None:
    """Where it was followed, the next one is not to undo it."""

    def step(policy: policies.AbstractPolicy | None = None) -> Report:
        def named(x: Tensor, w: Tensor) -> Tensor:
            return checkpoint_name(torch.tanh(x @ w), "hidden").sin()

        region = remat(named, policy=policy)
        x, w = torch.ones(64, 64), torch.ones(64, 64)
        return report(lambda x, w: region(x, w).sum(), x, w)

    before, after = step(), step(policies.save_only_these_names("hidden"))

    assert before.suggestion.value == "`hidden`"
    assert after.suggestion.kind == "none"


def test_what_a_region_made_is_not_to_be_wrapped() -> None:
    """Its result, which plain autograd holds, is no reason to decorate it again."""
    region = remat(lambda x: x.sin() + 1.0)

    found = report(lambda x: region(x).square().mean(), torch.ones(64))

    assert found.outside_bytes >= 64 * 4
    assert found.suggestion.kind != "wrap"


def test_where_nothing_is_recomputed_less_may_be_saved() -> None:
    """Under everything_saveable the suggestion is to drop a value, and it holds."""
    policy = policies.everything_saveable
    loss = loss_of(remat(block, policy=policy))

    suggestion = report(loss, parameters(), batch()).suggestion

    assert suggestion.kind == "drop"
    assert suggestion.size_bytes < 0


def test_frontier_goes_from_nothing_to_everything() -> None:
    """Each point holds more and recomputes less; the ends are those of two policies."""
    points = report(loss_of(remat(block)), parameters(), batch()).frontier

    sizes = [point.saved_bytes for point in points]
    works = [point.recompute_work for point in points]
    assert sizes[0] == 0
    assert works == sorted(works, reverse=True)
    assert len(set(works)) == len(works)
    everything = remat(block, policy=policies.everything_saveable)
    (found,) = report(loss_of(everything), parameters(), batch()).regions
    assert found.recompute_flops == 0
    assert works[-1] < 0.01 * works[0]
    assert sizes[-1] <= found.held_bytes - 3 * batch().nbytes


def test_reading_a_generators_state_is_no_work() -> None:
    """Beside the 5,056 bytes of a state, small values are still worth saving."""

    def dropped(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.dropout(x @ w, 0.5).sin().exp() @ v

    region = remat(dropped, policy=policies.save_matmul_outputs, rng="preserve")
    x, w, v = torch.ones(16, 8), torch.eye(8), torch.eye(8)

    found = report(lambda x, w, v: region(x, w, v).square().mean(), x, w, v)

    assert found.suggestion.kind == "save"
    assert found.suggestion.fraction == -0.5
