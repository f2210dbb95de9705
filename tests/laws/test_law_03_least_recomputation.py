"""Law 3. Least recomputation, per region.

"The backward runs only what some wanted gradient needs, given what was saved."
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

from remat import checkpoint_name, policies, remat, saved_residuals
from tests.support import (
    ALIASING,
    assert_bitwise,
    backward_operators,
    count_operators,
    fresh,
    grads,
    seeded,
    tensors_in,
)


def backward_of(region, args, *, outputs=None):
    """Operators of the backward from the chosen outputs; arguments may require grad."""
    grads(lambda *args: chosen(region(*args), outputs), args)
    leaves = fresh(args)
    root = chosen(region(*leaves), outputs)
    pulled = [torch.ones_like(out) for out in root]
    return count_operators(lambda: torch.autograd.backward(root, pulled))


def chosen(result, outputs):
    """Some of a function's outputs, or all."""
    flat = tensors_in(result)
    return flat if outputs is None else [flat[i] for i in outputs]


@pytest.mark.contract
def test_the_last_matmul_is_not_run_again():
    """The output of the last linear layer is dead in the backward."""

    def fun(x, w, v):
        return F.relu(x.sin() @ w) @ v

    args = (seeded(3, 4), seeded(4, 5, seed=1), seeded(5, 2, seed=2))
    counts = backward_operators(remat(fun), *args)

    assert counts["aten.mm"] == 4 + 1
    assert counts["aten.sin"] == 1


def test_sums_are_not_run_again():
    """Additions, means and losses whose results nobody reads are dead."""

    def fun(x, y):
        return ((x.exp() + y).sin() + y.sum() - x.mean()).sum()

    args = (seeded(3, 4), seeded(3, 4, seed=1))
    counts = backward_operators(remat(fun), *args)

    assert counts["aten.exp"] == 1
    assert counts["aten.add"] <= 1 + 2  # exp(x) + y, and two sums of gradients
    assert counts["aten.mean"] == counts["aten.sub"] == counts["aten.sin"] == 0


SIZES_ALONE = {
    "ones_like": torch.ones_like,
    "zeros_like": lambda y: torch.zeros_like(y) + 2,
    "full_like": lambda y: torch.full_like(y, 2.0),
    "new_ones": lambda y: y.new_ones(3, 5),
    "new_zeros": lambda y: y.new_zeros((3, 5)) + 2,
    "new_full": lambda y: y.new_full((3, 5), 2.0),
}


@pytest.mark.contract
@pytest.mark.parametrize("made", SIZES_ALONE.values(), ids=SIZES_ALONE)
def test_a_value_whose_sizes_alone_are_read_is_not_run_again(made):
    def fun(x, w):
        return x.sin() * made(x.sin() @ w).sum()

    args = seeded(3, 4), seeded(4, 5, seed=1)
    region = remat(fun)

    assert not backward_operators(region, *args)["aten.mm"]
    assert_bitwise(grads(region, args)[:1], grads(fun, args)[:1])


@pytest.mark.contract
def test_the_energy_of_a_force_is_not_run_again():
    """`grad` inside a function reads of what it differentiates the sizes of the ones it begins with."""

    def force(x, w, v):
        return grad(lambda x: ((x @ w).tanh() @ v).sum())(x)

    args = seeded(3, 4), seeded(4, 4, seed=1), seeded(4, 9, seed=2)
    counts = backward_operators(remat(force), *args)
    plain = backward_operators(force, *args)

    assert counts["aten.mm"] == plain["aten.mm"] + 2  # x @ w, and the cotangent @ v.mT
    assert counts["aten.tanh"] == 1


def image(x):
    return x.sin()[None, None]


POOLS = {
    "avg_pool2d": lambda y: F.avg_pool2d(y, 2),
    "adaptive_avg_pool2d": lambda y: F.adaptive_avg_pool2d(y, 2),
    "max_pool2d": lambda y: F.max_pool2d(y, 2),
    "adaptive_max_pool2d": lambda y: F.adaptive_max_pool2d(y, 2),
    "reflection_pad2d": lambda y: F.pad(y, (1, 1, 1, 1), mode="reflect"),
    "replication_pad2d": lambda y: F.pad(y, (1, 1, 1, 1), mode="replicate"),
    "convolution of frozen weights": lambda y: F.conv2d(y, y.new_ones(1, 1, 2, 2)),
}


