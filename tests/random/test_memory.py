"""What a draw holds beside its result: pieces of a fixed size."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import fit, plan, random, remat
from remat.random import _native, _ops, _portable
from remat.reporting import LiveBytes
from tests.support import in_turn

COUNT = 1 << 22
KEY = random.key(1)

#: Of each implementation the one that takes the most.
LARGEST = {"uniform", "integers 64", "bernoulli"}
# Kernels are called below their operators, where the mode sees what they do.
KERNELS: dict[str, tuple[Callable[[int], Tensor], int]] = {
    "uniform": (lambda n: _ops._uniform_op(KEY, [n], 0.0, 2.0, torch.float32), 1280),
    "uniform float64": (
        lambda n: _ops._uniform_op(KEY, [n], 0.0, 1.0, torch.float64),
        1025,
    ),
    "normal": (lambda n: _ops._normal_op(KEY, [n], 0.0, 1.0, torch.float32), 1152),
    "normal float16": (
        lambda n: _ops._normal_op(KEY, [n], 0.0, 1.0, torch.float16),
        1152,
    ),
    "integers": (lambda n: _ops._integers_op(KEY, [n], 0, 8, torch.int32), 1024),
    "integers 64": (lambda n: _ops._integers_op(KEY, [n], 0, 8, torch.int64), 1824),
    "bernoulli": (lambda n: _ops._mask_op(KEY, [n], 0.5, 1.0, torch.bool), 1536),
    "dropout": (lambda n: _ops._mask_op(KEY, [n], 0.5, 2.0, torch.float32), 1280),
}


def extra_kib(
    kernel: Callable[[int], Tensor],
    implementation: ModuleType,
    monkeypatch: Any,
    count: int = COUNT,
) -> tuple[float, float]:
    """The most that lived beside the result, and the result, in KiB."""
    monkeypatch.setattr(_ops, "_native_or_portable", lambda _: implementation)
    with LiveBytes() as live:
        drawn = kernel(count)
    size = drawn.untyped_storage().nbytes()
    return (live.peak_bytes - size) / 1024, size / 1024


@pytest.mark.parametrize(
    ("kernel", "known"),
    [
        pytest.param(*case, id=name, marks=() if name in LARGEST else pytest.mark.sweep)
        for name, case in KERNELS.items()
    ],
)
def test_without_torchs_kernels(
    kernel: Callable[[int], Tensor], known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About 1.5 MiB of workspace, whatever the size: at most twice the result here."""
    extra, size = extra_kib(kernel, _portable, monkeypatch)

    assert extra <= known + 1  # besides a few scalars
    assert size + extra <= 2 * size


@pytest.mark.parametrize(("name", "count"), in_turn(KERNELS, [1000, 5000, COUNT]))
def test_the_workspace_is_known_to_plans(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the peaks of plans add while a draw runs: never less, and at most half more."""
    kernel, _ = KERNELS[name]
    extra, _ = extra_kib(kernel, _portable, monkeypatch, count)
    drawn = kernel(1)

    known = _portable.workspace_bytes(1, count, drawn.dtype, drawn.device) / 1024

    assert extra <= known + 1
    assert known <= 1.5 * extra + 1


@pytest.mark.parametrize("each", [1, 3, 6])
def test_the_workspace_of_many_keys_is_known_to_plans(
    each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key begins with a block of its own, of which it may use one number."""
    monkeypatch.setattr(_ops, "_native_or_portable", lambda _: _portable)
    keys = random.split(KEY, 1000)
    with LiveBytes() as live:
        drawn = _ops._uniform_op(keys, [each], 0.0, 2.0, torch.float32)

    known = _portable.workspace_bytes(1000, each, drawn.dtype, drawn.device)

    extra = live.peak_bytes - drawn.nbytes
    assert extra <= known + 1024  # besides a few scalars
    assert known <= 1.5 * extra + 1024


@pytest.mark.parametrize("has_kernels", [False, True])
def test_a_plan_adds_it_while_the_draw_runs(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the numbers that are drawn, and to what else lives."""
    monkeypatch.setattr(_native, "has_kernels", lambda _: has_kernels)
    count = 1 << 14
    inside = 0 if has_kernels else 96 * count // 4 + 16

    def draw(x: Tensor) -> Tensor:
        return (x * random.uniform(KEY, (count,))).sum()

    region = remat(lambda x: x.sin().sum())
    x = torch.ones(count, requires_grad=True)

    found = plan(draw, budget=0)(x)
    of_step = fit(lambda x: region(x) + draw(x), peak="1GB")(x)

    assert found.peaks.forward == max(8 * count, 4 * count + inside)
    outside = of_step.predicted_peak_bytes - x.nbytes
    assert outside == max(12 * count + 8, 4 * count + 4 + inside)


@pytest.mark.contract
@pytest.mark.skipif(not _native.has_kernels("cpu"), reason="torch 2.15 has the kernels")
@pytest.mark.parametrize("name", KERNELS)
def test_with_torchs_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, or the piece of uniform numbers that a mask is made of."""
    extra, _ = extra_kib(KERNELS[name][0], _native, monkeypatch)

    assert extra <= (512 if name == "bernoulli" else 1)


@pytest.mark.contract
def test_a_dropout_holds_its_factor_once() -> None:
    """A plain call: result and factor; nothing of the draw remains."""
    x = torch.ones(COUNT)

    with LiveBytes() as live:
        found = random.dropout(KEY, x, 0.5)

    assert live.current_bytes == found.nbytes
    assert live.peak_bytes == 2 * found.nbytes
