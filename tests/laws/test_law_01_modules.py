"""Law 1, same numbers: modules with buffers, statistics and kernels that ask for modes.

"Without lossy storage, the outputs of one call, and the contributions it makes to
gradients given its cotangents, are bitwise those of `fun` under `.backward()` on a CPU."
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import remat
from tests.laws.derivatives import second, slope, step
from tests.support import assert_bitwise, assert_close, grads, seeded

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout_of_a_transposed_value": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True),
        (2, 5, 16),
    ),
    "a_kernel_that_asks_for_grad_mode": (
        lambda: nn.LSTM(4, 6, batch_first=True),
        (2, 5, 4),
    ),
    "buffers_and_in_place_activations": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Flatten()
        ),
        (2, 3, 7),
    ),
}


@pytest.mark.contract
@pytest.mark.parametrize(("make", "shape"), MODULES.values(), ids=MODULES)
def test_a_module_trains_alike(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """Outputs, gradients and buffers to the last bit."""
    torch.manual_seed(1)
    plain = make()
    other = copy.deepcopy(plain)
    x = torch.randn(shape)

    assert_bitwise(step(other, remat(other), x), step(plain, plain, x))


@pytest.mark.contract
@pytest.mark.parametrize("derive", [second, slope])
def test_statistics_from_outside_of_a_transform(derive: Callable[..., Any]) -> None:
    """Running statistics that no transform has wrapped are written, and once."""
    x = seeded(5, 3)

    def after(wrap: Callable[..., Any]) -> tuple[Any, ...]:
        mean, var = torch.zeros(3).double(), torch.ones(3).double()
        norm = wrap(lambda x, m, v: F.batch_norm(x, m, v, training=True))
        return derive(lambda x: norm(x, mean, var))(x), mean, var

    def itself(fun: Callable[..., Any]) -> Callable[..., Any]:
        return fun

    assert_close(after(remat), after(itself))


@pytest.mark.contract
def test_one_batch_norm_twice() -> None:
    """Its running statistics are written by both calls, the second upon the first."""
    norms = [nn.BatchNorm1d(2, dtype=torch.float64) for _ in range(2)]
    x = seeded(3, 2).requires_grad_()
    remat(lambda x: norms[0](norms[0](x)), rng="preserve")(x).sum().backward()
    norms[1](norms[1](x.detach()))

    assert_bitwise(dict(norms[0].named_buffers()), dict(norms[1].named_buffers()))


@pytest.mark.contract
@pytest.mark.parametrize("is_outer_region", [False, True])
def test_a_batch_norm_in_and_outside_of_a_region(is_outer_region: bool) -> None:
    """Statistics are written as torch's kernel writes them: who saved them does not mind."""

    def gradient(inner: Callable[..., Any], outer: Callable[..., Any]) -> Tensor:
        norm = nn.BatchNorm1d(3, dtype=torch.float64)
        again = inner(lambda x: norm(x), rng="preserve")
        x = seeded(2, 3).requires_grad_()
        whole = outer(lambda x: again(norm(x)).sin(), rng="preserve")
        return torch.autograd.grad(whole(x).sum(), x)[0]

    def plain(fun: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return fun

    outer = remat if is_outer_region else plain

    assert_bitwise(gradient(remat, outer), gradient(plain, plain))


@pytest.mark.contract
@pytest.mark.parametrize("is_training", [True, False])
def test_a_batch_norm_of_channels_that_come_last(is_training: bool) -> None:
    """The kernel lays its output out anew, and views that follow rely on it."""
    norm = nn.BatchNorm1d(3, dtype=torch.float64).train(is_training)
    linear = nn.Linear(3, 2, dtype=torch.float64)

    def fun(x: Tensor) -> Tensor:
        return linear(norm(x.transpose(1, 2)).transpose(1, 2))

    x = seeded(4, 5, 3)
    assert_bitwise(grads(remat(fun), (x,)), grads(fun, (x,)))