@pytest.mark.contract
@pytest.mark.parametrize("policy", [None, policies.save_matmul_outputs], ids=repr)
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_a_convolution_is_not_run_again_for_its_sizes(pool, policy):
    """What pools it reads indices, or nothing, of what it pools."""

    def fun(x):
        return pool(F.conv2d(image(x), x.new_ones(1, 1, 3, 3), padding=1))

    x = seeded(4, 6)
    region = remat(fun, policy=policy)
    counts = backward_operators(region, x)

    keeps_indices = "max" in str(counts)
    assert counts["aten.convolution"] == keeps_indices * (policy is None)
    saved = [each.op for each in saved_residuals(region, x) if not each.path]
    assert saved == ["aten.convolution"] * (keeps_indices and policy is not None)
    assert_bitwise(grads(region, (x,)), grads(fun, (x,)))


def attended(h):
    return F.scaled_dot_product_attention(h[None], h[None], h[None])


@pytest.mark.contract
@pytest.mark.parametrize("saved", ["everything_saveable", "save_matmul_outputs"])
@pytest.mark.parametrize(
    "computes",
    [torch.sin, functools.partial(F.layer_norm, normalized_shape=(5,)), attended],
)
def test_a_product_that_nobody_reads_is_not_saved_for_an_equal_one(computes, saved):
    """Where a function computes a value twice, what waits is one that its outputs need.

    Nor are a mean and a log-sum-exp, which only the backward reads.
    """

    def once(x, w):
        return computes(x @ w).sin().sin()

    def fun(x, w):
        _unread = computes(x @ w)
        return once(x, w)

    args = (seeded(3, 4), seeded(4, 5, seed=1))
    found, expected = (
        count_after_a_trace(remat(each, policy=getattr(policies, saved)), args)
        for each in (fun, once)
    )

    assert found == expected


def count_after_a_trace(region, args):
    """Operators of forward and backward, once they are traced."""
    grads(region, args)
    return count_operators(lambda: grads(region, args))


def two_branches(x):
    """Two outputs that share nothing but the argument."""
    return x.sin().sin().sin(), x.exp().exp().exp()


@pytest.mark.contract
@pytest.mark.parametrize(
    ("used", "sines", "exps"), [(0, 2, 0), (1, 0, 3), (None, 2, 3)]
)
def test_unused_outputs_cost_nothing(used, sines, exps):
    """An output without a cotangent recomputes nothing of its own."""
    outputs = None if used is None else [used]

    counts = backward_of(remat(two_branches), (seeded(5),), outputs=outputs)

    assert counts["aten.sin"] == sines
    assert counts["aten.cos"] == (3 if sines else 0)
    assert counts["aten.exp"] == exps


def test_outputs_used_in_turn():
    """One region serves every combination of cotangents."""
    region = remat(two_branches)

    for outputs, sines, exps in [([0], 2, 0), ([0, 1], 2, 3), ([1], 0, 3), ([0], 2, 0)]:
        counts = backward_of(region, (seeded(5),), outputs=outputs)
        assert (counts["aten.sin"], counts["aten.exp"]) == (sines, exps)


def linear_of_sine(x, w):
    """Needs sin(x) for the gradient of w, and only w and x for that of x."""
    return x.sin() @ w


@pytest.mark.contract
@pytest.mark.parametrize(
    ("wanted", "sines", "cosines", "products"),
    [("x", 0, 1, 1), ("w", 1, 0, 1), ("xw", 1, 1, 2)],
)
def test_only_wanted_gradients_are_paid_for(wanted, sines, cosines, products):
    """Arguments that need no gradient cost no operator."""
    args = [seeded(3, 4), seeded(4, 5, seed=1)]
    args = [a.requires_grad_("xw"[i] in wanted) for i, a in enumerate(args)]

    counts = backward_of(remat(linear_of_sine), tuple(args))

    assert counts["aten.sin"] == sines
    assert counts["aten.cos"] == cosines
    assert counts["aten.mm"] == products


@pytest.mark.parametrize(
    ("argnums", "sines", "products"), [(0, 0, 1), (1, 1, 1), ((0, 1), 1, 2)]
)
def test_only_wanted_gradients_under_torch_func(argnums, sines, products):
    """Under torch.func.grad, argnums decide what is recomputed."""
    args = (seeded(3, 4), seeded(4, 5, seed=1))
    region = remat(linear_of_sine)
    gradient = grad(lambda x, w: region(x, w).sum(), argnums)
    gradient(*args)

    counts = count_operators(gradient, *args)

    assert counts["aten.sin"] == 1 + sines
    assert counts["aten.mm"] == 1 + products


