"""Offloading from an accelerator: what runs after what, what is reused, what comes when.

A stand-in for the accelerator's streams keeps vector clocks (L. Lamport, "Time, Clocks, and
the Ordering of Events in a Distributed System", 1978; C. Fidge and F. Mattern, 1988): what
it cannot do is to overlap. Tests marked `gpu` do that.
"""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import pytest
import torch
from torch import Tensor

from remat import RematWarning, remat
from remat._regions.prefetch import _thread
from remat.storage import (
    AbstractStorage,
    Cast,
    Offload,
    Place,
    Quantize,
    Restoration,
    Stored,
    release_host_memory,
)
from remat.storage._stored import first_part
from remat.storage._transfer import Fetch, Lane, Pool, lane_of
from tests.support import assert_bitwise

pytestmark = pytest.mark.contract

Clock = dict[str, int]


class FakeStream:
    """Knows what has happened before what it does next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {name: 0}

    def wait_event(self, event: Clock) -> None:
        names = {*self.clock, *event}
        self.clock = {
            name: max(self.clock.get(name, 0), event.get(name, 0)) for name in names
        }

    def wait_stream(self, other: "FakeStream") -> None:
        self.wait_event(other.clock)

    def record_event(self) -> Clock:
        return dict(self.clock)

    def do(self) -> None:
        self.clock = {**self.clock, self.name: self.clock[self.name] + 1}

    def has_seen(self, other: "FakeStream") -> bool:
        return self.clock.get(other.name, 0) == other.clock[other.name]

    def synchronize(self) -> None:
        self.clock["synchronized"] = self.clock.get("synchronized", 0) + 1


class FakeDriver:
    """What `Driver` offers, without a device behind it."""

    def __init__(self) -> None:
        self.compute = FakeStream("compute")
        self.streams: list[FakeStream] = []
        self.used: list[str] = []

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream(f"side {len(self.streams)}"))
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return self.compute

    @contextlib.contextmanager
    def running_on(self, stream: FakeStream) -> Iterator[None]:
        stream.do()
        yield

    def is_used_on(self, tensor: Tensor, stream: FakeStream) -> None:
        self.used.append(stream.name)


def on_the_host(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def free_bytes(pool: Pool) -> int:
    """The bytes of the buffers in which nothing waits."""
    pool._take_back()
    return sum(buffer.memory.nbytes for buffer in pool._free)


class Fake:
    """A lane from the tests' device to the CPU, and what tells of it."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.pool = Pool(on_the_host)
        self.lane = Lane(self.driver, torch.get_default_device(), self.pool)
        self.compute = self.driver.compute
        self.there, self.back = self.driver.streams
        self.fetched: list[int] = []

    def note_what_is_fetched(self) -> "Fake":
        """Has `fetched` tell it, by the first number of each value."""
        honest = self.lane.fetch

        def fetch(parts: Sequence[Tensor]) -> Any:
            self.fetched += [int(part.flatten()[0]) for part in parts]
            return honest(parts)

        self.lane.fetch = fetch
        return self


@final
@dataclass(frozen=True)
class Side(AbstractStorage):
    """What `Offload` does with a value of an accelerator, along a fake lane."""

    fake: Fake
    prefetch: int = 1
    is_exact: ClassVar[bool] = True

    def store(self, value: Tensor, place: Place | None = None) -> Stored:
        lane = self.fake.lane
        fetch = Fetch(lane, self.prefetch)
        return Stored((lane.send(value),), first_part, fetch, lane.settle)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 5)])
def test_values_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """As often as they are asked for."""
    fake = Fake()
    value = torch.randint(0, 9, shape).to(dtype)
    stored = Side(fake).store(value)

    (waiting,) = stored.tensors
    assert waiting.data_ptr() != value.data_ptr()
    for _ in range(2):
        assert torch.equal(stored.restore(), value)


def test_no_copy_reads_what_is_not_written() -> None:
    """There after the compute, back after there, the compute after back."""
    fake = Fake()
    fake.compute.do()
    host = fake.lane.send(torch.ones(3))
    assert fake.there.has_seen(fake.compute)
    assert not fake.compute.has_seen(fake.there)
    fake.compute.do()
    end = fake.lane.fetch([host])
    assert fake.back.has_seen(fake.there)
    # Neither direction holds up the other, nor the compute, which goes on meanwhile.
    assert not fake.compute.has_seen(fake.back)
    assert not fake.back.has_seen(fake.compute)

    end()

    assert fake.compute.has_seen(fake.back)
    assert fake.driver.used == [fake.there.name, "compute"]


def test_a_buffer_is_written_again_when_it_has_been_read() -> None:
    """By the copy back, though not necessarily by what was sent for since."""
    fake = Fake()
    host = fake.lane.send(torch.ones(3))
    fake.lane.fetch([host])
    read = fake.back.record_event()
    other = fake.lane.send(torch.ones(50))
    assert not fake.there.has_seen(fake.back)
    del host
    fake.lane.fetch([other])

    fake.lane.send(torch.ones(3))

    assert fake.there.clock[fake.back.name] == read[fake.back.name]
    assert fake.pool.num_made == 2


