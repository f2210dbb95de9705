"""Trackers of an accelerator's generator, whose states a stand-in for the device has."""

import contextlib
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import random
from remat._generators import device_states, trackers
from remat._generators.streams import STATE, enter, leave
from remat._graph.meta import TensorMeta
from remat._tracing.trace import Request, trace
from tests.random.trackers import Tracker
from tests.support import FakeDevice, assert_bitwise

pytestmark = pytest.mark.contract


class OnDevice(Tracker):
    """The same with an accelerator's generator, whose states have 16 bytes."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device
        self.states_["tp"] = torch.full((16,), 5, dtype=torch.uint8, device="cpu")

    @contextlib.contextmanager
    def fork(self, name: str = "tp") -> Generator[None]:
        place = torch.device("cuda", 0)
        outside = self.device.get_rng_state(place)
        self.device.set_rng_state(self.states_[name], place)
        try:
            yield
        finally:
            self.states_[name] = self.device.get_rng_state(place)
            self.device.set_rng_state(outside, place)


def test_a_trace_on_a_device(fake_device: FakeDevice) -> None:
    """Draws on a device are told apart by that device's generator."""
    mine = OnDevice(fake_device)
    meta = TensorMeta((4,), (1,), torch.float32, torch.device("cuda", 0))

    def fun(operands: Any) -> list[Tensor]:
        x = F.dropout(torch.sin(operands[0]))
        with mine.fork():
            x = F.dropout(torch.sin(x))
        return [F.dropout(torch.sin(x))]

    with random.register_tracker(mine):
        joint = trace(Request(fun, (meta,), gradients=False)).joints[0]

    ops = [joint.graph.values[ref.index].op for ref in joint.states]
    streams = [value.stream[-3:] for value in joint.graph.values if value.state]
    assert ops == [device_states.STATE, STATE, device_states.STATE]
    assert streams == ["", "/tp", ""]
    assert_bitwise(
        mine.states_["tp"], torch.full((16,), 5, dtype=torch.uint8, device="cpu")
    )
    assert_bitwise(
        fake_device.states[0], torch.zeros(16, dtype=torch.uint8, device="cpu")
    )


def test_a_stream_on_a_device(fake_device: FakeDevice) -> None:
    """What a program does around a draw: the stream moves, the generator does not."""
    mine, place = OnDevice(fake_device), torch.device("cuda", 0)
    with random.register_tracker(mine):
        stream = f"{max(trackers.registered)}/tp"
        found = enter(stream, place)
        fake_device.states[0] += 2
        leave(stream, found, place)

    assert_bitwise(
        mine.states_["tp"], torch.full((16,), 7, dtype=torch.uint8, device="cpu")
    )
    assert_bitwise(
        fake_device.states[0], torch.zeros(16, dtype=torch.uint8, device="cpu")
    )
