"""The report of a step: its figures agree with other measurements, and it touches nothing.

"per region and per layer (equal layers folded): bytes held (storages counted once),
recompute FLOPs and measured time, predicted beside measured, peak and what made it,
parameters, gradients and optimizer state apart from activations, values outside any region,
names that matched nothing, the ten biggest values with source lines, what consumed each, and
one suggested next step"; "Reports agree with independent measurement: torch's own
`MemTracker` (CPU) within 1 %".
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from remat import disabled, policies, remat, report
from remat.reporting._measure.live_bytes import allocator_peak
from tests.reporting.models import batch, block, loss_of, parameters
from tests.reporting.reports import penalty
from tests.support import Heard, OperatorCounter

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
    """The bytes on the device of the tests."""
    return tracker.get_tracker_snapshot(kind)[torch.get_default_device()]["Total"]


@each_policy
def test_bytes_agree_with_torchs_tracker(policy: Any) -> None:
    """Held bytes and peak are those of `MemTracker`, to 1 %."""
    loss = loss_of(remat(block, policy=policy))
    given = parameters(requires_grad=True)

    found = report(loss, given, batch())

    held, peak = tracked(loss, given, batch())
    assert found.held_bytes == pytest.approx(held, rel=0.01)
    assert found.peak.size_bytes == pytest.approx(peak, rel=0.01)


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


@each_policy
def test_predicted_beside_measured(policy: Any) -> None:
    """The trace foretells what a region holds and its backward's working set, exactly."""
    (region,) = report(
        loss_of(remat(block, policy=policy)), parameters(), batch()
    ).regions

    assert region.predicted_held_bytes == region.held_bytes
    assert region.predicted_working_set_bytes == region.working_set_bytes


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

    found = allocator_peak([torch.device("cuda", 0), torch.device("cpu")])
    none = allocator_peak([torch.device("cpu")])

    assert (found(), none()) == (256, None)
    assert counters.calls == ["reset", "max"]


@pytest.mark.gpu
def test_bytes_agree_with_the_devices_allocator() -> None:
    """The peak is the allocator's, to 1 % and its rounding; sizes are multiples of 2 MiB."""
    region = remat(lambda t: torch.sin(torch.sin(torch.sin(t))))
    x = torch.ones(8, 2**20, device=torch.accelerator.current_accelerator())

    found = report(lambda x: region(region(x * 2.0)).sum(), x)

    assert found.allocator_peak_bytes is not None
    assert found.peak.size_bytes == pytest.approx(found.allocator_peak_bytes, rel=0.01)


def test_disabled_reports_the_plain_function() -> None:
    """Under `disabled()` the report is that of the function without regions."""
    with disabled():
        found = report(loss_of(remat(block)), parameters(), batch())

    plain = report(loss_of(block), parameters(), batch())
    assert (found.held_bytes, found.regions) == (plain.held_bytes, ())


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
