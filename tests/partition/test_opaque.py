"""Kernels that a trace cannot look into, and collectives: one value each to a policy.

A name on what such a kernel makes, or its operator, saves its output with the helpers that
its backward reads; its forward is then not run again.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from remat import TraceError, checkpoint_name, policies, remat
from remat.interop.torch import checkpoint as ours
from tests.support import assert_bitwise, assert_close, backward_operators, run, seeded

pytestmark = pytest.mark.contract

CALLS: Counter[str] = Counter()


@torch.library.custom_op("remat_opaque::attention", mutates_args=())
def attention(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Attention weights, and the log-sum-exp that a backward reads."""
    CALLS["forward"] += 1
    scores = q @ k.T
    return scores.softmax(-1), scores.logsumexp(-1)


@attention.register_fake
def _(q, k):
    return q.new_empty(len(q), len(k)), q.new_empty(len(q))


@torch.library.custom_op("remat_opaque::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor, log_sum: Tensor, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients, from the log-sum-exp and not from the weights."""
    CALLS["backward"] += 1
    weights = (q @ k.T - log_sum[:, None]).exp()
    inner = weights * (gradient - (gradient * weights).sum(-1, keepdim=True))
    return inner @ k, inner.T @ q


@attention_backward.register_fake
def _(gradient, log_sum, q, k):
    return torch.empty_like(q), torch.empty_like(k)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(output[1], *inputs)


def _backward(ctx, gradient, _):
    return attention_backward(gradient, *ctx.saved_tensors)


attention.register_autograd(_backward, setup_context=_setup)


class Legacy(torch.autograd.Function):
    """The same kernels, as most libraries still bind them."""

    @staticmethod
    def forward(ctx: Any, q, k):
        weights, log_sum = torch.ops.remat_opaque.attention.default(q, k)
        ctx.save_for_backward(log_sum, q, k)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return attention_backward(gradient, *ctx.saved_tensors)


def by_operator(q, k):
    return checkpoint_name(attention(q.sin(), k)[0], "attn").sin()


def by_function(q, k):
    return checkpoint_name(Legacy.apply(q.sin(), k), "attn").sin()


SAVING = {
    "name": policies.save_only_these_names("attn"),
    "operator": policies.by_op(torch.ops.remat_opaque.attention),
    "overload": policies.by_op("remat_opaque.attention.default"),
}
ARGS = (seeded(4, 3), seeded(5, 3, seed=1))
each_binding = pytest.mark.parametrize("binding", [by_operator, by_function])


def calls_of(function):
    """How often each kernel runs in a forward and a backward, once they are traced."""
    run(function, ARGS)
    CALLS.clear()
    run(function, ARGS)
    return dict(CALLS)


@each_binding
@pytest.mark.parametrize("policy", SAVING.values(), ids=SAVING)
def test_a_saved_kernel_is_not_run_again(binding, policy):
    """Its output and its helper wait: the name on one covers the other."""
    assert_bitwise(run(remat(binding, policy=policy), ARGS), run(binding, ARGS))
    assert calls_of(remat(binding, policy=policy)) == {"forward": 1, "backward": 1}


@each_binding
def test_a_kernel_is_run_again(binding):
    """Without a policy it is recomputed, as one value."""
    assert_bitwise(run(remat(binding), ARGS), run(binding, ARGS))
    assert calls_of(remat(binding)) == {"forward": 2, "backward": 1}


@each_binding
def test_a_kernel_under_torch_func(binding):
    """In a region it may be written as for autograd, where torch.func alone refuses it."""
    region: Any = remat(binding, policy=SAVING["name"])
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda q: binding(q, ARGS[1]).sum())(ARGS[0])

    found = torch.func.grad(lambda q: region(q, ARGS[1]).sum())(ARGS[0])

    q = ARGS[0].clone().requires_grad_()
    assert_close([found], torch.autograd.grad(binding(q, ARGS[1]).sum(), q))


