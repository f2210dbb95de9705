"""Faults of transfers and generators, each planted by one changed line, and a hunt for them.

On a real device each shows at bad luck alone. `judged` runs training steps that meet all of
them; on the stand-in it sees every fault, and on a CPU none.
"""

import functools
import gc
import inspect
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import remat
from remat._generators import device_states
from remat._rerun import state
from remat.storage import Offload, Place, Restoration, _transfer
from tests import accelerator
from tests.support import assert_bitwise


class Fault(NamedTuple):
    """Code of the package, and what stands there instead."""

    module: ModuleType
    owner: str  # the class or function that holds it
    line: str
    instead: str = "pass"


_COPY = "values = [part.to(self._device, non_blocking=True) for part in parts]"
_EVENT = "arrived = self._back.record_event()"
_sent = functools.partial(Fault, _transfer, "Lane")

FAULTS: dict[str, Fault] = {
    "the copy to the host does not wait for what computes the value": _sent(
        "self._there.wait_stream(self._driver.current_stream())"
    ),
    "the copy back does not wait for the copy to the host": _sent(
        "self._back.wait_stream(self._there)"
    ),
    "the backward does not wait for the copy back": _sent(
        "current.wait_event(arrived)"
    ),
    "the event is recorded before the copy": _sent(
        f"{_COPY}\n            {_EVENT}", f"{_EVENT}\n            {_COPY}"
    ),
    "the value is freed while it is copied to the host": _sent(
        "self._driver.is_used_on(value, self._there)"
    ),
    "the value that came back is freed while the backward reads it": _sent(
        "self._driver.is_used_on(value, current)"
    ),
    "a buffer is written while the copy back reads it": _sent(
        "self._there.wait_event(lease.buffer.is_read_until)"
    ),
    "the host reads a number of each value": _sent(
        "host.lease = lease", "host.lease = lease; value.sum().item()"
    ),
    "a redraw does not set the device's generator": Fault(
        device_states,
        "put",
        "_module(device.type).set_rng_state(state, device)",
    ),
    "a rerun does not put the device's generator back": Fault(
        state,
        "RunState",
        "self.devices = set(filter(device_states.has, devices))",
        'self.devices = {torch.device("cpu")}',
    ),
}


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes the line, for a test."""
    source = inspect.getsource(getattr(fault.module, fault.owner))
    assert source.count(fault.line) == 1, f"{fault.owner} has no line {fault.line!r}"
    source = source.replace(fault.line, fault.instead)
    scope = dict(vars(fault.module))
    exec(source, scope)
    honest, faulty = getattr(fault.module, fault.owner), scope[fault.owner]
    # In place: other modules have imported the class, or the function.
    if inspect.isfunction(honest):
        monkeypatch.setattr(honest, "__code__", faulty.__code__)
        return
    for name, method in vars(faulty).items():
        if inspect.isfunction(method):
            monkeypatch.setattr(vars(honest)[name], "__code__", method.__code__)


def block(x: Tensor, w: Tensor) -> Tensor:
    return x + F.dropout((x @ w).tanh(), 0.25).sin()


def judged(device: torch.device) -> None:
    """Raises what a test would if something is wrong: numbers, states, order, or waiting."""
    offloading = remat(block, saved_inputs={"x": Offload(prefetch=2)}, rng="preserve")
    again = remat(block, engine="rerun", rng="preserve")
    for layers in ([offloading] * 6, [again] * 3):
        _interrupted(layers, device)
        for _ in range(2):
            found, waits = _step(layers, device)
            expected, _ = _step([block] * len(layers), device)
            assert_bitwise(found, expected)
            assert waits == 0, "the host has waited for the device"
    _abandoned(device)
    if device.type == accelerator.NAME:
        assert accelerator.Counts().of("unordered_accesses", "early_frees") == (0, 0)


def _inputs(device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(8, 4, device="cpu"), torch.randn(4, 4, device="cpu")
    return x.to(device).requires_grad_(), w.to(device).requires_grad_()


def _run(layers: list[Any], x: Tensor, w: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, w)
    return x


def _step(layers: list[Any], device: torch.device) -> tuple[list[Tensor], int]:
    """The gradients, what is drawn afterwards, and how often the host has waited."""
    x, w = _inputs(device)
    before = _waits(device)
    found = torch.autograd.grad(_run(layers, x, w).sum(), (x, w))
    waits = _waits(device) - before
    return [*found, torch.rand(3, device=device)], waits


def _interrupted(layers: list[Any], device: torch.device) -> None:
    """A backward that fails while values come back: the next step uses the same buffers."""
    x, w = _inputs(device)
    middle = _run(layers[:-2], x, w)
    middle.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _run(layers[-2:], middle, w).sum().backward()
    del middle
    gc.collect()


def _abandoned(device: torch.device) -> None:
    """A value that is sent for and never read; the next one waits in the same buffer."""
    for fill in (1.0, 2.0):
        value = torch.full(
            (99,), fill, device=device
        )  # of a size that has no other buffer
        stored = Offload().store(value, Place(call=1))
        Restoration((stored,))
        del stored


def _waits(device: torch.device) -> int:
    if device.type != accelerator.NAME:
        return 0
    return accelerator.Counts().of("synchronizations")
