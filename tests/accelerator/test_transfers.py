"""Offloading under load: how much is under way at once, who waits, and the numbers."""

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from remat import checkpoint_name, policies, remat
from remat.storage import Cast, Keep, Offload, Quantize, _transfer
from tests.support import assert_bitwise, daily

pytestmark = [pytest.mark.standin, pytest.mark.contract]

HERE = torch.device("privateuseone", 0)


@pytest.fixture(autouse=True)
def _lanes_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_transfer, "_lanes", {})


def block(x: Tensor, w: Tensor) -> Tensor:
    return x + (x @ w).tanh()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("pin", [True, False])
def test_so_many_copies_are_under_way(prefetch: int, pin: bool, device_counts: Any):
    """Of the value that is read and of those sent for ahead; and the host never waits."""
    layer = remat(block, saved_inputs={"x": Offload(pin=pin, prefetch=prefetch)})
    x = torch.randn(8, 4, device=HERE, requires_grad=True)
    w = torch.randn(4, 4, device=HERE, requires_grad=True)

    def step(layer: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        y = x
        for _ in range(8):
            y = layer(y, w)
        return torch.autograd.grad(y.sum(), (x, w))

    step(layer)  # traces
    torch.accelerator.synchronize(HERE)
    device_counts.forget()
    found = step(layer)

    sent, back, at_once, waits = device_counts.of(
        "copies_to_host",
        "copies_to_device",
        "most_copies_to_device_at_once",
        "synchronizations",
    )
    assert (sent, back) == (8, 8)
    assert at_once <= prefetch + 1
    # Memory that is not page-locked is copied to while the host waits.
    assert waits == (0 if pin else sent)
    assert_bitwise(found, step(block))


def test_each_value_comes_back_as_early_as_its_own_storage_says(device_counts: Any):
    """That of the first region with the last one's; those between one region ahead."""
    layers = [
        remat(block, saved_inputs={"x": Offload(prefetch=num_ahead)})
        for num_ahead in (3, 1, 1, 1)
    ]
    x = torch.randn(8, 4, device=HERE, requires_grad=True)
    w = torch.randn(4, 4, device=HERE, requires_grad=True)

    def step() -> None:
        y = x
        for layer in layers:
            y = layer(y, w)
        torch.autograd.grad(y.sum(), (x, w))

    step()  # traces
    torch.accelerator.synchronize(HERE)
    device_counts.forget()
    step()

    assert device_counts.of("copies_to_device") == 4
    assert device_counts.of("most_copies_to_device_at_once") == 3


def test_the_device_holds_what_is_under_way():
    """A backward holds what is read, what is sent for ahead, and what it computes."""
    layer = remat(lambda x: x.sin().exp(), saved_inputs=Offload())
    y = x = torch.randn(2**12, device=HERE, requires_grad=True)
    for _ in range(20):
        y = layer(y)
    torch.accelerator.synchronize(HERE)
    torch.accelerator.reset_peak_memory_stats(HERE)
    before = torch.accelerator.memory_allocated(HERE)

    torch.autograd.grad(y.sum(), x)

    most = torch.accelerator.max_memory_allocated(HERE) - before
    assert most <= 7 * x.nbytes


def test_what_was_sent_for_in_vain_is_dropped():
    """At the end of the run, which is on the thread that autograd has for the device."""
    layer = remat(lambda x: x.sin().exp(), saved_inputs=Offload(prefetch=3))
    x = torch.randn(2**12, device=HERE, requires_grad=True)
    outputs = [x]
    for _ in range(6):
        outputs.append(layer(outputs[-1]))

    def held_bytes() -> int:
        torch.accelerator.synchronize(HERE)
        return torch.accelerator.memory_allocated(HERE)

    before = held_bytes()
    (gradient,) = torch.autograd.grad(outputs[-1].sum(), outputs[-2], retain_graph=True)

    assert held_bytes() - before == gradient.nbytes


OPERATORS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, w: x @ w,
    lambda x, w: x.sin(),
    lambda x, w: x.tanh() + x,
    lambda x, w: (x * x).softmax(-1),
    lambda x, w: x.exp().clamp(max=3.0),
]
# And how many regions ahead a value comes back, None if it never leaves.
STORAGES: list[tuple[Any, int | None]] = [
    (Offload(), 1),
    (Offload(prefetch=3), 3),
    (Offload(prefetch=0), 0),
    (Cast(torch.bfloat16) >> Offload(), 1),
    (Quantize(8) >> Offload(prefetch=2), 2),
    (Keep(), None),
    (None, None),
]