@torch.library.custom_op("remat_opaque::write", mutates_args=("out", "total"))
def write(x: Tensor, out: Tensor, total: Tensor | None = None) -> Tensor:
    """What most kernels of libraries do: their results go to tensors that they are given."""
    CALLS["forward"] += 1
    out.copy_(x.sin())
    if total is not None:
        total += x.sum()
    return x.cos()


@write.register_fake
def _(x, out, total=None):
    return torch.empty_like(x)


class Writing(torch.autograd.Function):
    """Such a kernel in both directions."""

    @staticmethod
    def forward(ctx: Any, x, total):
        sine = torch.empty_like(x)
        ctx.save_for_backward(write(x, sine, total))
        return checkpoint_name(sine, "sine")

    @staticmethod
    def backward(ctx: Any, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        found = gradient.new_empty(2, *gradient.shape)
        write(gradient, found[0])
        return found[0] * ctx.saved_tensors[0], None


@pytest.mark.parametrize("keeps_total", [False, True], ids=["", "buffer"])
@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        (None, 3),
        (policies.save_only_these_names("sine"), 2),
        (policies.by_op(torch.ops.remat_opaque.write), 2),
    ],
    ids=["nothing", "name", "operator"],
)
def test_a_kernel_that_writes_to_its_arguments(policy, calls, keeps_total):
    """It writes to copies in a region, and a buffer changes once."""
    totals = (
        [torch.zeros((), dtype=torch.float64) for _ in range(2)]
        if keeps_total
        else [None, None]
    )

    def using(total):
        return lambda x: Writing.apply(x.exp(), total).sin()

    region = remat(using(totals[0]), policy=policy)

    assert_bitwise(run(region, [seeded(3)]), run(using(totals[1]), [seeded(3)]))
    assert_bitwise(*totals)
    CALLS.clear()
    run(region, [seeded(3)])
    assert CALLS["forward"] == calls


class OnNumpy(torch.autograd.Function):
    """A kernel that leaves torch."""

    @staticmethod
    def forward(ctx: Any, x):
        CALLS["forward"] += 1
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * ctx.saved_tensors[0].cos()


class Unrolled(torch.autograd.Function):
    """Differentiates, in its backward, a graph that its forward made."""

    @staticmethod
    def forward(ctx: Any, x, keeps):
        with torch.enable_grad():
            ctx.inner = x.detach().requires_grad_()
            ctx.outer, ctx.keeps = ctx.inner.exp().sin(), keeps
        return ctx.outer.detach()

    @staticmethod
    def backward(ctx: Any, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        found = torch.autograd.grad(
            ctx.outer, ctx.inner, gradient, retain_graph=ctx.keeps
        )
        return *found, None


def test_a_graph_that_is_kept_between_forward_and_backward():
    """A trace differentiates it more than once, and says so where it is freed."""

    def using(keeps):
        return lambda x: Unrolled.apply(x.sin(), keeps).cos()

    x = [seeded(3)]
    with pytest.raises(TraceError, match=r"graph that its forward has kept.*retain"):
        run(remat(using(keeps=False)), x)

    for region in (remat(using(keeps=True)), remat(using(keeps=False), engine="rerun")):
        assert_bitwise(run(region, x), run(using(keeps=False), x))


def test_a_kernel_without_an_operator():
    """Tracing says what to do; the function runs again as Python."""

    def function(x):
        return OnNumpy.apply(x.exp()).exp()

    x = [seeded(3)]
    with pytest.raises(TraceError, match=r'engine="rerun"'):
        run(remat(function), x)

    found = run(remat(function, engine="rerun"), x)
    assert_bitwise(found, run(function, x))


def test_a_distribution_that_checks_its_arguments():
    """The error names the switch that torch has for it, and with that it is traced."""

    def using(*, validate_args: bool):
        def log_prob(x: Tensor) -> Tensor:
            normal = torch.distributions.Normal(x, x.exp(), validate_args)
            return normal.log_prob(x.sin())

        return log_prob

    with pytest.raises(TraceError, match="Use validate_args=False for the"):
        run(remat(using(validate_args=True)), [seeded(3)])

    found = run(remat(using(validate_args=False)), [seeded(3)])
    assert_bitwise(found, run(using(validate_args=True), [seeded(3)]))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torchs_own_checkpoint_inside_says_what_to_do(use_reentrant: bool) -> None:
    """It would run again on real parameters, which no trace can take."""
    linear, x = torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)

    def around(kind: Any) -> Any:
        return remat(lambda x: kind(linear, x, use_reentrant=use_reentrant).sin())

    with pytest.raises(TraceError, match=r"calls torch\.utils\.checkpoint") as raised:
        around(checkpoint)(x)
    assert "import checkpoint from remat.interop.torch" in str(raised.value)

    found = run(around(ours), [x])
    assert_bitwise(found, run(lambda x: linear(x).sin(), [x]))


