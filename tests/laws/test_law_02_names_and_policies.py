"""Law 2. Permission, as policies and names grant it.

"A name on an operator's output covers the helper outputs that its backward reads
(attention's log-sum-exp), and every alias of the value." "Under vmap, as in JAX: the
policy sees values at the level at which reverse mode is taken: per example in
`vmap(grad(f))`, batched in `grad(vmap(f))`."
"""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from remat import RematWarning, checkpoint_name, policies, remat
from tests.functions import attention, attention_args, mlp, tensors
from tests.inspection import assert_saves, split_residuals
from tests.support import assert_bitwise, backward_operators, held_bytes, seeded

NAMED = policies.save_only_these_names
X = seeded(5)


def test_names_cover_the_helpers_of_attention():
    """Naming attention's output saves its log-sum-exp too, and attention is not re-run."""

    def fun(q, k, v):
        out = F.scaled_dot_product_attention(q.sin(), k.sin(), v.sin(), is_causal=True)
        return checkpoint_name(out, "attn").transpose(1, 2).flatten(2).sin()

    args = tuple(seeded(2, 2, 6, 4, seed=i, dtype=torch.float32) for i in range(3))
    out_bytes, helper_bytes = 2 * 2 * 6 * 4 * 4, 2 * 2 * 6 * 4

    for policy in [NAMED("attn"), policies.save_attention_outputs]:
        region = remat(fun, policy=policy)
        counts = backward_operators(region, *args)
        assert_saves(region, args, count=2, size_bytes=out_bytes + helper_bytes)
        assert counts["aten.sin"] == 3
        assert not any("attention" in op and "backward" not in op for op in counts)


@pytest.mark.contract
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("mask", [None, torch.ones(6, 6).tril().log()])
def test_of_multi_head_attention_the_output_alone_is_saved(mask, dropout):
    """Its own call of attention is seen, though dropout makes it a chain on a CPU."""
    module = nn.MultiheadAttention(4, 2, dropout, batch_first=True)
    x = seeded(3, 6, 4, dtype=torch.float32).requires_grad_()

    def fun(x):
        found = module(x.sin(), x.cos(), x, attn_mask=mask, need_weights=False)
        return found[0].sin()

    region = remat(fun, policy=policies.save_attention_outputs, rng="preserve")
    log_sum_exp = [] if dropout else [(3, 2, 6)]
    _, made = split_residuals(region, x)
    shapes = [each.shape for each in made if each.op != "remat.rng_state"]
    assert shapes == [(3, 2, 6, 2), *log_sum_exp]

    def step(f):
        torch.manual_seed(0)
        return torch.autograd.grad(f(x).sum(), [x, *module.parameters()])

    assert_bitwise(step(region), step(fun))


def test_naming_an_argument():
    """An argument may be named: it keeps its path, and nothing is copied."""

    def fun(x):
        return checkpoint_name(x, "input").sin().exp()

    region = remat(fun, policy=NAMED("input"))
    arguments, made = split_residuals(region, X)

    assert [(a.path, a.name) for a in arguments] == [("x", "input")]
    assert made == []
    assert held_bytes(region, X) == 0


def test_names_map_over_containers():
    """checkpoint_name names every tensor of a pytree, and several values share a name."""

    def fun(x):
        both = checkpoint_name({"s": x.sin(), "c": [x.cos(), None, 3]}, "both")
        return (both["s"] * both["c"][0]).exp().sin()

    assert_saves(remat(fun, policy=NAMED("both")), (X,), names=["both", "both"])


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
def test_matmul_policy_saves_the_matmuls_that_are_needed():
    """save_matmul_outputs keeps what the walk meets: not the last layer's output."""
    args = tensors((5, 8), (8, 16), (16,), (16, 8), (8,))()
    region = remat(mlp, policy=policies.save_matmul_outputs)

    assert_saves(region, args, count=1, size_bytes=5 * 16 * 4)
    assert matmuls(backward_operators(region, *args)) == 4
    assert matmuls(backward_operators(remat(mlp), *args)) == 5


def matmuls(counts: Counter[str]) -> int:
    """How many matrix multiplications ran."""
    kinds = ["mm", "addmm", "bmm", "baddbmm", "linear", "matmul"]
    return sum(counts[f"aten.{kind}"] for kind in kinds)


def test_matmul_policy_on_attention():
    """A transformer block keeps three of its four matmuls, and runs attention again."""
    args = attention_args()
    region = remat(attention, policy=policies.save_matmul_outputs)
    counts = backward_operators(region, *args)

    assert_saves(region, args, count=3, size_bytes=2 * 6 * (24 + 8 + 16) * 4)
    assert matmuls(counts) == 8
    assert sum(counts[op] for op in counts if "attention" in op) == 2


def test_no_batch_policy_saves_no_batch_matmul():
    """dots_with_no_batch_dims_saveable keeps mm and not bmm, also what vmap made of mm."""

    def fun(x, w):
        return torch.bmm((x @ w).sin(), x.mT).sin()

    args = (seeded(2, 3, 4), seeded(4, 4, seed=1))
    region = remat(fun, policy=policies.save_matmul_outputs_no_batch)
    assert_saves(region, args, count=1, size_bytes=2 * 3 * 4 * 8)

    batched = remat(vmap(lambda x, w: (x @ w).sin()), policy=region_policy())
    with pytest.warns(
        RematWarning,
        match=r"permits no value here.*made by matmul, sin\..*checkpoint_name\)\.$",
    ):
        assert_saves(batched, (args[0], seeded(2, 4, 4, seed=2)), count=0)


def test_no_batch_policy_saves_products_by_what_the_batch_shares():
    """As in JAX: for `einsum`, vmap expands it, and torch multiplies two batches."""

    def fun(x, w):
        return torch.einsum("ij,jk->ik", x, w).sin().exp().sin()

    region = remat(vmap(fun, (0, None)), policy=region_policy())
    args = (seeded(5, 3, 4), seeded(4, 6, seed=1))

    assert_saves(region, args, count=1, size_bytes=5 * 3 * 6 * 8)


def region_policy():
    """JAX's name for the same policy."""
    return policies.dots_with_no_batch_dims_saveable


def test_policy_sees_values_at_the_level_of_reverse_mode():
    """As in JAX: per example in vmap(grad(f)), batched in grad(vmap(f))."""
    seen = []

    def policy(value):
        seen.append(tuple(value.shape))
        return False

    def fun(x):
        return remat(lambda x: x.exp().sin().sum(), policy=policy)(x)

    batch = seeded(3, 5)
    vmap(grad(fun))(batch)
    assert (5,) in seen
    assert (3, 5) not in seen
    seen.clear()
    grad(lambda x: vmap(fun)(x).sum())(batch)
    assert (3, 5) in seen
