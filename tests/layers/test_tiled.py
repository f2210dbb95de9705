"""`layers.tiled`: equal to the function that it cuts, under every transform."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

from remat import (
    BudgetError,
    MutationError,
    RematWarning,
    TileError,
    checkpoint_name,
    disabled,
    plan,
    policies,
    random,
    remat,
    scan,
)
from remat.layers import Tiled, tiled
from remat.testing import assert_equivalent
from tests.support import (
    LiveBytes,
    assert_bitwise,
    assert_close,
    daily,
    grads,
    seeded,
    swept,
)

pytestmark = [
    pytest.mark.contract,
    # Forward mode's first use compiles torch's own formulas with it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

X, W, V = seeded(2, 7, 4), seeded(4, 6, seed=1), seeded(6, 4, seed=2)


def mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    hidden = checkpoint_name(F.gelu(F.layer_norm(x, (4,)) @ w), "hidden")
    return x + hidden @ v


def total(x: Tensor, w: Tensor) -> Tensor:
    return torch.logsumexp(x @ w, -1).sum()


def average(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return F.softmax(x @ w, -1).square().mean(), x.mean((0, 1))


def both(batch: dict[str, Tensor], w: Tensor) -> dict[str, Tensor]:
    """Pytrees in and out, each with one pattern."""
    return {"sum": batch["x"] + batch["y"], "product": (batch["x"] * batch["y"]) @ w}


def parts(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Results with patterns of their own."""
    return (x @ w).transpose(1, 2), (x @ w).square().sum()


ALIKE = "b (tile s) d, ... -> b (tile s) d"
CASES: dict[str, tuple[Any, str, Any, tuple[Any, ...]]] = {
    "mlp": (mlp, ALIKE, "sum", (X, W, V)),
    "total": (total, "b (tile s) d, ... ->", "sum", (X, W)),
    "average": (average, "b (tile s) d, ... ->", "mean", (X, W)),
    "pytree": (both, "... (tile s) d, ... -> ... (tile s) d", "sum", ({"x": X, "y": X.sin()}, W)),
    "parts": (parts, "b (tile s) d, ... -> b d (tile s),", "sum", (X, W)),
    "batch": (mlp, "(tile b) ..., ... -> (tile b) ...", "sum", (X, W, V)),
}  # fmt: skip


@pytest.mark.parametrize("case", daily(CASES, ("pytree",)))
@pytest.mark.parametrize("tiles", [3, *swept(["2KiB"])])
def test_equals_the_function_under_every_transform(
    case: tuple[Any, str, Any, tuple[Any, ...]], tiles: int | str
):
    f, pattern, reduce, args = case
    cut = tiled(f, pattern, tiles=tiles, reduce=reduce)

    assert_equivalent(f, cut)(*args)


@pytest.mark.filterwarnings("ignore:(?s).*traced for a tenth time")
@settings(max_examples=40)
@given(
    length=st.integers(0, 12),
    tiles=st.integers(1, 14),
    dim=st.integers(0, 2),
    reduce=st.sampled_from(["sum", "mean"]),
)
def test_any_length_in_any_number_of_tiles(
    length: int, tiles: int, dim: int, reduce: Any
):
    axes = ["a", "b", "c"]
    axes[dim] = f"(tile {axes[dim]})"
    text = " ".join(axes)
    shape = [2, 2, 2]
    shape[dim] = length
    x = seeded(*shape)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin() * x, x.square().sum() if reduce == "sum" else x.square().mean()

    if length == 0 and reduce == "mean":
        return  # the mean of nothing
    cut = tiled(f, f"{text} -> {text},", tiles=tiles, reduce=reduce)

    assert_close(cut(x), f(x))
    assert_close(grads(cut, [x]), grads(f, [x]))


