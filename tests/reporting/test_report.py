"""The report of a step: its figures agree with other measurements, and it touches nothing.

"per region and per layer (equal layers folded): bytes held (storages counted once),
recompute FLOPs and measured time, predicted beside measured, peak and what made it,
parameters, gradients and optimizer state apart from activations, values outside any region,
names that matched nothing, the ten biggest values with source lines, what consumed each, and
one suggested next step"; "Reports agree with independent measurement: torch's own
`MemTracker` (CPU) within 1 %".
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, ClassVar, final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from remat import (
    RematError,
    Report,
    checkpoint_name,
    disabled,
    policies,
    random,
    remat,
    report,
    scan,
    schedules,
    storage,
)
from remat.reporting._measure.live_bytes import allocator_peaks
from tests.reporting.models import Normed, batch, block, loss_of, parameters
from tests.support import Heard, OperatorCounter, seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:remat.RematWarning"),
]

POLICIES = {
    "nothing": policies.nothing_saveable,
    "matmuls": policies.save_matmul_outputs,
    "attn": policies.save_only_these_names("attn"),
    "everything": policies.everything_saveable,
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


@pytest.fixture(scope="module")
def attention() -> Report:
    """Four layers that save their attention."""
    layer = remat(block, policy=policies.save_only_these_names("attn"))
    return report(loss_of(layer), parameters(), batch())


def tracked(f: Any, given: list[dict[str, Tensor]], x: Tensor) -> tuple[int, int]:
    """Held bytes and peak beyond the arguments, by torch's own tracker."""
    leaves = [each for p in given for each in p.values()]
    torch.autograd.grad(f(given, x), leaves)  # traces
    tracker = MemTracker()
    tracker.track_external(*leaves, x)
    with tracker:
        base = total(tracker, "current")
        loss = f(given, x)
        held = total(tracker, "current") - base
        gradients = torch.autograd.grad(loss, leaves)
        peak = total(tracker, "peak") - base
    assert len(gradients) == len(leaves)
    return held, peak


def total(tracker: MemTracker, kind: str) -> int:
    """The bytes on the CPU."""
    return tracker.get_tracker_snapshot(kind)[torch.device("cpu")]["Total"]


@pytest.mark.contract
@each_policy
def test_bytes_agree_with_torchs_tracker(policy: Any) -> None:
    """Held bytes and peak are those of `MemTracker`, to 1 %."""
    loss = loss_of(remat(block, policy=policy))
    given = parameters(requires_grad=True)

    found = report(loss, given, batch())

    held, peak = tracked(loss, given, batch())
    assert found.held_bytes == pytest.approx(held, rel=0.01)
    assert found.peak.size_bytes == pytest.approx(peak, rel=0.01)


@pytest.mark.contract
def test_bytes_of_a_plain_function_agree_with_torchs_tracker() -> None:
    """Without any region all is held outside of regions."""
    given = parameters(requires_grad=True)

    found = report(loss_of(block), given, batch())

    held, peak = tracked(loss_of(block), given, batch())
    assert found.held_bytes == pytest.approx(held, rel=0.01)
    assert found.peak.size_bytes == pytest.approx(peak, rel=0.01)
    assert found.outside_bytes + found.output_bytes == found.held_bytes
    assert found.regions == ()