def test_a_frozen_first_layer_is_not_differentiated():
    """Values that depend on nothing wanted are recomputed once, and get no gradient."""

    def fun(tokens, x, w):
        return (tokens.sin().exp() * x.sin()) @ w

    args = (seeded(3, 4), seeded(3, 4, seed=1), seeded(4, 2, seed=2).requires_grad_())
    counts = backward_of(remat(fun), args)

    assert counts["aten.cos"] == 0
    assert counts["aten.sin"] == 2
    assert counts["aten.mm"] == 1


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (None, {"sin": 1, "exp": 1, "tanh": 1}),
        (policies.save_only_these_names("early"), {"exp": 1, "tanh": 1}),
        (policies.save_only_these_names("late"), {"sin": 1, "exp": 1}),
        (policies.everything_saveable, {}),
    ],
    ids=["nothing", "early", "late", "everything"],
)
def test_each_value_is_recomputed_at_most_once(policy, again):
    """A value that several derivatives read is made again once, from what was saved."""

    def fun(x):
        early = checkpoint_name(x.sin(), "early")
        middle = early.exp() * early
        late = checkpoint_name((middle * early).tanh(), "late")
        return (late * middle + late * early).cos()

    counts = backward_operators(remat(fun, policy=policy), seeded(5))
    plain = backward_operators(fun, seeded(5))
    found = {op: counts[f"aten.{op}"] - plain[f"aten.{op}"] for op in ("exp", "tanh")}

    assert counts["aten.sin"] - plain["aten.sin"] == again.get("sin", 0)
    assert found == {op: again.get(op, 0) for op in found}


def test_backward_of_everything_is_plain():
    """Where everything is saved, the backward computes what plain autograd computes."""

    def fun(x, w):
        return (x @ w).tanh().exp() @ w.T

    args = (seeded(3, 4), seeded(4, 5, seed=1))
    region = remat(fun, policy=policies.everything_saveable)
    plain, found = backward_operators(fun, *args), backward_operators(region, *args)

    def computing(counts):
        return {op: n for op, n in counts.items() if op not in ALIASING}

    assert sum(computing(found).values()) <= sum(computing(plain).values())


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
def test_nothing_runs_again_where_nothing_is_read():
    """A function whose derivative reads arguments alone recomputes nothing."""

    def fun(x, w):
        return F.linear(x, w).transpose(0, 1).reshape(-1)

    args = (seeded(3, 4), seeded(5, 4, seed=1))
    counts = backward_operators(remat(fun), *args)

    assert counts["aten.mm"] + counts["aten.linear"] + counts["aten.addmm"] == 2


@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_gradient_is_that_which_was_asked_for(engine, is_leaf, is_recorded):
    """By the input, although the weights require grad: a force, or a term of an equation."""

    def fun(x, w, v):
        return torch.tanh(torch.tanh(x @ w) @ v)

    given = seeded(3, 4), seeded(4, 5, seed=1), seeded(5, 2, seed=2)
    counts, found = [], []
    for f in (fun, remat(fun, engine=engine)):
        leaf, w, v = (each.clone().requires_grad_() for each in given)
        x = leaf if is_leaf else leaf * 1.0

        def slope(f=f, x=x, w=w, v=v):
            return torch.autograd.grad(f(x, w, v).sum(), x, create_graph=is_recorded)[0]

        slope()
        counts.append(count_operators(slope)["aten.mm"])
        asked = leaf, w, v
        f(x, w, v).sum().backward(retain_graph=True)
        found.append([slope(), *(each.grad for each in asked)])
        if is_recorded:
            found[-1] += torch.autograd.grad(slope().square().sum(), asked)

    assert counts[1] == counts[0] + 2
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("asked", range(3))
def test_so_it_is_in_a_row_of_regions_that_nothing_watches(asked):
    """Calls like earlier ones take a short way, which no dispatch mode hears, but a profiler."""
    given = seeded(3, 4), *(seeded(4, 4, seed=seed) for seed in (1, 2, 3))
    leaves = [each.requires_grad_() for each in given]

    def layer(x, w):
        return torch.tanh(x @ w)

    def gradient(f):
        out = leaves[0]
        for w in leaves[1:]:
            out = f(out, w)
        return torch.autograd.grad(out.sum(), leaves[asked])[0]

    def products(f):
        for _ in range(3):
            gradient(f)
        with torch.autograd.profiler.profile() as seen:
            gradient(f)
        assert seen is not None
        return sum(each.count for each in seen.key_averages() if each.key == "aten::mm")

    region = remat(layer, policy=policies.everything_saveable)

    assert products(region) == products(layer)
    torch.testing.assert_close(gradient(region), gradient(layer))