def test_what_another_storage_reads_is_there() -> None:
    """The host waits, once, before the next link of a chain reads."""
    fake = Fake()
    value = torch.randn(64)

    alone = Side(fake).store(value)
    assert "synchronized" not in fake.there.clock
    stored = (Side(fake) >> Quantize(8) >> Cast(torch.bfloat16)).store(value)

    assert fake.there.clock["synchronized"] == 1
    assert fake.pool.size_bytes - free_bytes(fake.pool) == value.nbytes  # of `alone`
    torch.testing.assert_close(stored.restore(), value, atol=0.05, rtol=0.0)
    assert torch.equal(alone.restore(), value)


def test_a_pool_is_used_again_in_each_step() -> None:
    """No step but the first makes buffers."""
    fake = Fake()
    layers = [remat(curve, saved_inputs=Side(fake)) for _ in range(4)]

    made: list[int] = []
    for _ in range(3):
        x = torch.randn(6, requires_grad=True)
        y = x
        for layer in layers:
            y = layer(y)
        assert fake.pool.size_bytes - free_bytes(fake.pool) == 4 * x.nbytes
        y.sum().backward()
        del y
        gc.collect()
        assert free_bytes(fake.pool) == fake.pool.size_bytes
        made.append(fake.pool.num_made)

    assert made == [4, 4, 4]


def test_a_pool_holds_no_more_than_was_in_use_at_one_time() -> None:
    """Steps of other sizes replace buffers; near sizes share them."""
    pool = Pool(on_the_host)
    held = [pool.lease(100), pool.lease(100)]
    held.clear()
    assert (pool.size_bytes, free_bytes(pool)) == (200, 200)

    near = pool.lease(80)
    assert near.buffer.memory.nbytes == 100
    assert pool.num_made == 2
    other = pool.lease(79)  # would waste more than a quarter
    assert other.buffer.memory.nbytes == 79
    assert pool.size_bytes == 179
    large = pool.lease(1000)
    assert pool.size_bytes == 1179
    del large, other, near
    pool.clear()
    assert (pool.size_bytes, free_bytes(pool), pool.num_made) == (0, 0, 4)


def curve(x: Tensor) -> Tensor:
    """Reads its input in the backward."""
    return x.sin().exp()


def numbered(x: Tensor, number: Tensor) -> Tensor:
    """Keeps a number by which what is sent for is told."""
    return (x * number).sin()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_values_are_on_their_way_so_many_regions_ahead(prefetch: int) -> None:
    """When the backward of one begins; never more are under way."""
    fake, depth = Fake().note_what_is_fetched(), 5
    layer = remat(numbered, saved_inputs={"number": Side(fake, prefetch)})
    log: list[tuple[int, list[int], int]] = []
    x = torch.ones(3, requires_grad=True)
    y = x
    for index in range(depth):
        y = layer(y, torch.tensor([float(index)]))
        # Runs before the backward of the next region, and after that of the last one.
        y.register_hook(
            lambda _, index=index: log.append(
                (index, [*fake.fetched], len(_thread.flights))
            )
        )
    y.sum().backward()

    fetched = {index: numbers for index, numbers, _ in log}
    for index in range(depth - 1):
        # The one above has read its own, and sent for those that follow.
        lowest = max(index + 1 - prefetch, 0)
        assert fetched[index] == list(range(depth - 1, lowest - 1, -1))
    assert max(flights for _, _, flights in log) == min(prefetch, depth - 1)
    assert sorted(fake.fetched) == list(range(depth))
    assert not _thread.flights


def test_storages_that_look_less_far_ahead_hold_up_the_others() -> None:
    """What is gathered from other ranks goes one region ahead, whatever else there is."""
    fake, near = Fake(), Fake()
    storages = {"number": Side(fake, 4), "x": Side(near, 1)}
    layer = remat(numbered, saved_inputs=storages)
    seen: list[int] = []
    y = x = torch.ones(1, requires_grad=True)
    for index in range(4):
        y = layer(y, torch.tensor([float(index)]))
        y.register_hook(lambda _: seen.append(len(_thread.flights)))
    y.sum().backward()

    assert seen == [0, 1, 1, 1]
    assert x.grad is not None


def test_an_error_drops_what_is_on_its_way() -> None:
    """And the next step is right."""
    fake = Fake()
    layer = remat(curve, saved_inputs=Side(fake, 3))
    x = torch.randn(4, requires_grad=True)

    def step(fails: bool) -> Tensor:
        y = layer(x)
        if fails:
            y.register_hook(lambda _: 1 / 0)
        return torch.autograd.grad(layer(layer(y)).sum(), x)[0]

    with pytest.raises(ZeroDivisionError):
        step(fails=True)
    found = step(fails=False)

    expected = torch.autograd.grad(curve(curve(curve(x))).sum(), x)
    assert_bitwise((found,), expected)
    assert not _thread.flights


class Counting:
    """Counts what is stored."""

    def __init__(self) -> None:
        self.stored: list[Tensor] = []


