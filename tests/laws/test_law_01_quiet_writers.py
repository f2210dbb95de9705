"""Law 1, same numbers: kernels that write running statistics, and whose schemas do not say so.

Those of cuDNN, of MIOpen and of nn.SyncBatchNorm stand on a CPU here, upon its own kernels.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import policies, remat
from tests.laws.derivatives import second, slope
from tests.support import assert_bitwise, assert_close, seeded

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")

aten: Any = torch.ops.aten


def _norm(*args: Any) -> tuple[Tensor, ...]:
    return torch.native_batch_norm(*args)


def _norm_and_reserve(*args: Any) -> tuple[Tensor, ...]:
    return *_norm(*args), args[0].new_empty(0, dtype=torch.uint8)


def _norm_backward(x: Tensor, out_grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weight, mean, var, saved_mean, saved_var, eps, *_ = rest
    saved, every = (saved_mean, saved_var), [True] * 3
    args = (out_grad, x, weight, mean, var, *saved, True, eps, every)
    return aten.native_batch_norm_backward(*args)


def _gather(x: Tensor, mean: Tensor, invstd: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    running_mean, running_var, momentum, eps, _ = rest
    mean, var = mean.mean(0), (invstd.pow(-2) - eps).mean(0)
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(var, momentum)
    return mean, (var + eps).rsqrt()


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    api: Any = torch.library
    with api._scoped_library("aten", "IMPL") as library:
        for name, kernel in {
            "cudnn_batch_norm": _norm_and_reserve,
            "cudnn_batch_norm_backward": _norm_backward,
            "miopen_batch_norm": _norm,
            "miopen_batch_norm_backward": _norm_backward,
            "batch_norm_gather_stats": _gather,
            "batch_norm_gather_stats_with_counts": _gather,
        }.items():
            library.impl(name, kernel, "CPU")
        yield


def after(
    op: Any, wrap: Callable[..., Any], derive: Callable[..., Any], *, is_training: bool
) -> tuple[Any, ...]:
    """What a derivative gives, and the statistics that its step leaves."""
    mean, var = torch.zeros(3).double(), torch.ones(3).double()
    w, b = seeded(3, seed=1), seeded(3, seed=2)

    def fun(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return op(x.sin(), w, b, mean, var, is_training, 0.1, 1e-5)[0].sin()

    region = wrap(fun)
    return derive(lambda x: region(x, mean, var))(seeded(5, 3, 4)), mean, var


def backward(fun: Callable[..., Any]) -> Callable[[Tensor], Any]:
    """Plain autograd."""

    def run(x: Tensor) -> Any:
        x.requires_grad_()
        return torch.autograd.grad(fun(x).sin().sum(), x)

    return run


def itself(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Without remat."""
    return fun


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    ("engine", "derive"),
    [("trace", backward), ("trace", second), ("trace", slope), ("rerun", backward)],
)
@pytest.mark.parametrize("op", [aten.cudnn_batch_norm, aten.miopen_batch_norm], ids=str)
def test_statistics_are_written_once(
    op: Any, engine: Any, is_training: bool, derive: Callable[..., Any]
) -> None:
    """By a step that runs the kernel twice."""

    def region(fun: Callable[..., Any]) -> Callable[..., Any]:
        return remat(fun, engine=engine)

    found, expected = (
        after(op, wrap, derive, is_training=is_training) for wrap in (region, itself)
    )

    check = assert_bitwise if derive is backward else assert_close
    check(found, expected)


def test_what_is_saved_is_not_the_statistics() -> None:
    """All of it is saved, and they are written once all the same."""

    def region(fun: Callable[..., Any]) -> Callable[..., Any]:
        return remat(fun, policy=policies.everything_saveable)

    found, expected = (
        after(aten.cudnn_batch_norm, wrap, backward, is_training=True)
        for wrap in (region, itself)
    )

    assert_bitwise(found, expected)


@pytest.mark.parametrize(
    "op",
    [aten.batch_norm_gather_stats, aten.batch_norm_gather_stats_with_counts],
    ids=str,
)
def test_statistics_of_several_ranks(op: Any) -> None:
    """Which have no derivative."""

    def fun(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        means, invstds = x.detach().mean(2), x.detach().var(2).rsqrt()
        is_counted = op is not aten.batch_norm_gather_stats
        count = x.new_ones(2) if is_counted else 2
        found = op(x.detach(), means, invstds, mean, var, 0.1, 1e-5, count)
        return (x.sin() - found[0].view(-1, 1)) * found[1].view(-1, 1)

    def run(wrap: Callable[..., Any]) -> Any:
        mean, var = torch.zeros(3).double(), torch.ones(3).double()
        return backward(lambda x: wrap(fun)(x, mean, var))(seeded(2, 3, 4)), mean, var

    assert_bitwise(run(remat), run(itself))
