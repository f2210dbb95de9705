"""Law 11, restores.

"Exceptions, in forward or backward, leave no mode, generator, collective or cache
changed. Threads may share a region."
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from remat import TraceError, checkpoint_name, policies, remat
from tests.random.trackers import generator_state
from tests.support import assert_bitwise, assert_close, seeded

# Forward mode itself compiles decompositions with torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


LinAlgError: Any = getattr(torch.linalg, "LinAlgError")  # noqa: B009


class BoomError(Exception): ...


def world() -> dict[str, Any]:
    """Everything global that a region could leave changed."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast_dtype": torch.get_autocast_dtype("cpu"),
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "default_dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "dispatch_modes": len(_get_current_dispatch_mode_stack()),
        "function_modes": torch._C._len_torch_function_stack(),
        "transforms": cast(Any, torch._C)._functorch.peek_interpreter_stack(),
        "proxy": torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY),
        "generator": generator_state().tolist(),
    }


class Watching(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Backward(torch.autograd.Function):
    """Identity; its backward factors the cotangent, and fails unless it is positive."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return torch.linalg.cholesky(cotangents[0])


def fails_in_forward(x: Tensor, index: Tensor) -> Tensor:
    """Raises on real tensors only, where an index is out of range."""
    h = checkpoint_name(F.dropout(torch.sin(x), 0.5), "h")
    return torch.sin(F.embedding(index, h))


def fails_in_backward(x: Tensor) -> Tensor:
    """Raises on real tensors only, where the cotangent is not positive definite."""
    return Backward.apply(F.dropout(torch.sin(torch.sin(x)), 0.5))


def run_forward(region: Any, *, good: bool) -> Tensor:
    x = seeded(3, 3).requires_grad_()
    y = region(x, torch.tensor([0, 2 if good else 7]))
    return torch.autograd.grad(y.sum(), x)[0]


def run_backward(region: Any, *, good: bool) -> Tensor:
    x = seeded(3, 3).requires_grad_()
    y = region(x)
    return torch.autograd.grad(y, x, torch.eye(3).double() * (1 if good else -1))[0]


DIRECTIONS = {
    "forward": (fails_in_forward, run_forward),
    "backward": (fails_in_backward, run_backward),
}
AROUND: dict[str, Callable[[], Any]] = {
    "bare": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "function_mode": Watching,
}


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:.*a torch-function mode, Watching")
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize(("fun", "run"), DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_an_exception_half_way_leaves_nothing_changed(
    fun: Any, run: Any, around: Any, warm: bool, engine: Any
) -> None:
    """The error is the operator's, the world is as before, and the next call is right."""
    region = remat(fun, rng="preserve", engine=engine)
    if warm:
        run(region, good=True)
    with around():
        torch.manual_seed(0)
        before = world()
        with pytest.raises((IndexError, LinAlgError)):
            run(fun, good=False)
        expected = world()["generator"]

        torch.manual_seed(0)
        with pytest.raises((IndexError, LinAlgError)):
            run(region, good=False)

        assert world() == {**before, "generator": expected}
    torch.manual_seed(1)
    found = run(region, good=True)
    torch.manual_seed(1)
    assert_bitwise(found, run(fun, good=True))


CHECKS: dict[str, Callable[[Tensor], Tensor]] = {
    "cholesky": lambda x: torch.linalg.cholesky(x).sin(),
    "inverse": lambda x: torch.linalg.inv(x * 0).sin(),
    "solve": lambda x: torch.linalg.solve(x * 0, x).sin(),
    "assert": lambda x: (cast(Any, torch)._assert_async((x > 0).all()), x.sin().sin())[
        1
    ],
}


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_an_operators_own_check_is_not_lost(
    check: Callable[[Tensor], Tensor], engine: Any
) -> None:
    """A check that returns nothing, and that no gradient needs, still raises."""
    x = (-torch.eye(3)).requires_grad_()
    with pytest.raises(RuntimeError) as error:
        check(x)

    with pytest.raises(type(error.value)):
        remat(check, engine=engine)(x)


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_the_users_exception_comes_through(engine: Any) -> None:
    """An exception that `fun` raises in Python is the user's, and nothing stays behind."""
    fails = True

    def fun(x: Tensor) -> Tensor:
        y = torch.sin(torch.sin(x))
        if fails:
            raise BoomError("half-way")
        return y

    region = remat(fun, engine=engine)
    x = seeded(3).requires_grad_()
    before = world()
    with pytest.raises(BoomError, match="half-way"):
        region(x)

    assert world() == before
    fails = False
    assert_bitwise(
        torch.autograd.grad(region(x).sum(), x), torch.autograd.grad(fun(x).sum(), x)
    )


def test_a_failed_trace_leaves_nothing_changed() -> None:
    """Nor does an error of this package, in any number of attempts."""

    def branches(x: Tensor) -> Tensor:
        return x.sin() if F.dropout(x, 0.5).sum() > 0 else x.cos()

    region = remat(branches, rng="preserve")
    before = world()
    for _ in range(2):
        with pytest.raises(TraceError):
            region(seeded(3).requires_grad_())

    assert world() == before


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_an_exception_under_a_transform(transform: str) -> None:
    """The stack of transforms is as before, and the transform works again."""
    region = remat(fails_in_forward, rng="preserve")
    x = seeded(3, 3)

    def loss(x: Tensor, index: Tensor) -> Tensor:
        return region(x, index).sum()

    gradient = torch.func.grad(loss)
    calls: dict[str, Any] = {
        "grad": gradient,
        "vmap": torch.func.vmap(gradient, in_dims=(None, 0), randomness="same"),
        "jvp": lambda x, i: torch.func.jvp(lambda x: gradient(x, i), (x,), (x,))[1],
    }
    index = torch.tensor([[0, 1]] * 2) if transform == "vmap" else torch.tensor([0, 1])
    before = {**world(), "generator": None}
    with pytest.raises(IndexError):
        calls[transform](x, index + 9)

    assert {**world(), "generator": None} == before
    assert calls[transform](x, index).isfinite().all()


class Net(nn.Module):
    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.w = nn.Parameter(torch.randn(width, width, dtype=torch.float64))


def block(x: Tensor, w: Tensor) -> Tensor:
    """The region that both threads share."""
    return torch.sin(checkpoint_name(torch.sin(torch.tanh(x @ w)), "h") @ w.t()) * 0.1


def train(region: Any, net: Net, steps: int = 12) -> list[Tensor]:
    """Some steps of descent through three calls of the region; all the gradients."""
    torch.set_num_threads(1)  # a setting of each thread's own
    width = net.w.shape[0]
    gradients = []
    for step in range(steps):
        x = seeded(4 + step % 3, width, seed=step)
        y = region(region(region(x, net.w), net.w), net.w)
        (gradient,) = torch.autograd.grad(y.square().sum(), net.w)
        gradients.append(gradient)
        with torch.no_grad():
            net.w.sub_(gradient, alpha=0.01)
    return gradients


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("widths", [(5, 5), (5, 7)], ids=["one_shape", "two_shapes"])
def test_two_threads_train_through_one_region(widths: Any, engine: Any) -> None:
    """Two threads, two models, one region, cold: bitwise the serial training."""
    policy = policies.save_only_these_names("h") if engine == "trace" else None
    region = remat(block, policy=policy, engine=engine)
    found: list[Any] = [None, None]
    nets = [Net(i, width) for i, width in enumerate(widths)]
    start = threading.Barrier(2)

    def work(i: int) -> None:
        start.wait()
        found[i] = train(region, nets[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    serial = [train(region, Net(i, width)) for i, width in enumerate(widths)]
    plain = [train(block, Net(i, width)) for i, width in enumerate(widths)]
    assert_bitwise(found, serial)
    assert_close(found, plain)


@pytest.mark.contract
def test_threads_derive_from_one_region_at_once() -> None:
    """What each transform needs is traced when it is met: by several threads, here."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return block(x, w).sum()

    x, w = seeded(3, 4), seeded(4, 4, seed=1)
    stacked = torch.stack([w, w.cos(), w.sin()])
    # No forward mode: torch has one level of it for all threads.
    derived: list[Callable[[Any], Any]] = [
        lambda g: grad(g)(x, w),
        lambda g: vmap(grad(g), in_dims=(None, 0))(x, stacked),
        lambda g: vmap(g, in_dims=(0, None))(x[:, None], w),
        lambda g: grad(lambda x: grad(g, 1)(x, w).sin().sum())(x),
        lambda g: vmap(grad(lambda w: grad(g)(x, w).cos().sum()))(stacked),
        lambda g: torch.func.jacrev(grad(g), argnums=1)(x, w),
    ]
    region = remat(f)
    found: list[Any] = [None] * len(derived)
    start, patched = threading.Barrier(len(derived)), nn.Module.__call__
    interval = sys.getswitchinterval()

    def work(i: int) -> None:
        start.wait()
        found[i] = derived[i](region)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(derived))]
    sys.setswitchinterval(1e-5)  # so that they overlap
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    sys.setswitchinterval(interval)

    assert_close(found, [each(f) for each in derived])
    assert nn.Module.__call__ is patched


def test_a_thread_without_grad_beside_one_with() -> None:
    """Modes are a thread's own: no_grad in one does not touch the other."""
    region = remat(block)
    expected = train(region, Net(0, 4))
    stop = threading.Event()

    def infer() -> None:
        net = Net(1, 4)
        while not stop.is_set():
            with torch.no_grad():
                assert not region(seeded(2, 4), net.w).requires_grad

    net = Net(0, 4)
    thread = threading.Thread(target=infer)
    thread.start()
    try:
        assert_bitwise(train(region, net), expected)
    finally:
        stop.set()
        thread.join(60)