def test_there_are_as_many_tiles_as_asked_for_and_the_last_may_be_smaller():
    sizes: list[int] = []

    def f(x: Tensor) -> Tensor:
        sizes.append(x.shape[0])
        return x.sin()

    with disabled():
        tiled(f, "(tile s) -> (tile s)", tiles=3)(torch.ones(8))
        tiled(f, "(tile s) -> (tile s)", tiles=5)(torch.ones(2))

    assert sizes == [3, 3, 2, 1, 1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    @tiled("b (tile s) d -> b (tile s) d", tiles=3)
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.linear(x).relu()


def test_decorates_methods_of_modules():
    block = Block()
    wanted = [block.linear.weight, block.linear.bias]
    found = torch.autograd.grad(block(X).square().sum(), wanted)
    expected = torch.autograd.grad(block.linear(X).relu().square().sum(), wanted)

    assert_close(found, expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_of_the_function(
    case: tuple[Any, str, Any, tuple[Any, ...]],
):
    f, pattern, reduce, args = case
    cut = tiled(f, pattern, tiles=3, reduce=reduce)

    assert_close(grads(cut, args), grads(f, args))


def test_takes_modules_regions_and_keywords():
    linear = nn.Linear(4, 4, dtype=torch.float64)
    region = remat(mlp, policy=policies.everything_saveable)

    assert_close(tiled(linear, "b (tile s) d -> b (tile s) d", tiles=2)(X), linear(X))
    assert tiled(region, ALIKE, tiles=2).region is region
    cut = tiled(mlp, "b (tile s) d -> b (tile s) d", tiles=2)
    assert_close(cut(X, v=V, w=W), mlp(X, W, V))


def test_is_nested_in_regions_in_scans_and_in_itself():
    cut = tiled(mlp, ALIKE, tiles=3)
    rows = tiled(cut, "(tile b) ..., ... -> (tile b) ...", tiles=2)

    def steps(f: Any, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return scan(lambda h, _: (f(h, w, v), None), x, length=3)[0]

    for inner, plain in (
        (remat(cut), mlp),
        (rows, mlp),
        (lambda *a: steps(cut, *a), lambda *a: steps(mlp, *a)),
    ):
        names = ["backward", "grad", "vmap(grad)"]
        assert_equivalent(plain, inner, transforms=names, exact=False)(X, W, V)


def test_a_region_around_sees_that_the_number_of_tiles_changed():
    loss = tiled(total, "b (tile s) d, ... -> ", tiles=2)
    around = remat(lambda x, w: loss(x, w))
    grads(around, [X, W])
    loss.tiles = 4
    assert_bitwise(grads(around, [X, W]), grads(loss, [X, W]))
    assert around.cache_info().misses == 2


def test_a_region_around_does_not_hold_what_judges_the_tiles():
    """Its backward is traced anew, when nothing is judged a second time."""
    x, up = seeded(2, 6, 8).float(), seeded(8, 16, seed=1).float()
    leaves = [x.requires_grad_(), up.requires_grad_()]

    def inner(x: Tensor) -> Tensor:
        return F.gelu(x @ up) @ up.T

    def gradients(f: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.autograd.grad(f(x).sum(), leaves)

    cut = tiled(inner, "b (tile s) d -> b (tile s) d", tiles=2)
    pairs = zip(gradients(remat(lambda x: cut(x))), gradients(inner), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.2)


def test_is_traced_by_torch_compile_without_a_break():
    cut = tiled(mlp, ALIKE, tiles=3)
    compiled = torch.compile(
        lambda x, w, v: cut(x, w, v), backend="aot_eager", fullgraph=True
    )

    assert_close(grads(compiled, [X, W, V]), grads(mlp, [X, W, V]))


@pytest.mark.parametrize(
    "options", [{"tiles": "1KiB"}, {"policy": policies.save_matmul_outputs}]
)
def test_what_needs_its_own_trace_ends_a_graph_of_torch_compile(
    options: dict[str, Any],
):
    torch.compiler.reset()  # a frame that ended once is not tried again
    cut = tiled(mlp, ALIKE, **{"tiles": 3, **options})

    def step(*args: Tensor) -> Tensor:
        return cut(*args)

    with pytest.raises(Unsupported, match="has a policy or a size in bytes"):
        torch.compile(step, backend="eager", fullgraph=True)(X, W, V)
    assert_close(torch.compile(step, backend="eager")(X, W, V), mlp(X, W, V))


@pytest.mark.parametrize("kind", ["peak", "plan", "region"])
def test_a_policy_need_hold_for_a_tile_alone(kind: str):
    """The whole, which is looked at too, may be too large for it, or another program."""
    x = seeded(64, 2, 4).requires_grad_()

    def f(x: Tensor) -> Tensor:
        return mlp(x, W, V)

    tile = seeded(4, 2, 4).requires_grad_()
    least = plan(f, budget=0)(tile).predicted_peak_bytes
    policy = (
        plan(f, budget=500)(tile).policy
        if kind == "plan"
        else policies.budget(peak=least)
    )
    options: dict[str, Any] = {} if kind == "region" else {"policy": policy}
    inner = remat(f, policy=policy) if kind == "region" else f
    cut = tiled(inner, "(tile b) s d -> (tile b) s d", tiles=16, **options)

    assert_close(grads(cut, [x]), grads(f, [x]))


def test_a_policy_beside_a_region_has_no_effect_and_warns():
    region = remat(mlp)

    with pytest.warns(RematWarning, match=r"has no effect.*keeps its own policy"):
        cut = tiled(region, ALIKE, tiles=3, policy=policies.everything_saveable)
    assert_close(cut(X, W, V), mlp(X, W, V))


def test_captured_tensors_get_the_sum_of_the_tiles_gradients():
    w = W.clone().requires_grad_()
    cut = tiled(lambda x: x @ w, "b (tile s) d -> b (tile s) d", tiles=3)
    found = torch.autograd.grad(cut(X).sin().sum(), w)

    assert_close(found, torch.autograd.grad((X @ w).sin().sum(), w))


def test_policies_say_what_a_tile_saves():
    def held(policy: Any) -> int:
        cut = tiled(mlp, ALIKE, tiles=3, policy=policy)
        args = [each.clone().requires_grad_() for each in (X, W, V)]
        cut(*args)
        with LiveBytes() as memory:
            out = cut(*args)
            memory.reset_peak()
            return memory.live - out.nbytes

    # The seven rows of two examples, six hidden values of eight bytes each.
    assert held(policies.save_only_these_names("hidden")) - held(None) == 7 * 2 * 6 * 8


def test_each_tile_draws_numbers_of_its_own():
    def f(x: Tensor, key: Tensor) -> Tensor:
        return random.dropout(key, x, 0.5)

    key = random.key(0)
    ones = torch.ones(6, 32)
    found = tiled(f, "(tile s) d, ... -> (tile s) d", tiles=3)(ones, key)
    expected = [f(ones[:2], random.fold_in(key, tile)) for tile in range(3)]

    assert torch.equal(found, torch.cat(expected))
    assert not torch.equal(found[:2], found[2:4])


def test_copies_and_pickles_and_shows_how_it_was_made():
    cut = tiled(total, "b (tile s) d, ... ->", tiles="1KiB")
    for other in (pickle.loads(pickle.dumps(cut)), copy.deepcopy(cut)):
        assert isinstance(other, Tiled)
        assert_close(other(X, W), total(X, W))

    assert cut.__name__ == "total"
    assert "tiles='1KiB', reduce='sum', policy=None)" in repr(cut)


LONG = seeded(1, 512, 16)
WIDE, BACK = seeded(16, 128, seed=1), seeded(128, 16, seed=2)


def hidden_layer(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(x @ w) @ v


def _gradient(f: Any) -> Any:
    return torch.func.grad(lambda *args: f(*args).sum(), (0, 1, 2))


def _pushed(f: Any, args: Any) -> Any:
    return torch.func.jvp(_gradient(f), (*args,), tuple(each.cos() for each in args))


def _mapped(f: Any, args: Any) -> Any:
    x, w, v = args
    return torch.vmap(_gradient(f), (0, None, None))(torch.stack([x, -x]), w, v)


#: Steps of a function at its arguments, each with how many gradients it holds.
STEPS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "backward": (lambda f, args: torch.autograd.grad(f(*args).sum(), args), 1),
    "grad": (lambda f, args: _gradient(f)(*args), 1),
    "vmap(grad)": (_mapped, 2),
    "jvp(grad)": (_pushed, 2),
}


def peak(f: Any, way: str) -> int:
    """The most that lives in a step."""
    wanted = way == "backward"
    args = [each.clone().requires_grad_(wanted) for each in (LONG, WIDE, BACK)]
    step, _ = STEPS[way]
    step(f, args)
    with LiveBytes() as memory:
        step(f, args)
        return memory.peak


@pytest.mark.filterwarnings("ignore:(?s).*traced for a tenth time")
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize(
    "way", daily({way: way for way in STEPS}, STEPS.keys() - {"jvp(grad)"})
)
def test_the_working_set_falls_with_the_number_of_tiles(way: str):
    """What a tile computes falls as one over the number; what is held once stays."""
    times = STEPS[way][1]
    hidden = LONG.numel() // 16 * 128 * 8
    whole = peak(hidden_layer, way)
    found = {
        tiles: peak(tiled(hidden_layer, ALIKE, tiles=tiles), way)
        for tiles in (1, 2, 4, 8, 16, 32)
    }
    constant = found[32] - (found[16] - found[32])
    for tiles, size in found.items():
        # Two hidden values of a tile and its part of the results.
        assert abs((size - constant) * tiles - (found[1] - constant)) <= 0.1 * found[1]
    assert found[1] - constant >= 2 * hidden
    # Results and gradients, each twice: the tiles', and put together.
    own = 4 * LONG.nbytes + 4 * (WIDE.nbytes + BACK.nbytes)
    assert constant <= times * own
    assert whole >= found[1]


def test_a_decoder_of_images_runs_by_frames():
    """It mixes the places of an image; its peak falls to that of some frames."""
    torch.manual_seed(0)
    up = nn.Upsample(scale_factor=2)
    first, last = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
    decoder = nn.Sequential(first, nn.GroupNorm(4, 16), nn.SiLU(), up, last).double()
    latents = seeded(16, 4, 8, 8).requires_grad_()

    def step(f: Any) -> tuple[int, list[Tensor]]:
        with LiveBytes() as memory:
            loss = f(latents).square().sum()
            found = torch.autograd.grad(loss, [latents, *decoder.parameters()])
            return memory.peak, [loss, *found]

    cut = tiled(decoder, "(tile n) c h w -> (tile n) c h w", tiles=8)
    step(cut)
    (most, expected), (least, found) = step(decoder), step(cut)

    assert_close(found, expected)
    assert least <= most / 3


@pytest.mark.filterwarnings("ignore:(?s).*traced for a tenth time")
def test_a_size_chooses_the_fewest_tiles_within_it():
    args = [each.clone().requires_grad_() for each in (LONG, WIDE, BACK)]
    limit = 256 * 2**10
    length = tiled(hidden_layer, ALIKE, tiles=f"{limit // 1024}KiB").length_of_tile(
        *args
    )

    def working(length: int) -> int:
        part = [args[0][:, :length].detach().requires_grad_(), *args[1:]]
        out = remat(hidden_layer)(*part)
        with LiveBytes() as memory:
            torch.autograd.grad(out, part, torch.ones_like(out))
            return memory.peak

    assert working(length) <= limit < working(-(-512 // (512 // length - 1)))


def changes_buffers() -> nn.Module:
    return nn.BatchNorm1d(4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: tiled(mlp, "b s d -> b s d", tiles=2), TileError, "No argument has the axis"),
        (lambda: tiled(mlp, "b (s tile) d -> b s d", tiles=2), TileError, "consecutive tiles"),
        (lambda: tiled(mlp, "b (tile s d", tiles=2), TileError, 'no string with one "->"'),
        (lambda: tiled(mlp, "b (tile s -> b", tiles=2), TileError, "einops cannot read it"),
        (lambda: tiled(mlp, ALIKE, tiles=0), ValueError, "at least 1"),
        (lambda: tiled(mlp, ALIKE, tiles="0B"), ValueError, "The values of no tile"),
        (lambda: tiled(mlp, ALIKE, tiles="many"), ValueError, "cannot be read"),
        (lambda: tiled(mlp, ALIKE, tiles=2, reduce=cast("Any", "max")), ValueError, "It can be 'sum', 'mean'"),
        (lambda: tiled(mlp, "b (tile s) d -> b (tile s) d", tiles=2)(X, W, V),
         TileError, "got 3 positional arguments for 1 patterns"),
        (lambda: tiled(mlp, "(tile s) d, ... -> (tile s) d", tiles=2)(X, W, V),
         TileError, "has 3 dimensions"),
        (lambda: tiled(torch.add, "(tile s), (tile s) -> (tile s)", tiles=2)(X[0, 0], X[0, :, 0]),
         TileError, r"the lengths \[4, 7\]"),
        (lambda: tiled(mlp, ALIKE, tiles="100B")(X, W, V), BudgetError, "one step take"),
        (lambda: tiled(total, "b (tile s) d, ... ->", tiles=2, reduce="mean")(X, W),
         TileError, "no mean over it.*but its sum"),
        (lambda: tiled(mlp, "b (tile s) d, ... -> b s (tile d)", tiles=2)(X, W, V),
         TileError, "not cut along its dimension 2.*has it in dimension 1"),
        (lambda: tiled(lambda x, w: w.sum(), "(tile s) ..., ... ->", tiles=2)(X, W),
         TileError, "the same for all tiles"),
        (lambda: tiled(parts, "b (tile s) d, ... -> b d (tile s), , ", tiles=2)(X, W),
         TileError, "does not have 3 parts"),
        (lambda: tiled(changes_buffers(), "(tile n) d -> (tile n) d", tiles=2)(X[0]),
         MutationError, "changes a buffer"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=f"(?s){text}"):
        make()


def _sine_and_squares(reduce: str) -> Any:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        square = x.square()
        return x.sin() * x, square.sum() if reduce == "sum" else square.mean()

    return f


def test_what_was_traced_before_changes_nothing() -> None:
    """One trace may know cotangents of a layout more than another of the same function."""
    first, second = "(tile s) n d -> (tile s) n d,", "b (tile s) d -> b (tile s) d,"
    cases: list[tuple[str, tuple[int, ...], int, Any]] = [
        (first, (2, 2, 2), 2, "sum"),
        (first, (2, 2, 2), 10, "mean"),
        (second, (2, 1, 2), 8, "mean"),
        (first, (10, 2, 2), 7, "sum"),
    ]
    for pattern, shape, tiles, reduce in cases:
        x, f = seeded(*shape), _sine_and_squares(reduce)
        cut = tiled(f, pattern, tiles=tiles, reduce=reduce)
        assert_close(cut(x), f(x))
        assert_close(grads(cut, [x]), grads(f, [x]))
