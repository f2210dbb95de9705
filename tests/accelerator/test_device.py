"""The stand-in device: what is not ordered goes wrong, always, and what is ordered is right."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import accelerator
from tests.support import assert_bitwise

pytestmark = [pytest.mark.standin, pytest.mark.contract]

HERE = torch.device("privateuseone", 0)  # which torch calls "standin" once it is loaded
SIZE = 64


@pytest.fixture
def counted(device_counts: Any) -> Any:
    """What the device has counted since the test began; the test is to answer for it."""
    device_counts.forget()
    yield device_counts
    device_counts.forget()


def pinned(fill: float = 0.0) -> Tensor:
    return torch.full((SIZE,), fill, device="cpu").pin_memory()


def is_poisoned(tensor: Tensor) -> bool:
    return bool(tensor.cpu().isnan().all())


def test_a_copy_to_the_host_has_not_arrived_before_it_is_waited_for(counted):
    host = pinned()
    host.copy_(torch.ones(SIZE, device=HERE), non_blocking=True)

    assert is_poisoned(host)
    torch.accelerator.synchronize(HERE)
    assert_bitwise(host, torch.ones(SIZE, device="cpu"))
    assert counted.of("synchronizations", "unordered_accesses") == (1, 0)


def test_other_memory_of_the_host_is_waited_for(counted):
    host = torch.zeros(SIZE, device="cpu")
    host.copy_(torch.ones(SIZE, device=HERE), non_blocking=True)

    assert_bitwise(host, torch.ones(SIZE, device="cpu"))
    assert counted.of("synchronizations") == 1


def test_a_copy_to_the_device_reads_what_is_there_when_it_runs():
    host = pinned(1.0)
    here = host.to(HERE, non_blocking=True)
    host.fill_(2.0)

    assert_bitwise(here.cpu(), torch.full((SIZE,), 2.0, device="cpu"))


@pytest.mark.parametrize("waits", ["stream", "event", "early event", "synchronize", ""])
def test_a_copy_on_another_stream_is_read_when_it_is_waited_for(waits: str, counted):
    side, host = torch.Stream(HERE), pinned(1.0)
    current = torch.accelerator.current_stream()
    with side:
        event = side.record_event() if waits == "early event" else None
        here = host.to(HERE, non_blocking=True)
        event = side.record_event() if event is None else event
    assert counted.of("synchronizations") == 0
    if waits == "stream":
        current.wait_stream(side)
    elif waits.endswith("event"):
        current.wait_event(event)
    elif waits == "synchronize":
        side.synchronize()
    here.record_stream(current)

    doubled = here + here

    is_ordered = waits not in ("", "early event")
    assert is_poisoned(doubled) != is_ordered
    assert counted.of("unordered_accesses", "early_frees") == (not is_ordered, 0)


def test_a_kernels_result_is_read_when_it_is_waited_for(counted):
    side = torch.Stream(HERE)
    value = torch.ones(SIZE, device=HERE)
    host = pinned()
    with side:
        host.copy_(value, non_blocking=True)
        side.synchronize()
    assert is_poisoned(host)
    assert counted.of("unordered_accesses") == 1

    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(value, non_blocking=True)
        side.synchronize()
    assert_bitwise(host, torch.ones(SIZE, device="cpu"))


def test_memory_is_not_written_under_a_reader(counted):
    """A write that nothing orders after the last read is as wrong as a read would be."""
    side, value = torch.Stream(HERE), torch.ones(SIZE, device=HERE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        _ = value + 1
    value.zero_()

    assert is_poisoned(value)
    assert counted.of("unordered_accesses") == 1


@pytest.mark.parametrize("tells", [True, False])
def test_memory_that_is_freed_under_a_reader_is_used_again(tells: bool, counted):
    side, value, host = torch.Stream(HERE), torch.ones(SIZE, device=HERE), pinned()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(value, non_blocking=True)
    if tells:
        value.record_stream(side)
    del value
    gc.collect()
    side.synchronize()

    assert is_poisoned(host) != tells
    assert counted.of("early_frees") == (not tells)


def test_memory_of_a_stream_is_its_own_first(counted):
    """What a stream allocates may be what it has just freed: others must wait for it."""
    value = torch.empty(SIZE, device=HERE).fill_(1)
    side = torch.Stream(HERE)
    with side:
        value.fill_(2)
    assert counted.of("unordered_accesses") == 1
    assert is_poisoned(value)


def test_reading_a_number_waits(counted):
    value = torch.ones(3, device=HERE)
    for read in (Tensor.item, bool, float):
        read(value.sum())
    value.nonzero()
    assert torch.equal(value, value)
    value.cpu()

    assert counted.of("synchronizations", "copies_to_host") == (6, 4)


def test_bytes_are_counted_until_the_last_reader_has_read():
    torch.accelerator.synchronize(HERE)
    before = torch.accelerator.memory_allocated(HERE)
    value, host = torch.ones(SIZE, device=HERE), pinned()
    host.copy_(value, non_blocking=True)
    del value
    assert torch.accelerator.memory_allocated(HERE) - before == 4 * SIZE
    torch.accelerator.synchronize(HERE)
    assert torch.accelerator.memory_allocated(HERE) == before


def test_two_devices():
    there = torch.device("privateuseone", 1)
    value = torch.ones(SIZE, device=there)
    assert value.to(HERE).device == HERE
    assert_bitwise(value.to(HERE).cpu(), torch.ones(SIZE, device="cpu"))
    with pytest.raises(RuntimeError, match="on the same device"):
        value.add(torch.ones(SIZE, device=HERE))
    with pytest.raises(RuntimeError, match="on the same device"):
        value.add(torch.ones(SIZE, device="cpu"))


@pytest.mark.parametrize("index", [0, 1])
def test_generators(index: int):
    """Each device's own; with a state of 16 bytes, which repeats what was drawn."""
    device = torch.device("privateuseone", index)
    module = torch.get_device_module(device)
    state = module.get_rng_state(device)
    host = torch.get_rng_state()
    drawn = [torch.rand(5, device=device), F.dropout(torch.ones(50, device=device))]
    assert state.nbytes == 16
    assert not torch.equal(state, module.get_rng_state(device))
    module.set_rng_state(state, device)
    again = [torch.rand(5, device=device), F.dropout(torch.ones(50, device=device))]
    assert_bitwise(again, drawn)
    assert_bitwise(torch.get_rng_state(), host)

    own = torch.Generator(device).manual_seed(3)
    assert own.device == device
    first = torch.rand(5, device=device, generator=own)
    assert not torch.equal(first, torch.rand(5, device=device, generator=own))
    assert_bitwise(torch.rand(5, device=device, generator=own.manual_seed(3)), first)