def tied(region: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """One weight in both layers, transposed in the second."""
    layer = region(lambda x, w: torch.tanh(torch.tanh(x @ w) @ w.t()))
    return lambda x, w: layer(layer(x, w), w).sum(), (
        torch.randn(32, 16),
        torch.randn(16, 48),
    )


def convolutions(region: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """Two convolutions with a normalization between."""

    def stage(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(F.group_norm(F.conv2d(x, w, padding=1), 2))

    layer = region(stage)
    weights = torch.randn(4, 4, 3, 3), torch.randn(4, 4, 3, 3)
    return lambda x, a, b: layer(layer(x, a), b).sum(), (
        torch.randn(2, 4, 16, 16),
        *weights,
    )


def penalty(region: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """The norm of a gradient that torch.func.grad takes inside."""
    layer = region(lambda w, x: torch.tanh(torch.tanh(x @ w) @ w))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        inner = torch.func.grad(lambda v: layer(v, x).square().sum())
        return inner(w).square().sum()

    return loss, (torch.randn(16, 16) / 4, torch.randn(64, 16))


@pytest.mark.contract
@pytest.mark.parametrize("model", [tied, convolutions, penalty])
@pytest.mark.parametrize("region", [remat, lambda f: f], ids=["region", "plain"])
def test_other_models_agree_with_torchs_tracker(model: Any, region: Any) -> None:
    """Tied weights, convolutions, a gradient inside: held bytes and peak, to 1 %."""
    torch.manual_seed(0)
    f, given = model(region)
    leaves = [each.requires_grad_() for each in given]

    found = report(f, *given)

    torch.autograd.grad(f(*given), leaves)
    tracker = MemTracker()
    tracker.track_external(*leaves)
    with tracker:
        base = total(tracker, "current")
        loss = f(*given)
        held = total(tracker, "current") - base
        gradients = torch.autograd.grad(loss, leaves)
        peak = total(tracker, "peak") - base
    assert len(gradients) == len(leaves)
    assert found.held_bytes == pytest.approx(held, rel=0.01)
    assert found.peak.size_bytes == pytest.approx(peak, rel=0.01)


@pytest.mark.contract
@each_policy
def test_predicted_beside_measured(policy: Any) -> None:
    """The trace foretells what a region holds and its backward's working set, exactly."""
    (region,) = report(
        loss_of(remat(block, policy=policy)), parameters(), batch()
    ).regions

    assert region.predicted_held_bytes == region.held_bytes
    assert region.predicted_working_set_bytes == region.working_set_bytes


@pytest.mark.contract
@each_policy
def test_flops_agree_with_torchs_counter(policy: Any) -> None:
    """Forward and backward FLOPs are the counter's; what is again is the surplus."""
    given = parameters(requires_grad=True)
    leaves = [each for p in given for each in p.values()]
    loss = loss_of(remat(block, policy=policy))

    flops = {}
    with sdpa_kernel(SDPBackend.MATH):  # the counter leaves out the CPU's own attention
        found = report(loss, given, batch())
        for name, f in {"plain": loss_of(block), "region": loss}.items():
            with FlopCounterMode(display=False) as counter:
                torch.autograd.grad(f(given, batch()), leaves)
            flops[name] = counter.get_total_flops()

    assert found.forward_flops + found.backward_flops == flops["region"]
    assert found.recompute_flops == flops["region"] - flops["plain"]


def test_equal_layers_are_folded(attention: Report) -> None:
    """The first layer's input is an argument; the three others are alike."""
    (region,) = attention.regions

    assert (region.name, region.calls) == ("block", 4)
    assert [(layer.first, layer.count) for layer in region.layers] == [(0, 1), (1, 3)]
    first, other = region.layers
    assert other.held_bytes - first.held_bytes == batch().nbytes
    assert region.held_bytes == first.held_bytes + 3 * other.held_bytes
    assert region.recompute_flops == 4 * (first.recompute_flops or 0)
    assert "each, x 3" in str(attention)


def test_parameters_and_gradients_count_apart(attention: Report) -> None:
    """Their bytes are those of the tensors; none is an activation."""
    size = sum(each.nbytes for p in parameters() for each in p.values())

    assert attention.parameter_bytes == size + batch().nbytes  # x is differentiated too
    assert attention.gradient_bytes == attention.parameter_bytes
    assert attention.optimizer_bytes is None
    held = [batch().nbytes] * 4 + [2 * 2 * 16 * 4] * 4 + [batch().nbytes] * 3
    assert sum(each.held_bytes for each in attention.regions) <= sum(held)


def test_the_optimizers_state_is_added_on_request(attention: Report) -> None:
    """Adam keeps two tensors like each parameter, and a step count."""
    weight = nn.Parameter(torch.ones(10, 10))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(10, 10)
    optimizer.step()

    found = attention.with_optimizer(optimizer)

    assert found.optimizer_bytes == 2 * 400 + 4
    assert dataclasses.replace(found, optimizer_bytes=None) == attention


def test_the_peak_says_what_made_it(attention: Report) -> None:
    """In the backward of the first layer, where all gradients are there but its own."""
    peak = attention.peak

    assert (peak.phase, peak.region, peak.call) == ("backward", "block", 0)
    assert sum(size for _, size in peak.groups) == peak.size_bytes
    assert dict(peak.groups).keys() >= {"block", "gradients"}
    assert max(attention.timeline.total_bytes) == peak.size_bytes


def test_a_peak_in_a_forward() -> None:
    """A large temporary of the forward is named with its line."""

    def wasteful(x: Tensor) -> Tensor:
        big = x.detach().repeat(100).cos()
        return x * big.sum()

    peak = report(wasteful, torch.ones(64)).peak

    assert (peak.phase, peak.region, peak.op) == ("forward", "", "aten.cos")
    assert peak.source.startswith("test_report.py:")
    assert peak.size_bytes == 2 * 64 * 100 * 4


def test_the_largest_values(attention: Report) -> None:
    """Each with its line, its region and what reads it in the backward; folded."""
    value = next(each for each in attention.values if each.name == "attn")

    assert value.count == 4
    assert value.size_bytes == 4 * batch().nbytes
    assert value.region == "block"
    assert value.storage == "Keep()"
    assert value.source.startswith("models.py:")
    assert any("attention" in each for each in value.consumers)
    sizes = [each.size_bytes for each in attention.values]
    assert sizes == sorted(sizes, reverse=True)


def test_all_values_are_there_and_the_text_has_ten() -> None:
    """Held and recomputed ones are in the record; the text says how many it leaves out."""

    def many(x: Tensor) -> Tensor:
        for scale in range(1, 15):
            x = (x * scale).sin()  # each `x * scale` waits, of its own shape
            x = torch.cat([x, x[:1]])
        return x.sum()

    found = report(many, torch.ones(8))

    assert len(found.values) == 14
    assert sum(each.size_bytes for each in found.values) == found.outside_bytes
    assert str(found).count("aten.mul test_report.py") == 10
    assert "and 4 smaller ones" in str(found)


def test_recomputed_values_are_listed(attention: Report) -> None:
    """Each with its name, its line, its bytes and its work, equal layers folded."""
    value = next(each for each in attention.recomputed if each.name == "mlp_up")

    tokens = batch().numel() // 32
    assert (value.op, value.shape, value.count) == ("aten.mm", (32, 128), 4)
    assert value.size_bytes == 4 * tokens * 128 * 4
    assert value.flops == 4 * 2 * tokens * 32 * 128
    assert (value.region, value.dtype) == ("block", torch.float32)
    assert value.source.startswith("models.py:")
    assert "attn" not in {each.name for each in attention.recomputed}
    assert sum(each.flops for each in attention.recomputed) == attention.recompute_flops


@pytest.mark.contract
def test_values_outside_of_regions() -> None:
    """What plain autograd holds has no region, and the node that reads it."""
    region = remat(torch.sin)

    def loss(x: Tensor) -> Tensor:
        return torch.exp(region(x)).sum()

    found = report(loss, torch.ones(1000))

    (value,) = [each for each in found.values if not each.region]
    assert (value.op, value.consumers) == ("aten.exp", ("ExpBackward0",))
    assert value.source.startswith("test_report.py:")
    assert found.outside_bytes == 4000
    assert found.suggestion.kind == "wrap"
    assert found.suggestion.source == value.source


@pytest.mark.contract
def test_one_storage_counts_once() -> None:
    """Views of one tensor, held by several regions and by autograd, are its bytes once."""
    region = remat(lambda t: torch.sin(torch.sin(t)))

    def loss(x: Tensor) -> Tensor:
        y = x * 2.0
        return (
            region(y) + region(y.view(10, 10).t()).reshape(-1) + y.exp().sin()
        ).sum()

    found = report(loss, torch.ones(100))

    held = found.held_bytes - found.output_bytes
    assert held == 400 + 400  # y, and exp(y), which the nodes of exp and sin hold


def test_a_name_that_matches_nothing() -> None:
    """It is listed with its policy, and stands in the text."""
    policy = policies.save_only_these_names("attn", "atn")

    found = report(loss_of(remat(block, policy=policy)), parameters(2), batch())

    assert found.unmatched == ((repr(policy), "atn"),)
    assert 'no value has the name "atn"' in str(found)


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
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
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


def test_storages_are_named() -> None:
    """A value that waits in another form says so, and counts in that form."""
    policy = policies.save_only_these_names("attn").stored(storage.Cast(torch.bfloat16))

    found = report(loss_of(remat(block, policy=policy)), parameters(), batch())

    value = next(each for each in found.values if each.name == "attn")
    assert value.storage == "Cast(dtype=torch.bfloat16)"
    assert value.size_bytes == 4 * batch().nbytes // 2


def test_inputs_that_wait_otherwise_count_so() -> None:
    """`saved_inputs` holds under the watcher too, and the value says how it waits."""
    how = storage.Cast(torch.bfloat16)
    region = remat(lambda t: t.sin().sin(), saved_inputs=how)

    found = report(lambda x: region(x * 2.0).sum(), torch.ones(64))

    (value,) = found.values
    assert (value.name, value.size_bytes, value.storage) == ("t", 128, repr(how))


def hidden(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """h: (10, 40) with many zeros; t: (10, 24)."""
    h = checkpoint_name(torch.relu(x @ p["up"]), "h")
    return x + checkpoint_name(torch.tanh(h @ p["down"]), "t")


# For both of 400 and 240 numbers of four bytes: bytes in memory, and in a file.
FOLDER = "a folder"
WAITS: dict[str, tuple[storage.AbstractStorage, tuple[int, int], tuple[int, int]]] = {
    "keep": (storage.Keep(), (1600, 0), (960, 0)),
    "cast": (storage.Cast(torch.bfloat16), (800, 0), (480, 0)),
    # A byte a number, and a step and a minimum of two bytes each a group of 32.
    "quantize": (storage.Quantize(8, group_size=32), (452, 0), (272, 0)),
    "by_chance": (
        storage.Quantize(2, group_size=40, stochastic=True, key=random.key(0)),
        (140, 0),
        (84, 0),
    ),
    "file": (storage.Offload(path=FOLDER), (0, 1600), (0, 960)),
    "large": (storage.Offload(path=FOLDER, min_bytes=1000), (0, 1600), (960, 0)),
    "both": (
        storage.Quantize(8, group_size=32) >> storage.Offload(path=FOLDER),
        (0, 452),
        (0, 272),
    ),
    "back": (
        storage.Offload(path=FOLDER) >> storage.Cast(torch.bfloat16),
        (800, 0),
        (480, 0),
    ),
}


def in_folder(how: Any, path: Any) -> Any:
    """The storage with its files in this folder."""
    if isinstance(how, storage.Offload):
        return dataclasses.replace(how, path=str(path))
    if isinstance(how, storage.Chain):
        return storage.Chain(tuple(in_folder(link, path) for link in how.links))
    return how


@pytest.mark.contract
@pytest.mark.parametrize("name", WAITS)
def test_what_waits_in_a_storage_is_foretold(name: str, tmp_path: Any) -> None:
    """Bytes in memory and elsewhere, of saved values and of inputs, by both ways."""
    how, h, t = WAITS[name]
    how = in_folder(how, tmp_path)
    p = {"up": seeded(24, 40).float(), "down": seeded(40, 24).float()}
    x = seeded(10, 24).float()
    saved = remat(hidden, policy=policies.save_only_these_names("*").stored(how))
    given = remat(hidden, saved_inputs={"x": how})

    found = report(lambda p, x: saved(p, x).sum(), p, x)
    (row,) = found.regions
    measured = row.held_bytes, row.elsewhere_bytes
    assert measured == (h[0] + t[0], h[1] + t[1])
    assert measured == (row.predicted_held_bytes, row.predicted_elsewhere_bytes)
    assert (found.held_bytes - found.output_bytes, found.elsewhere_bytes) == measured
    assert ("elsewhere" in str(found)) is (measured[1] > 0)

    (row,) = report(lambda p, x: given(p, x.sin()).sum(), p, x).regions
    measured = row.held_bytes, row.elsewhere_bytes
    assert measured == t
    assert measured == (row.predicted_held_bytes, row.predicted_elsewhere_bytes)


@pytest.mark.parametrize(
    ("how", "size_bytes"),
    [(storage.Keep(), 8 * 24), (storage.Cast(torch.bfloat16), 36)],
)
def test_views_of_one_base_are_foretold(how: Any, size_bytes: int) -> None:
    """As it is a view holds all of its base, once; what a storage copies is its own."""
    region = remat(lambda a, b: a.sin() * b.sin(), saved_inputs=how)

    def loss(x: Tensor) -> Tensor:
        base = x * 2.0
        return region(base[:3], base[1:4]).sum()

    (row,) = report(loss, seeded(8, 3)).regions

    assert row.held_bytes == row.predicted_held_bytes == size_bytes


def test_what_waits_elsewhere_does_not_make_the_peak(tmp_path: Any) -> None:
    """Values in files take no memory: at the peak those of the first layer are left."""
    policy = policies.save_only_these_names("*")
    p = {"up": seeded(24, 40).float(), "down": seeded(40, 24).float()}
    x = seeded(10, 24).float()

    def peak(policy: Any) -> Report:
        layer = remat(hidden, policy=policy)
        return report(lambda p, x: layer(p, layer(p, layer(p, x))).sum(), p, x)

    kept = peak(policy)
    away = peak(policy.stored(storage.Offload(path=str(tmp_path))))

    assert kept.held_bytes - away.held_bytes == away.elsewhere_bytes == 3 * (1600 + 960)
    assert kept.peak.size_bytes - away.peak.size_bytes == 1600 + 960
    assert max(away.timeline.total_bytes) == away.peak.size_bytes
    assert sum(value.size_bytes for value in away.values) == (
        away.held_bytes - away.output_bytes + away.elsewhere_bytes
    )


FIRST = storage.Place()


@final
@dataclasses.dataclass(frozen=True)
class Halves(storage.AbstractStorage):
    """A storage of the user's own: the first half of the numbers waits."""

    is_exact: ClassVar[bool] = False

    def store(self, value: Tensor, place: storage.Place = FIRST) -> storage.Stored:
        half = value.reshape(-1)[: value.numel() // 2].clone()
        return storage.Stored(
            (half,), lambda parts: torch.cat([parts[0]] * 2).view(value.shape)
        )


@pytest.mark.contract
@pytest.mark.parametrize("how", [storage.Sparse(), Halves()], ids=["sparse", "own"])
def test_bytes_that_nothing_foretells_are_those_measured(how: Any) -> None:
    """How many zeros there are, and what a user's storage does, no shape tells."""
    x = torch.relu(seeded(64))
    policy = policies.save_only_these_names("a").stored(how) | (
        policies.save_only_these_names("b")
    )
    region = remat(
        lambda x: checkpoint_name(checkpoint_name(x * 2.0, "a").sin(), "b").square(),
        policy=policy,
    )

    (row,) = report(lambda x: region(x).sum(), x).regions

    bits = 64 // 8
    first = int((x != 0).sum()) * 8 + bits if how == storage.Sparse() else 64 * 4
    assert row.held_bytes == row.predicted_held_bytes == first + 64 * 8
    assert row.elsewhere_bytes == row.predicted_elsewhere_bytes == 0


@pytest.mark.contract
def test_generator_states_are_held_as_predicted() -> None:
    """A region that draws holds the state from which it draws again."""
    region: Any = remat(
        lambda x: torch.nn.functional.dropout(x.sin(), 0.5).sin(), rng="preserve"
    )

    (row,) = report(lambda x: region(x).sum(), torch.ones(64)).regions

    assert row.held_bytes == row.predicted_held_bytes == torch.get_rng_state().nbytes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_on_inside(mode: Any) -> None:
    """A report can be asked for where no gradients are recorded."""
    with mode():
        found = report(remat(lambda x: x.sin().sin()), torch.ones(4))

    assert found.gradient_bytes == 16


@pytest.mark.contract
def test_a_function_that_differentiates_inside() -> None:
    """Regions under its own transform are listed; what they repeat is not known."""
    region = remat(lambda w, x: torch.tanh(w @ x).sin())

    def penalty(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(lambda v: region(v, x).sum())(w).square().sum()

    found = report(penalty, torch.eye(8), torch.ones(8, 8))

    assert any("differentiated" in row.name for row in found.regions)
    assert found.recompute_flops is None
    assert found.parameter_bytes == 2 * 256


@pytest.mark.contract
def test_a_module_of_regions() -> None:
    """Modules are reported by their parameters, and their buffers stay what they were."""
    blocks: list[Any] = [remat(Normed()), remat(Normed())]
    model = nn.Sequential(*blocks)
    before = {name: each.clone() for name, each in model.state_dict().items()}

    found = report(model, torch.randn(4, 8))

    assert [region.name for region in found.regions] == ["Normed"]
    assert found.parameter_bytes == sum(each.nbytes for each in model.parameters())
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.contract
def test_nothing_of_the_callers_is_changed() -> None:
    """Not the arguments, not `.grad`, not the generator; `f` may even write in place."""
    weight = torch.ones(8, requires_grad=True)
    weight.grad = torch.full((8,), 7.0)
    counts = torch.zeros(8)
    x = torch.randn(4, 8)
    state = torch.get_rng_state()
    copies = [each.detach().clone() for each in (weight, counts, x)]

    def loss(x: Tensor, counts: Tensor) -> Tensor:
        counts.add_(1)
        x.mul_(2)
        return (torch.nn.functional.dropout(x, 0.5) * weight).sin().sum()

    found = report(loss, x, counts)

    assert found.parameter_bytes == 32
    for each, copy in zip((weight, counts, x), copies, strict=True):
        assert torch.equal(each, copy)
    assert torch.equal(weight.grad, torch.full((8,), 7.0))
    assert torch.equal(torch.get_rng_state(), state)
    assert not x.requires_grad


def test_an_error_in_the_step_changes_nothing() -> None:
    """A function that raises has its arguments put back too."""
    x = torch.ones(3)

    def fails(x: Tensor) -> Tensor:
        x.add_(1)
        raise KeyError("of the user's")

    with pytest.raises((KeyError, RuntimeError)):
        report(fails, x)

    assert torch.equal(x, torch.ones(3))


def test_no_gradient_is_an_error() -> None:
    """A function whose outputs need no grad has no step to report."""
    with pytest.raises(RematError, match="returned no tensor that requires grad"):
        report(lambda x: x.detach(), torch.ones(3))


def test_an_object_that_the_pytree_does_not_know_is_named() -> None:
    """A dataclass of one's own hides its tensors: the error says so, and what to do."""

    @dataclasses.dataclass
    class Output:
        loss: Tensor

    with pytest.raises(RematError, match=r"\(it returned Output\).*f\(\*a\)\.loss"):
        report(lambda x: Output(x.sin().sum()), torch.ones(3))


@pytest.mark.parametrize("schedule", [schedules.Every(2), schedules.Sqrt()])
def test_a_scheduled_stack_is_a_row(schedule: Any) -> None:
    """It is called after its stage, and holds what waits; what runs again it does not tell."""

    def stage(c: Tensor, w: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(c @ w), None

    def loss(x: Tensor, ws: Tensor) -> Tensor:
        return scan(stage, x, ws, schedule=schedule)[0].sum()

    found = report(loss, torch.ones(4, 8), torch.ones(4, 8, 8) / 8)

    rows = {row.name.rpartition(".")[2]: row for row in found.regions}
    assert rows["stage"].policy == "a schedule"
    assert rows["stage"].held_bytes == found.held_bytes - found.output_bytes
    states = [value for value in found.values if value.shape == (4, 8)]
    assert sum(value.size_bytes for value in states) >= 2 * 4 * 8 * 4
    assert all(value.region == rows["stage"].name for value in states)
    assert sum(value.size_bytes for value in found.values) == rows["stage"].held_bytes
    assert found.recompute_flops is None
    assert found.gradient_bytes == (32 + 256) * 4


def test_several_outputs_are_summed() -> None:
    """Any pytree of outputs: the backward is that of their sum."""
    region = remat(lambda x: {"a": x.sin().sin(), "b": (x.exp().sin(), 3)})

    found = report(region, torch.ones(16))

    assert found.gradient_bytes == 64
    assert found.regions[0].calls == 1


def test_what_runs_again_in_python_is_unknown() -> None:
    """engine="rerun" does not tell what of its backward is recomputation."""
    region = remat(lambda x: x.sin().sin(), engine="rerun")

    found = report(lambda x: region(region(x)).sum(), torch.ones(64))

    (row,) = found.regions
    assert (row.calls, row.recompute_flops, row.predicted_held_bytes) == (2, None, None)
    assert row.name.endswith("<lambda>")  # nobody differentiates it inside
    assert row.held_bytes == 256
    assert "unknown" in str(found)


def test_signatures_of_one_function_are_layers() -> None:
    """Two shapes are two layers of one row."""
    region = remat(lambda x: x.sin().sin())

    found = report(
        lambda x: region(x * 2.0).sum() + region(x[:2] * 1.0).sum(), torch.ones(64)
    )

    (row,) = found.regions
    assert sorted(layer.held_bytes for layer in row.layers) == [8, 256]
    assert row.predicted_held_bytes == row.held_bytes == 264


def test_one_function_under_two_policies_is_two_rows() -> None:
    """They have one name, and a number."""
    layers = [remat(block), remat(block, policy=policies.save_matmul_outputs)]

    found = report(
        lambda p, x: layers[1](p, layers[0](p, x)).sum(), parameters(1)[0], batch()
    )

    assert [row.name for row in found.regions] == ["block #1", "block #2"]
    assert [row.policy for row in found.regions] == [
        "nothing_saveable",
        "save_matmul_outputs",
    ]


@pytest.mark.contract
def test_meta_tensors_give_bytes_and_no_times() -> None:
    """On the meta device the bytes are those of a real run."""
    loss = loss_of(remat(block))
    given = [{k: v.to("meta") for k, v in p.items()} for p in parameters()]

    found = report(loss, given, batch(device="meta"))

    real = report(loss, parameters(), batch())
    assert found.recompute_s is None
    assert found.forward_s is None
    assert found.device == "meta"
    assert found.regions[0].calls == real.regions[0].calls
    # Attention has another kernel on meta tensors; what waits is the layers' inputs.
    assert found.held_bytes == real.held_bytes


class _Counters:
    """Stands in for CUDA's allocator."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def memory_allocated(self, device: Any) -> int:
        """Before the step."""
        return 100

    def reset_peak_memory_stats(self, device: Any) -> None:
        """Is asked before the step."""
        self.calls.append("reset")

    def max_memory_allocated(self, device: Any) -> int:
        """After the step; the peak of before if nobody reset it."""
        self.calls.append("max")
        return 356 if self.calls[0] == "reset" else 10**9


def test_the_allocators_peak_is_what_the_step_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond what lived before; tensors of other devices have none."""
    counters = _Counters()
    for name in ("memory_allocated", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, getattr(counters, name))

    with allocator_peaks([torch.device("cuda", 0), torch.device("cpu")]) as found:
        assert found.peak_bytes is None
    with allocator_peaks([torch.device("cpu")]) as none:
        pass

    assert (found.peak_bytes, none.peak_bytes) == (256, None)
    assert counters.calls == ["reset", "max"]


def test_the_allocators_peak_is_shown(attention: Report) -> None:
    """Only where there is one."""
    shown = dataclasses.replace(attention, allocator_peak_bytes=2**20)

    assert attention.allocator_peak_bytes is None
    assert "1.0 MiB by CUDA's allocator" in str(shown)
    assert "allocator" not in str(attention)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bytes_agree_with_cudas_allocator() -> None:
    """The peak is the allocator's, to 1 % and its rounding; sizes are multiples of 2 MiB."""
    region = remat(lambda t: torch.sin(torch.sin(torch.sin(t))))
    x = torch.ones(8, 2**20, device="cuda")

    found = report(lambda x: region(region(x * 2.0)).sum(), x)

    assert found.allocator_peak_bytes is not None
    assert found.peak.size_bytes == pytest.approx(found.allocator_peak_bytes, rel=0.01)


def test_disabled_reports_the_plain_function() -> None:
    """Under `disabled()` the report is that of the function without regions."""
    with disabled():
        found = report(loss_of(remat(block)), parameters(), batch())

    plain = report(loss_of(block), parameters(), batch())
    assert (found.held_bytes, found.regions) == (plain.held_bytes, ())


def test_json_has_every_figure(attention: Report) -> None:
    """The schema's name first, then the fields of the record; dtypes by name."""
    found = json.loads(attention.to_json())

    fields = [field.name for field in dataclasses.fields(attention)]
    assert list(found) == ["schema", *fields]
    assert found["schema"] == "remat.report/1"
    assert found["held_bytes"] == attention.held_bytes
    assert found["values"][0]["dtype"] == "float32"
    assert found["regions"][0]["layers"][1]["count"] == 3


def test_diff(attention: Report) -> None:
    """Figures of two reports side by side, regions by name, as a table."""
    plain = report(loss_of(block), parameters(), batch())

    found = plain.diff(attention)

    rows = {row.figure: (row.before, row.after) for row in found.rows}
    assert rows["held_bytes"] == (plain.held_bytes, attention.held_bytes)
    assert rows["held by block"] == (None, attention.regions[0].held_bytes)
    assert "held by block" in str(found)
    assert " x" in str(found)


def test_text_has_the_figures(attention: Report) -> None:
    """The text names what the issue asks for."""
    text = str(attention)

    for part in (
        "wait for the backward",
        "in the backward of block, call 0",
        "parameters",
        "gradients",
        "models.py:",
        "attn",
        "next: Saving `mlp_up` in block costs",
        "of the recomputation",
    ):
        assert part in text


def test_rich_shows_the_same(attention: Report) -> None:
    """With rich a report prints as tables."""
    console = pytest.importorskip("rich.console").Console(width=200, record=True)
    with console.capture() as capture:
        console.print(attention)

    assert "mlp_up" in capture.get()
    assert "each, x 3" in capture.get()


def test_names_that_look_like_markup_are_shown_whole() -> None:
    """A name is no instruction to rich, and a narrow table cuts no figure short."""
    console = pytest.importorskip("rich.console").Console(width=40, record=True)
    save = remat(
        lambda x: checkpoint_name(checkpoint_name(x.sin(), "h[i]"), "[/x]").exp().sin(),
        policy=policies.save_only_these_names("*"),
    )
    with console.capture() as capture:
        console.print(report(lambda x: save(x).sum(), torch.ones(16)))

    text = "".join(capture.get().split())
    assert "h[i]" in text
    assert "[/x]" in text
    assert "…" not in text


def test_repr_is_code(attention: Report) -> None:
    """The record is frozen, and compares by value."""
    assert dataclasses.replace(attention) == attention
    assert repr(attention).startswith("Report(function='loss_of.<locals>.loss'")
    with pytest.raises(dataclasses.FrozenInstanceError):
        attention.function = "other"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.contract
@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize("decorate", [remat, lambda f: f], ids=["region", "plain"])
def test_a_report_runs_one_step(decorate: Any, is_traced: bool) -> None:
    """Each matmul and each attention as often as a step does that nobody watches.

    That is one forward and one backward, whether the traces were there or not.
    """
    given = parameters(requires_grad=True)
    leaves = [each for p in given for each in p.values()]
    loss = loss_of(decorate(block))
    report(loss, given, batch())  # traces, and the first call of each operator

    with OperatorCounter() as step:
        torch.autograd.grad(loss(given, batch()), leaves)
    if not is_traced:
        loss = loss_of(decorate(block))
    with OperatorCounter() as reported:
        report(loss, given, batch())

    heavy = [name for name in step.counts if "mm" in name or "attention" in name]
    assert heavy
    assert {name: reported.counts[name] for name in heavy} == {
        name: step.counts[name] for name in heavy
    }


@pytest.mark.contract
def test_first_calls_of_kernels_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operator does at its first call in a process is over before it is timed.

    It runs twice then, if that changes nothing: never where it draws, or writes.
    """
    monkeypatch.setattr("remat.reporting._measure.watch._WARM", set())

    def loss(x: Tensor) -> Tensor:
        x = x.expm1() + torch.rand_like(x, dtype=x.dtype)
        return x.clone().lgamma_().detach() * x

    with Heard() as listener:
        report(loss, torch.full((3,), 0.5))
        report(loss, torch.full((3,), 0.5))

    assert listener.names.count("aten.expm1") == 3
    assert listener.names.count("aten.rand_like") == 2
    assert listener.names.count("aten.lgamma_") == 2


def test_named_arguments_belong_to_the_function() -> None:
    """Every keyword is `f`'s own, whatever it is called."""

    def loss(x: Tensor, *, optimizer: float) -> Tensor:
        return (checkpoint_name(x, "x") * optimizer).sin().sum()

    assert report(loss, torch.ones(4), optimizer=2.0).function.endswith("loss")