class Layer(NamedTuple):
    """A region, and how many regions ahead its values come back at the most."""

    region: Callable[[Tensor, Tensor], Tensor]
    num_ahead: int


def layers_of(seed: int) -> list[Layer]:
    """Regions in a row, each of a few operators, whose values wait in some storage."""
    choose = random.Random(seed)

    def layer() -> Layer:
        ops = choose.choices(OPERATORS, k=choose.randint(1, 3))

        def run(x: Tensor, w: Tensor) -> Tensor:
            for op in ops:
                x = checkpoint_name(op(x, w), "h")
            return x

        policy = policies.save_only_these_names("h")
        (saved, *ahead), (stored, *also) = choose.choices(STORAGES, k=2)
        region = remat(
            run,
            saved_inputs=None if saved is None else {"x": saved},
            policy=None if stored is None else policy.stored(stored),
        )
        return Layer(region, max(each or 0 for each in [*ahead, *also]))

    return [layer() for _ in range(choose.randint(2, 4))]


def stepped(
    layers: list[Layer], leaves: list[Tensor], sent: Callable[[], int]
) -> tuple[list[Tensor], list[int]]:
    """The result and the gradients; what each layer has sent to the host."""
    y, w = leaves
    counts = [sent()]
    for layer in layers:
        y = layer.region(y, w)
        counts.append(sent())
    grads = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
    found = [y.detach(), *(each for each in grads if each is not None)]
    return found, [after - before for before, after in itertools.pairwise(counts)]


def most_under_way(layers: list[Layer], sent: list[int]) -> int:
    """Of the values of the layer whose backward runs, and of those that may be sent for."""
    away = [
        (each.num_ahead, num) for each, num in zip(layers, sent, strict=True) if num
    ]
    return max(
        (
            num + sum(n for k, (ahead, n) in enumerate(away[:at]) if at - k <= ahead)
            for at, (_, num) in enumerate(away)
        ),
        default=0,
    )


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.parametrize(
    "seeds", daily({f"{n}": range(n, n + 20) for n in range(0, 1000, 20)}, ["0"])
)
def test_random_programs_have_the_numbers_of_the_cpu(seeds: Any, device_counts: Any):
    """Whatever waits where: nothing is read before it is there, and the host never waits."""
    for seed in seeds:
        layers = layers_of(seed)
        torch.manual_seed(seed)
        given = torch.randn(4, 4, device="cpu"), torch.randn(4, 4, device="cpu")
        with torch.device("cpu"):
            expected, _ = stepped(
                layers, [each.clone().requires_grad_() for each in given], lambda: 0
            )
        leaves = [each.to(HERE).requires_grad_() for each in given]
        stepped(layers, leaves, lambda: 0)  # traces
        torch.accelerator.synchronize(HERE)
        device_counts.forget()

        found, sent = stepped(
            layers, leaves, lambda: device_counts.of("copies_to_host")
        )

        back, at_once, waits = device_counts.of(
            "copies_to_device", "most_copies_to_device_at_once", "synchronizations"
        )
        assert back == sum(sent)
        assert at_once <= most_under_way(layers, sent)
        assert waits == 0
        assert_bitwise([each.cpu() for each in found], expected)
        assert device_counts.of("unordered_accesses", "early_frees") == (0, 0)
