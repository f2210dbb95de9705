"""`interop.torch`: the names beside `checkpoint` that torch's module exports.

The oracle is that module: what a helper returns there, it returns here.
"""

import ast
import pathlib
import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as peer
from torch._subclasses.fake_tensor import FakeTensorMode

import remat
import remat.interop.torch as ours
from remat import RecomputationError, RematWarning
from tests.support import FakeDevice, assert_bitwise, seeded

pytestmark = pytest.mark.contract


def test_each_name_of_torch_is_here() -> None:
    """But for a set that torch's own contexts read."""
    missing = {*peer.__all__} - {*ours.__all__}

    assert missing == {"SAC_IGNORED_OPS"}


def test_nothing_of_torchs_module_is_used() -> None:
    """No module of the package imports it."""
    folder = pathlib.Path(remat.__file__).parent
    found = [
        name
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            *(alias.name for alias in node.names),
            getattr(node, "module", None) or "",
        )
    ]

    assert found
    assert not [name for name in found if name.startswith("torch.utils.checkpoint")]


def gradient(module: Any) -> torch.Tensor:
    x = seeded(3).requires_grad_()
    module.checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m: m.set_checkpoint_early_stop(False), 'engine="rerun"'),
        (lambda m: m.set_checkpoint_debug_enabled(True), r"remat\(verify=True\)"),
        (lambda m: m.GraphExecGroup(), "one node of the graph"),
    ],
    ids=["early_stop", "debug", "group"],
)
def test_a_switch_without_effect_warns(make: Any, text: str) -> None:
    """And what is called inside it runs as it does without."""
    with make(peer):
        expected = gradient(peer)

    with pytest.warns(RematWarning, match=f"has no effect.*{text}") as seen:  # noqa: SIM117
        with make(ours):
            found = gradient(ours)

    assert_bitwise(found, expected)
    assert [each.filename for each in seen] == [__file__]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ours.set_checkpoint_early_stop(True),
        lambda: ours.set_checkpoint_debug_enabled(False),
        lambda: ours.set_checkpoint_debug_enabled(None),
    ],
    ids=["early_stop", "debug_off", "debug_left"],
)
def test_a_switch_for_what_happens_anyway_is_silent(make: Any) -> None:
    with warnings.catch_warnings(action="error"), make():
        gradient(ours)


def test_what_differs_is_caught_as_torchs_error() -> None:
    """Code that catches torch's error catches this package's."""
    assert ours.CheckpointError is RecomputationError
    assert issubclass(ours.CheckpointError, RuntimeError)


def test_the_function_of_the_reentrant_variant() -> None:
    """`apply` takes what torch's takes."""

    def through(module: Any) -> Any:
        x, y = seeded(3).requires_grad_(), seeded(3, seed=1).requires_grad_()
        out = module.CheckpointFunction.apply(lambda x, y: (x * y).sin(), True, x, y)
        return out.detach(), torch.autograd.grad(out.sum(), [x, y])

    def plain() -> Any:
        x, y = seeded(3).requires_grad_(), seeded(3, seed=1).requires_grad_()
        out = (x * y).sin()
        return out.detach(), torch.autograd.grad(out.sum(), [x, y])

    assert_bitwise(through(ours), plain())


def test_detached_variables() -> None:
    """The same leaves as torch's, of the same memory."""
    x = seeded(3).requires_grad_()
    given = (x * 2, x.detach(), "text", None)
    found, expected = ours.detach_variable(given), peer.detach_variable(given)

    assert_bitwise(found, expected)
    for mine, theirs, own in zip(found[:2], expected[:2], given[:2], strict=True):
        assert mine.is_leaf
        assert mine.requires_grad == theirs.requires_grad
        assert mine.data_ptr() == own.data_ptr()
    with pytest.raises(TypeError, match=r"takes a tuple.*got a list.*\(x,\)"):
        ours.detach_variable([x])  # pyright: ignore[reportArgumentType]


def test_inputs_without_a_gradient_warn() -> None:
    """As torch does, and only where it does."""
    x = seeded(3)
    with pytest.warns(RematWarning, match="no tensor that requires grad"):
        ours.check_backward_validity([x, 3])

    ours.check_backward_validity([x, x.clone().requires_grad_()])


def test_states_of_devices(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_utils.py, `test_get_device_states_recursive`: in a pytree, and put back."""
    monkeypatch.setattr(ours.DefaultDeviceType, "_chosen", None)
    ours.DefaultDeviceType.set_device_type("cuda")
    before = torch.arange(16, dtype=torch.uint8)
    fake_device.set_rng_state(before, torch.device("cuda", 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, device="cuda")
    devices, states = ours.get_device_states({"x": [x, seeded(2)]}, 3, x)
    fake_device.set_rng_state(torch.zeros_like(before), torch.device("cuda", 0))

    ours.set_device_states(devices, states)

    assert devices == [0, 0]
    assert_bitwise(fake_device.get_rng_state(torch.device("cuda", 0)), before)
    assert ours.DefaultDeviceType.get_device_type() == "cuda"


def test_states_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are none, and what is set can be set."""
    monkeypatch.setattr(ours.DefaultDeviceType, "_chosen", None)
    before = torch.get_rng_state()

    assert ours.get_device_states(seeded(2)) == peer.get_device_states(seeded(2))
    ours.set_device_states([0], [before], device_type="cpu")
    assert_bitwise(torch.get_rng_state(), before)
    if not torch.accelerator.is_available():
        assert ours.DefaultDeviceType.get_device_type() == "cpu"


def test_two_kinds_of_devices_are_told_apart_by_nobody() -> None:
    """torch warns, and leaves one kind out."""
    with FakeTensorMode():
        tensors = [torch.empty(2, device=kind) for kind in ("cuda", "xpu")]

    with pytest.raises(ValueError, match=r"kinds cuda, xpu.*Call it for each kind"):
        ours.get_device_states(*tensors)
