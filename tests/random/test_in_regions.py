"""Draws inside regions: never saved, drawn again with the same bits.

"Keyed draws are opaque values that no policy saves, not even `everything_saveable`: they
are redrawn from the key."
"""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from remat import checkpoint_name, policies, random, remat
from tests.support import assert_bitwise, assert_close, daily, held_bytes, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

POLICIES: dict[str, Any] = {
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
    "names": policies.save_only_these_names("hidden", "mask"),
    "callable": lambda value: True,
}
each_policy = pytest.mark.parametrize("policy", daily(POLICIES, ["nothing", "names"]))


def three_dropouts(x: Tensor, key: Tensor) -> Tensor:
    """A block that draws three times, from a split and from what is folded in."""
    one, other = random.split(key)
    x = checkpoint_name(random.dropout(one, torch.sin(x), 0.1), "hidden")
    x = torch.sin(random.dropout(random.fold_in(other, 0), x * x, 0.5))
    return random.dropout(random.fold_in(other, 1), torch.sin(x), 0.3)


def by_masks(x: Tensor, key: Tensor) -> Tensor:
    """Masks and noise that are spelled out."""
    one, two, three, four = random.split(key, 4)
    mask = checkpoint_name(random.bernoulli(one, x.shape, p=0.5), "mask")
    x = torch.where(mask, torch.sin(x), torch.cos(x))
    x = torch.sin(x * random.normal(two, x.shape, dtype=x.dtype))
    x = torch.sin(x * random.gumbel(three, x.shape, dtype=x.dtype))
    order = random.permutation(four, x.shape[-1])
    return torch.sin(x[..., order] * (random.uniform(two, x.shape[-1:]) < 0.7))


def made_inside(x: Tensor, key: Tensor) -> Tensor:
    """A key from a number, beside the one that is handed in."""
    x = torch.sin(random.dropout(random.key(5), torch.sin(x), 0.5))
    return torch.sin(random.dropout(key, x, 0.5))


BLOCKS = [three_dropouts, by_masks, made_inside]
each_block = pytest.mark.parametrize("block", BLOCKS)


@each_policy
@each_block
def test_neither_masks_nor_bits_are_saved(block: Any, policy: Any) -> None:
    """Under any policy, only values that depend on `x`, and the key itself."""
    region: Any = remat(block, policy=policy)
    x, key = seeded(4, 6).requires_grad_(), random.key(1)

    rows = region.saved_residuals(x, key)

    assert all("random" not in row.op and "lt" not in row.op for row in rows)
    assert {row.dtype for row in rows} <= {torch.float64, torch.uint64}
    assert [row.path for row in rows if row.dtype == torch.uint64] == ["key"]
    made = [row.size_bytes for row in rows if not row.path]
    assert held_bytes(region, x, key) == sum(made)


@each_block
def test_the_policy_is_not_asked(block: Any) -> None:
    """It sees no value that a key alone decides."""
    asked: list[str] = []

    def policy(value: Any) -> bool:
        asked.append(str(value.op))
        return False

    region: Any = remat(block, policy=policy)
    region.saved_residuals(seeded(4, 6), random.key(1))

    assert asked
    assert not [op for op in asked if "random" in op or "remat" in op]