def test_autocast():
    x = torch.ones(3, 3, device=HERE)
    with torch.autocast("standin", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        assert (x @ x).exp().dtype is torch.float32


def attention(x: Tensor) -> Tensor:
    """Composed of other operators: that is what torch has for a new device."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


FUNCTIONS: dict[str, Any] = {
    "matmul": lambda x: x @ x.mT,
    "attention": attention,
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "views": lambda x: x.mT.reshape(-1, 4)[1:].as_strided((2, 2), (1, 2)),
    "in place": lambda x: x.clone().mul_(2).add_(x)[:, 1].sigmoid_(),
    "indices": lambda x: x[:, torch.tensor([0, 2], device="cpu"), 1:],
    "put": lambda x: x.clone().index_put((torch.arange(2, device=x.device),), x[:2]),
    "resized": lambda x: torch.cat([x, x], out=torch.empty(0, device=x.device)).sum(),
    "sort": lambda x: x.sort(-1).values,
    "convolution": lambda x: F.conv1d(x, x[:2, :, :2].contiguous()),
    "foreach": lambda x: torch.ops.aten._foreach_mul.ScalarList([x, x], [2.0, 3.0])[1],
    "complex": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)).conj().abs(),
    "factories": lambda x: (
        x + torch.arange(4.0, device=x.device) + torch.eye(3, 4).to(x)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_have_the_numbers_of_the_cpu(name: str):
    function = FUNCTIONS[name]
    x = torch.randn(2, 3, 4, device="cpu")
    here = x.to(HERE).requires_grad_(name != "resized")
    there = x.clone().requires_grad_(name != "resized")
    with torch.device("cpu"):
        expected = function(there)
    found = function(here)

    assert found.device == HERE
    assert_bitwise(found.detach().cpu(), expected.detach())
    if found.requires_grad:
        (grad,) = torch.autograd.grad(found.sum(), here)
        assert_bitwise(grad.cpu(), torch.autograd.grad(expected.sum(), there)[0])


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch):
    assert accelerator.missing() is None
    monkeypatch.setenv("PATH", "")
    assert "needs" in str(accelerator.missing())