@final
@dataclass(frozen=True)
class Copies(AbstractStorage):
    """A storage that counts its copies."""

    counting: Counting
    is_exact: ClassVar[bool] = True

    def store(self, value: Tensor, place: Place | None = None) -> Stored:
        copy = value.resolve_conj().clone()
        self.counting.stored.append(copy)
        return Stored((copy,), first_part)


def test_views_of_the_same_numbers_are_moved_once() -> None:
    """Of any shape and order; other numbers of one storage are others."""
    counting = Counting()

    def mix(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
        return (a.sin() @ b.sin()).sin() * c.sin().sum() * d.sin().sum() * e.sin()

    region = remat(mix, saved_inputs=Copies(counting))
    x = torch.randn(3, 3, requires_grad=True)
    views = (x, x.T, x.view(9), x[1:], x)

    y = region(*views)

    assert [copy.numel() for copy in counting.stored] == [9, 6]
    found = torch.autograd.grad(y.sum(), x)
    assert_bitwise(found, torch.autograd.grad(mix(*views).sum(), x))


def test_a_conjugate_is_another_number() -> None:
    """Though its memory is the same."""
    counting = Counting()

    def mix(a: Tensor, b: Tensor) -> Tensor:
        return (a.sin() * b.cos()).real

    region = remat(mix, saved_inputs=Copies(counting))
    x = torch.randn(3, dtype=torch.complex64, requires_grad=True)

    found = torch.autograd.grad(region(x, x.conj()).sum(), x)

    assert len(counting.stored) == 2
    assert_bitwise(found, torch.autograd.grad(mix(x, x.conj()).sum(), x))


@pytest.mark.parametrize(
    ("device", "reason"),
    [("cpu", "files are read where"), ("meta", 'come back from "meta" when read')],
)
def test_prefetch_without_an_effect_warns_once(
    device: str, reason: str, tmp_path
) -> None:
    """For files, and between devices; the default says nothing."""
    path = str(tmp_path) if device == "cpu" else None
    far = Offload(device, path=path, prefetch=2)
    with pytest.warns(RematWarning, match=f"no use for prefetch=2: .*{reason}"):
        far.store(torch.ones(3))
    far.store(torch.ones(3), Place(call=1))
    Offload(device, path=path).store(torch.ones(3))


def test_lanes_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each device, and for memory that is page-locked or not."""
    monkeypatch.setattr("remat.storage._transfer._lanes", {})
    monkeypatch.setattr("remat.storage._transfer.Driver", lambda device: FakeDriver())
    home = torch.device("cuda", 0)
    lane = lane_of(home, False)
    host = lane.send(torch.ones(3))

    assert lane_of(home, False) is lane
    assert lane_of(home, True) is not lane
    release_host_memory()
    assert lane.pool.size_bytes == host.nbytes
    del host
    release_host_memory()
    assert lane.pool.size_bytes == 0


def test_fetches_of_one_lane_go_together() -> None:
    """One piece of work brings all values of a region."""
    fake = Fake()
    joint = Fetch(fake.lane, 1)
    assert joint == Fetch(fake.lane, 1)
    values = [torch.full((3,), float(number)) for number in range(3)]
    storeds = [Stored((fake.lane.send(value),), first_part, joint) for value in values]

    restored = Restoration(storeds).finish()

    assert all(map(torch.equal, restored, values))
    assert fake.back.clock[fake.back.name] == 1


def accelerator() -> torch.device:
    """The one that there is."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("pin", [True, False])
def test_gradients_through_host_memory(prefetch: int, pin: bool) -> None:
    """Bitwise those without, step after step in the same memory."""
    home = accelerator()
    weight = torch.randn(64, 64, device=home, requires_grad=True)
    storage = Offload(pin=pin, prefetch=prefetch)

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return x + (x @ weight).tanh()

    def step(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = x
        for _ in range(6):
            y = layer(y, weight)
        return torch.autograd.grad(y.square().sum(), (x, weight))

    pool = lane_of(home, pin).pool
    layer = remat(block, saved_inputs={"x": storage})
    made: list[int] = []
    for _ in range(3):
        x = torch.randn(512, 64, device=home, requires_grad=True)
        assert_bitwise(step(layer, x), step(remat(block), x))
        gc.collect()
        made.append(pool.num_made)
    assert made[0] == made[-1]


@pytest.mark.gpu
def test_values_leave_the_device() -> None:
    """Between forward and backward it holds the first input and the last output."""
    home, depth, size_bytes = accelerator(), 8, 4 * 2**20
    layer = remat(curve, saved_inputs=Offload())

    def held_bytes(layer: Any) -> int:
        x = torch.randn(2**20, device=home, requires_grad=True)
        before = torch.accelerator.memory_allocated(home)
        y = x
        for _ in range(depth):
            y = layer(y)
        torch.accelerator.synchronize(home)
        gc.collect()
        torch.empty(1, device=home)  # has the allocator see which copies have ended
        found = torch.accelerator.memory_allocated(home) - before
        y.sum().backward()
        return found

    assert held_bytes(layer) == size_bytes
    assert held_bytes(remat(curve)) == depth * size_bytes