@each_policy
@each_block
def test_gradients_are_plains(block: Any, policy: Any) -> None:
    """`.backward()` bitwise; under grad, vmap(grad) with a key each, and grad(grad)."""
    region = remat(block, policy=policy)
    xs, keys = seeded(3, 4, 6), random.split(random.key(2), 3)
    x, key = xs[0], keys[0]

    def trained(f: Any) -> Any:
        leaf = x.clone().requires_grad_()
        out = f(leaf, key)
        return out.detach(), torch.autograd.grad(out, leaf, torch.cos(out.detach()))

    def first(f: Any) -> Any:
        return grad(lambda x, key: f(x, key).sum())

    def second(f: Any) -> Any:
        return grad(lambda x, key: torch.sin(first(f)(x, key)).sum())

    assert_bitwise(trained(region), trained(block))
    assert_bitwise(first(region)(x, key), first(block)(x, key))
    assert_bitwise(vmap(first(region))(xs, keys), vmap(first(block))(xs, keys))
    assert_bitwise(
        vmap(first(region))(xs, keys),
        torch.stack([first(block)(x, key) for x, key in zip(xs, keys, strict=True)]),
    )
    assert_close(second(region)(x, key), second(block)(x, key))
    assert_close(
        jvp(lambda x: first(region)(x, key), (x,), (xs[1],)),
        jvp(lambda x: first(block)(x, key), (x,), (xs[1],)),
    )


def test_second_derivatives_of_three_dropouts_are_bitwise() -> None:
    """grad(grad) of the block: the same operations in the same order."""
    x, key = seeded(4, 6), random.key(3)

    def second(f: Any) -> Tensor:
        def first(x: Tensor) -> Tensor:
            return torch.sin(grad(lambda x: f(x, key).sum())(x)).sum()

        return grad(first)(x)

    assert_bitwise(second(remat(three_dropouts)), second(three_dropouts))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_dtypes(dtype: torch.dtype) -> None:
    """Values and gradients in each floating dtype."""
    x, key = seeded(4, 6, dtype=dtype), random.key(4)

    def run(f: Any) -> Any:
        leaf = x.clone().requires_grad_()
        out = f(leaf, key)
        return out.detach(), torch.autograd.grad(out.sum(), leaf)

    assert_bitwise(run(remat(three_dropouts)), run(three_dropouts))


def test_in_nested_regions() -> None:
    """An inner region's draws are drawn again in the outer's recomputation."""
    inner = remat(three_dropouts, policy=policies.everything_saveable)

    def outer(f: Any) -> Any:
        return lambda x, key: f(f(x, random.fold_in(key, 0)), random.fold_in(key, 1))

    region: Any = remat(outer(inner))
    plain = outer(three_dropouts)
    x, key = seeded(4, 6), random.key(6)

    assert_bitwise(
        grad(lambda x: region(x, key).sum())(x), grad(lambda x: plain(x, key).sum())(x)
    )


def test_a_captured_key() -> None:
    """A key in a closure is an operand like any captured tensor."""
    key = random.key(8)
    region: Any = remat(lambda x: random.dropout(key, torch.sin(x), 0.5).sin())
    x = seeded(4, 6)

    found = grad(lambda x: region(x).sum())(x)

    plain = grad(lambda x: random.dropout(key, torch.sin(x), 0.5).sin().sum())(x)
    assert_bitwise(found, plain)


def test_no_draw_counts_as_implicit_randomness() -> None:
    """`rng="keys"`, the default of functions, is content with keys."""
    region = remat(three_dropouts, rng="keys")

    assert region(seeded(2, 2).requires_grad_(), random.key(0)).requires_grad


paths = st.lists(st.integers(-4, 4), max_size=4)


@hypothesis.given(
    seed=st.integers(0, 2**64 - 1), path=paths, rate=st.floats(0.05, 0.95)
)
@hypothesis.settings(max_examples=25)
def test_any_tree_recomputes_the_same_bits(
    seed: int, path: list[int], rate: float
) -> None:
    """Negative numbers are folded in, others picked from a split."""

    def block(x: Tensor, key: Tensor) -> Tensor:
        for number in path:
            key = (
                random.fold_in(key, number)
                if number < 0
                else random.split(key, 5)[number]
            )
        return torch.sin(random.dropout(key, torch.sin(x), rate))

    def run(f: Any) -> Any:
        leaf = seeded(3, 5).requires_grad_()
        return torch.autograd.grad(f(leaf, random.key(seed)).sum(), leaf)

    assert_bitwise(run(remat(block)), run(block))
