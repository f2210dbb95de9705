"""`dynamic_shapes=True`: one trace serves all sizes of the dimensions that vary.

The oracle is the plain function at each size, to the last bit, and beside it the region
without the option, whose programs must be the same text. How often the function's Python
runs is counted by the function itself.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import checkpoint_name, policies, random, remat, scan, storage
from remat.random import key
from remat.testing import assert_equivalent
from tests.support import assert_bitwise, assert_close, daily, run, seeded, swept
from tests.tracing.sizes import HEADS, WIDTH, quiet, sequence, traced

pytestmark = [
    # Tests count runs by an iterator.
    pytest.mark.filterwarnings(r"ignore:.*\(count\) is read:remat.RematWarning"),
    # Small functions save too little for some policies to matter.
    pytest.mark.filterwarnings("ignore:.*saves no memory:remat.RematWarning"),
    # What torch says of itself when forward mode or vmap is first used.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]
WEIGHT = seeded(WIDTH, WIDTH, seed=3)
RUNS = itertools.count()


def runs() -> int:
    """How often a function that counts has run since this was asked before."""
    return next(RUNS)


def params() -> dict[str, Tensor]:
    """The parameters of `block`."""
    shapes = {
        "ln": (WIDTH,),
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 2 * WIDTH),
        "down": (2 * WIDTH, WIDTH),
    }
    return {
        name: seeded(*shape, seed=seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def block(x: Tensor, p: dict[str, Tensor], drop: Tensor) -> Tensor:
    """A transformer block whose sizes are all read from its argument."""
    b, s, d = x.shape
    y = F.layer_norm(x, (d,), p["ln"])
    q, k, v = (
        each.reshape(b, s, HEADS, -1).transpose(1, 2)
        for each in (y @ p["qkv"]).chunk(3, -1)
    )
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    a = checkpoint_name(a.transpose(1, 2).reshape(b, s, -1), "attn")
    x = x + random.dropout(random.fold_in(drop, 0), a @ p["out"], rate=0.1)
    return x + F.gelu(x @ p["up"]) @ p["down"]


def rotated(x: Tensor) -> Tensor:
    """Rotary positions, from arange of the length."""
    _, s, d = x.shape
    angles = torch.arange(s)[:, None] * torch.arange(1.0, d // 2 + 1)
    left, right = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1).sin()


def masked(x: Tensor) -> Tensor:
    """Attention by hand, with a mask made from the length."""
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    scores = torch.einsum("bsd,btd->bst", x.sin(), x)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ x


def convolved(x: Tensor) -> Tensor:
    """A convolution over the length."""
    kernel = WEIGHT[:, :, None].expand(WIDTH, WIDTH, 3)
    return F.conv1d(x.mT, kernel, padding=1).tanh()


def halved(x: Tensor) -> Tensor:
    """Parts whose sizes are computed, and parts of equal size."""
    half = x.shape[1] // 2
    first, rest = x.sin().split([half, x.shape[1] - half], 1)
    return torch.cat([rest.cos(), first], 1) + torch.cat(x.chunk(2, 1)[::-1], 1)


def averaged(x: Tensor) -> Tensor:
    """Numbers that are no whole ones: their roundings are the function's."""
    return x.sin().mean(1) * x.shape[1] ** 0.5 / (x.shape[0] * 0.1 * 3.0)


def in_place(x: Tensor) -> Tensor:
    """Writes to what was made inside."""
    return x.sin().mul_(2.0).add_(x)


def padded(x: Tensor) -> Tensor:
    """Zeros beside what is given, and up to a multiple of four; windows with a stride."""
    x = F.pad(x.sin(), (0, 0, 2, 1))
    x = F.pad(x, (0, 0, 0, -x.shape[1] % 4))
    return F.conv1d(x.mT, WEIGHT[:, :, None], stride=2).unflatten(-1, (-1, 2)).cos()