# --- attention of torch -----------------------------------------------------------------

KERNEL = "aten._scaled_dot_product_flash_attention_for_cpu"


def attend(x):
    heads = x.view(2, 6, 2, 4).transpose(1, 2)
    out = F.scaled_dot_product_attention(heads.sin(), heads, heads, is_causal=True)
    return checkpoint_name(out, "attn").transpose(1, 2).reshape(2, 6, 8).sin().exp()


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (policies.save_attention_outputs, 0),
        (policies.save_only_these_names("attn"), 0),
        (policies.by_op(F.scaled_dot_product_attention), 0),
        (None, 1),
    ],
    ids=["attention", "name", "function", "nothing"],
)
def test_attention_is_one_value(policy, again):
    """The fused kernel's forward is not run again if its output, or its name, is saved."""
    x = seeded(2, 6, 8)
    region = remat(attend, policy=policy)

    assert_bitwise(run(region, [x]), run(attend, [x]))
    assert backward_operators(region, x)[KERNEL] == again


def test_attention_by_another_backend():
    """The math backend is a chain of operators, of which the output alone is saved."""
    x = seeded(2, 6, 8)
    with sdpa_kernel(SDPBackend.MATH):
        region = remat(attend, policy=policies.save_attention_outputs)
        assert_bitwise(run(region, [x]), run(attend, [x]))
        counts = backward_operators(region, x)

    # One product of the forward runs again; the gradients of two take four.
    assert counts[KERNEL] == 0
    assert counts["aten.bmm"] == 5


# --- collectives ------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[None]:
    """A process group of one process."""
    dist.init_process_group(
        "gloo", rank=0, world_size=1, store=cast("Any", dist).HashStore()
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_place(x):
    y = x.sin().clone()
    dist.all_reduce(y)
    return checkpoint_name(y, "sum").sin().exp()


def functionally(x):
    group: Any = dist.group.WORLD
    y = functional.all_reduce(x.sin(), "sum", group)
    return checkpoint_name(y, "sum").sin().exp()


REDUCE = "_c10d_functional.all_reduce"


@pytest.mark.usefixtures("world")
@pytest.mark.filterwarnings(
    "ignore::UserWarning:torch"
)  # functional ones have no derivative
@pytest.mark.parametrize(("function", "own"), [(in_place, 0), (functionally, 1)])
@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (policies.save_only_these_names("sum"), 0),
        (policies.by_op(torch.ops._c10d_functional.wait_tensor), 0),
        (policies.by_op(torch.ops._c10d_functional.all_reduce), 0),
        (None, 1),
    ],
    ids=["name", "wait", "reduce", "nothing"],
)
def test_collectives_are_saved_by_name_or_operator(function, own, policy, again):
    """A saved sum is not sent for again; the backward's own collective stays."""
    counts = backward_operators(remat(function, policy=policy), seeded(3))

    assert counts[REDUCE] == own + again