def turned(x: Tensor) -> Tensor:
    """Rotary positions by complex numbers."""
    pairs = torch.view_as_complex(x.sin().unflatten(-1, (-1, 2)))
    angles = torch.outer(torch.arange(x.shape[1]).double(), WEIGHT[0, : WIDTH // 2])
    return torch.view_as_real(pairs * torch.polar(torch.ones(()).double(), angles))


def pooled(x: Tensor) -> Tensor:
    """Windows over both dimensions."""
    return F.avg_pool2d(F.max_pool2d(x[:, None].sin(), 3, 1, padding=1), 3, 1, 1)


def looked_up(x: Tensor) -> Tensor:
    """Positions from a captured table, which keeps its size."""
    return x + F.embedding(torch.arange(x.shape[1]), TABLE).sin()


TABLE = seeded(64, WIDTH, seed=4)
FUNCTIONS = (
    rotated, masked, convolved, averaged, in_place, padded, turned, pooled, looked_up
)  # fmt: skip
# The first has as many sequences as positions, by chance.
SIZES = ((4, 4), (2, 5), (3, 8), (8, 3), (5, 64), (4, 7), (2, 2))


@pytest.mark.contract
@pytest.mark.parametrize("fun", FUNCTIONS)
def test_every_size_has_the_plain_bits_of_one_trace(fun: Callable[..., Tensor]) -> None:
    """Sizes that were equal in the first call, and are not in others, too."""
    region = traced(fun)

    for size in SIZES:
        x = sequence(*size)
        assert_bitwise(run(region, (x,)), run(fun, (x,)))

    assert region.cache_info().misses == 1
    assert region.cache_info().hits == len(SIZES) - 1
    assert region.cache_info().currsize == len(region.cache_info().trace_s) == 1


# `rotated` is not among them: an index that takes everything is a view more in its trace.
@pytest.mark.parametrize(
    "fun", [masked, in_place, *swept([convolved, averaged, halved])]
)
def test_programs_are_those_of_a_trace_of_one_size(fun: Callable[..., Tensor]) -> None:
    """A size costs nothing at run time: it has the program that it would have had."""
    region, static = traced(fun), remat(fun)

    for size in SIZES[:4]:
        found = region.programs(sequence(*size))
        assert list(map(str, found)) == list(map(str, static.programs(sequence(*size))))


@pytest.mark.contract
def test_a_sweep_of_lengths_traces_once() -> None:
    """Ten lengths: one trace with the option, one a length without."""
    region, static = traced(block), traced(block, dynamic_shapes=False)
    p, drop = params(), key(0)

    for length in range(2, 12):
        quiet(region, sequence(2, length), p, drop)
    for length in (3, 4, 3):
        quiet(static, sequence(2, length), p, drop)

    assert (region.cache_info().misses, region.cache_info().hits) == (1, 9)
    assert (static.cache_info().misses, static.cache_info().hits) == (2, 1)


@pytest.mark.sweep
def test_a_block_at_lengths_to_64() -> None:
    """Odd batches among them; length 1 is a trace of its own: torch broadcasts by it."""
    region = traced(block)
    p, drop = params(), key(0)

    for length in (*range(1, 9), *(16, 31, 64)):
        args = (sequence(2 + length % 3, length), p, drop)
        assert_bitwise(run(region, args), run(block, args))

    assert region.cache_info().misses == 2


POLICIES = {
    "names": policies.save_only_these_names("attn"),
    "budget": policies.budget(0.5),
    "stored": policies.save_only_these_names("attn").stored(storage.Sparse()),
}


@pytest.mark.parametrize("policy", daily(POLICIES, ["budget"]))
def test_a_policy_sees_the_sizes_of_each_call(policy: Any) -> None:
    """What is saved is what it is without the option, byte by byte."""
    region = traced(block, policy=policy)
    static = remat(block, policy=policy)

    for length in (4, 16):
        args = (sequence(2, length), params(), key(0))
        assert_bitwise(run(region, args), run(block, args))
        assert region.saved_residuals(*args) == static.saved_residuals(*args)

    assert region.cache_info().misses == 1


TRANSFORMS = ("backward", "grad", "vmap(grad)", "grad(grad)", "jvp", "grad(vmap)")


@pytest.mark.contract
@pytest.mark.parametrize("fun", [*swept([rotated]), masked])
def test_every_transform_at_every_length(fun: Callable[..., Tensor]) -> None:
    """Each size is a region like any other."""
    region = traced(fun)

    for length in (3, 5):
        found = assert_equivalent(fun, region, transforms=TRANSFORMS)(
            sequence(3, length)
        )
        assert found.compared == TRANSFORMS


def counted(x: Tensor, w: Tensor) -> Tensor:
    """Counts how often it runs in Python."""
    next(RUNS)
    return torch.tanh(x.sin() @ w).sin()


DERIVED = {
    "transposed": lambda f: (
        lambda x, w: torch.autograd.grad(
            f(x, w), x, seeded(x.shape[2], x.shape[1], x.shape[0]).permute(2, 1, 0)
        )
    ),
    "grad(grad)": lambda f: torch.func.grad(
        lambda x, w: torch.func.grad(lambda y: f(y, w).sum())(x).square().sum()
    ),
    "jvp": lambda f: lambda x, w: torch.func.jvp(lambda y: f(y, w), (x,), (x,)),
}


@pytest.mark.contract
@pytest.mark.parametrize("derive", daily(DERIVED, ["jvp", "grad(grad)"]))
def test_what_is_derived_is_traced_for_all_sizes_too(derive: Any) -> None:
    """A backward for other cotangents, a second derivative, a pushforward."""
    derived = derive(traced(counted))
    given = [(sequence(b, s), WEIGHT.clone()) for b, s in ((2, 3), (3, 5), (4, 9))]

    def ran(x: Tensor, w: Tensor) -> int:
        before = runs()
        derived(x.requires_grad_(), w.requires_grad_())
        return runs() - before - 1

    first, *others = [ran(*each) for each in given]

    assert first > 0
    assert others == [0, 0]


@pytest.mark.contract
def test_a_condition_that_has_no_value_does_not_hold() -> None:
    """As of a remainder, where the size is zero."""

    def halves(x: Tensor) -> Tensor:
        return (x.flatten(0, 1).view(x.shape[0], -1, 4) if x.numel() else x).sin()

    region = remat(halves, dynamic_shapes=True)
    for length in (2, 3, 0, 2):
        x = seeded(length, 5, 4).requires_grad_()
        assert_bitwise(region(x), halves(x))


@pytest.mark.contract
def test_sizes_among_what_is_returned() -> None:
    """Each call has its own."""
    region = traced(lambda x: (x.sin(), x.shape[1] * 2, x.shape))

    for length in (3, 5):
        _, doubled, shape = region(sequence(2, length).requires_grad_())
        assert (type(doubled), doubled) == (int, 2 * length)
        assert shape == (2, length, WIDTH)


LAYOUTS = {
    "transposed": lambda b, s: seeded(s, b, WIDTH).transpose(0, 1),
    "sliced": lambda b, s: seeded(b, s, WIDTH + 3)[..., 1:-2],
    "expanded": lambda b, s: seeded(1, s, WIDTH).expand(b, s, WIDTH),
}


def test_each_layout_is_traced_once() -> None:
    """Strides are part of what a trace holds for."""
    region = traced(masked)

    for make in LAYOUTS.values():
        for size in ((2, 3), (3, 5), (5, 9)):
            args = (make(*size),)
            assert_bitwise(run(region, args), run(masked, args))

    assert region.cache_info().misses == len(LAYOUTS)


class Mixer(nn.Module):
    """Parameters and buffers that are captured."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x of shape (batch, length, WIDTH)."""
        return self.norm(self.conv(x.mT)).mT.tanh()


@pytest.mark.contract
def test_modules_keep_their_parameters_and_write_their_buffers_once() -> None:
    """Their sizes are constants of the trace; their values are read at each call."""
    torch.manual_seed(0)
    plain = Mixer().double()
    other = Mixer().double()
    other.load_state_dict(plain.state_dict())
    region = traced(other)

    for size in SIZES[:4]:
        args = (sequence(*size),)
        assert_bitwise(run(region, args), run(plain, args))
        for a, b in zip(plain.parameters(), other.parameters(), strict=True):
            assert_bitwise(a.grad, b.grad)
        for a, b in zip(plain.buffers(), other.buffers(), strict=True):
            assert_bitwise(a, b)

    assert region.cache_info().misses == 1


NESTED = {"static in dynamic": (False, True), "dynamic in static": (True, False)}


@pytest.mark.contract
@pytest.mark.parametrize(("inside", "around"), NESTED.values(), ids=NESTED)
def test_regions_inside_each_other(inside: bool, around: bool) -> None:
    """The inner bounds hold at each size, and the programs are those of static regions."""
    inner = remat(lambda x: (x @ WEIGHT).sin().sin(), dynamic_shapes=inside)
    static = remat(lambda x: (x @ WEIGHT).sin().sin())

    def over(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: f(f(x) * 2).cos()

    region, plain = remat(over(inner), dynamic_shapes=around), remat(over(static))

    for size in SIZES[:4]:
        args = (sequence(*size),)
        assert_bitwise(run(region, args), run(plain, args))
        if around:
            programs = zip(region.programs(*args), plain.programs(*args), strict=True)
            assert all(a.operators == b.operators for a, b in programs)

    assert (region if around else inner).cache_info().misses == 1


def test_the_trace_around_holds_nothing_of_how_sizes_are_opened() -> None:
    """Its next trace, for other cotangents, finds the inner one and differed from the first."""
    w, x = seeded(4, 4).requires_grad_(), seeded(5, 4, seed=1)
    inner = remat(lambda w, x: (x @ w).tanh(), dynamic_shapes=True)

    def step(f: Callable[..., Tensor], w: Tensor) -> tuple[Tensor, Tensor]:
        gradient = torch.func.grad(lambda w: f(w, x).square().sum())(w)
        return w - gradient, w.sum()

    def of_transposed(f: Callable[..., Any]) -> Tensor:
        return torch.autograd.grad((f(w)[0].T * w).sum(), w)[0]

    region = remat(lambda w: step(inner, w))
    expected = of_transposed(lambda w: step(lambda w, x: (x @ w).tanh(), w))
    assert_close(of_transposed(region), expected)
    assert not any("empty" in each for each in region.programs(w)[0].operators)


def test_a_scan_over_a_dynamic_body() -> None:
    """Layers of one length after another."""
    weights = torch.stack([WEIGHT, WEIGHT.T, WEIGHT * 0.5])
    body = remat(lambda carry, w: ((carry @ w).tanh(), None), dynamic_shapes=True)

    def fun(x: Tensor, ws: Tensor) -> Tensor:
        return scan(body, x, ws)[0]

    def plain(x: Tensor, ws: Tensor) -> Tensor:
        for w in ws:
            x = (x @ w).tanh()
        return x

    for size in SIZES[:3]:
        args = (sequence(*size), weights)
        torch.testing.assert_close(run(fun, args), run(plain, args))


def test_verification_compares_at_each_size() -> None:
    """verify=True under open sizes."""
    region = traced(masked, policy=policies.save_matmul_outputs, verify=True)

    for size in SIZES[:2]:
        args = (sequence(*size),)
        assert_bitwise(run(region, args), run(masked, args))


def test_open_sizes_of_a_function_that_is_run_again() -> None:
    """The other engine has no trace that could serve them."""
    with pytest.raises(ValueError, match="no effect with this engine"):
        traced(masked, engine="rerun")


def test_the_option_is_true_or_false() -> None:
    """Not a list of dimensions, as elsewhere."""
    with pytest.raises(ValueError, match="dynamic_shapes="):
        remat(masked, dynamic_shapes={"x": 1})  # pyright: ignore[reportCallIssue, reportArgumentType]


@pytest.mark.contract
@pytest.mark.parametrize("bounds", [(2, 7), (7,), ()])
def test_a_draw_between_bounds(bounds: tuple[int, ...]) -> None:
    """`Tensor.random_(2, 7)`: torch.fx cannot write its argument `from` as Python."""

    def fun(x: Tensor) -> Tensor:
        return x.sin() * torch.empty_like(x).random_(*bounds)

    args = (seeded(6),)
    torch.manual_seed(0)
    expected = run(fun, args)
    torch.manual_seed(0)
    assert_bitwise(run(remat(fun, rng="preserve"), args), expected)


def test_a_region_traced_inside_of_one_of_open_sizes_serves_others() -> None:
    """The next trace compared sizes with the symbols of the former, and recorded that."""
    inner, x = remat(lambda x, y: x.sin() * y), seeded(3, 4).requires_grad_()
    around = remat(lambda x, y: inner(x, y), dynamic_shapes=True)
    around(x, x.detach())

    def second(fun: Any) -> Tensor:
        slope = torch.func.grad(lambda x: fun(x, x.detach()).sin().sum())
        return torch.func.jvp(slope, (x.detach(),), (x.detach(),))[1]

    plain = remat(lambda x, y: inner(x.sin(), y))
    assert_bitwise(plain(x, x.detach()), x.sin().sin() * x.detach())
    assert_close(second(around), second(lambda x, y: x.sin() * y))


@pytest.mark.filterwarnings("ignore:.*in spite of dynamic_shapes")
def test_a_tangent_inside_of_three_regions_for_other_cotangents() -> None:
    """One of its traces has zeros that nobody reads, for what has no tangent."""

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x.tanh(), (4,))

    everything = policies.everything_saveable
    inner: Any = remat(norm, dynamic_shapes=True, policy=everything)
    middle: Any = remat(lambda x: inner(x).sin())

    def slope(fun: Any) -> Any:
        return lambda x: torch.func.jvp(fun, (x,), (x.cos(),))[1]

    pushed = slope(middle)
    outer: Any = remat(pushed, dynamic_shapes=True)
    plain = slope(lambda x: norm(x).sin())
    for rows in (3, 5):
        x = seeded(rows, 4).requires_grad_()
        for cotangent in (torch.ones(rows, 4), seeded(4, rows, seed=1).t()):
            (found,) = torch.autograd.grad(outer(x), x, cotangent.to(x.dtype))
            (expected,) = torch.autograd.grad(plain(x), x, cotangent.to(x.dtype))
            assert_close(found, expected)
