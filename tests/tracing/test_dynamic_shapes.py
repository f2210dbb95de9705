"""`dynamic_shapes=True`: one trace serves all sizes of the dimensions that vary.

The oracle is the plain function at each size, to the last bit, and beside it the region
without the option, whose programs must be the same text. How often the function's Python
runs is counted by an iterator, which no trace looks into.
"""

import functools
import itertools
import json
import numbers
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import (
    RematWarning,
    TraceError,
    checkpoint_name,
    policies,
    random,
    remat,
    scan,
    storage,
)
from remat.random import key
from remat.testing import assert_equivalent
from tests.support import assert_bitwise, run, seeded

pytestmark = [
    # Small functions save too little for some policies to matter.
    pytest.mark.filterwarnings("ignore:.*saves no memory:remat.RematWarning"),
    # What torch says of itself when forward mode or vmap is first used.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]

WIDTH, HEADS = 8, 2
WEIGHT = seeded(WIDTH, WIDTH, seed=3)
RUNS = itertools.count()


def runs() -> int:
    """How often a function that counts has run since this was asked before."""
    return next(RUNS)


def sequence(batch: int, length: int, seed: int = 0) -> Tensor:
    """A batch of sequences: (batch, length, WIDTH)."""
    return seeded(batch, length, WIDTH, seed=seed)


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


def traced(
    fun: Callable[..., Any], *, dynamic_shapes: bool = True, **options: Any
) -> Any:
    """The region of a function, of which no test before has left a trace."""
    region = remat(fun, dynamic_shapes=dynamic_shapes, **options)
    region.cache_clear()
    return region


def quiet(region: Any, *args: Any) -> None:
    """Runs it forward and backward; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(region, args)


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
@pytest.mark.parametrize("fun", [masked, convolved, averaged, in_place, halved])
def test_programs_are_those_of_a_trace_of_one_size(fun: Callable[..., Tensor]) -> None:
    """A size costs nothing at run time: it has the program that it would have had."""
    region, static = traced(fun), remat(fun)

    for size in SIZES[:4]:
        found = region.programs(sequence(*size))
        assert list(map(str, found)) == list(map(str, static.programs(sequence(*size))))


@pytest.mark.contract
def test_a_sweep_of_lengths_traces_once() -> None:
    """Twenty lengths: one trace with the option, one a length without."""
    region, static = traced(block), traced(block, dynamic_shapes=False)
    p, drop = params(), key(0)

    for length in range(2, 22):
        quiet(region, sequence(2, length), p, drop)
    for length in (3, 4, 3, 4, 5):
        quiet(static, sequence(2, length), p, drop)

    assert (region.cache_info().misses, region.cache_info().hits) == (1, 19)
    assert (static.cache_info().misses, static.cache_info().hits) == (3, 2)


def test_a_block_at_lengths_to_64() -> None:
    """Odd batches among them; length 1 is a trace of its own: torch broadcasts by it."""
    region = traced(block)
    p, drop = params(), key(0)

    for length in (*range(1, 13), *(15, 16, 17, 31, 32, 33, 63, 64)):
        args = (sequence(2 + length % 3, length), p, drop)
        assert_bitwise(run(region, args), run(block, args))

    assert region.cache_info().misses == 2


POLICIES = {
    "names": policies.save_only_these_names("attn"),
    "budget": policies.budget(0.5),
    "stored": policies.save_only_these_names("attn").stored(storage.Sparse()),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
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
@pytest.mark.parametrize("fun", [rotated, masked])
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
@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
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
def test_a_branch_on_a_size_is_traced_on_both_sides() -> None:
    """Once on each; nothing is said, as both serve many sizes."""

    def fun(x: Tensor) -> Tensor:
        return x.sin().sin() if x.shape[1] > 8 else x.cos().cos()

    region = traced(fun)

    for length in (3, 12, 5, 20, 8, 9):
        quiet(region, sequence(2, length))
        args = (sequence(3, length),)
        assert_bitwise(run(region, args), run(fun, args))

    assert region.cache_info().misses == 2


def looped(x: Tensor) -> Tensor:
    """Needs the length as a number, and the batch size not."""
    for position in range(x.shape[1]):
        x = x.sin() + position
    return x


@pytest.mark.contract
def test_a_size_that_is_needed_as_a_number_is_traced_anew_and_said_once() -> None:
    """The first call cannot know that it will vary; the batch size stays open."""
    region = traced(looped)
    quiet(region, sequence(2, 3))
    quiet(region, sequence(4, 3))
    with pytest.warns(RematWarning, match=r"looped .*each size of dimension 1 of `x`"):
        run(region, (sequence(2, 4),))
    for length in (5, 6):
        quiet(region, sequence(2, length))
        args = (sequence(3, length),)
        assert_bitwise(run(region, args), run(looped, args))

    assert region.cache_info().misses == 4


@pytest.mark.contract
def test_what_cannot_be_traced_with_open_sizes_is_traced_for_each() -> None:
    """A size as the key of a dict: the warning repeats what torch says."""

    def fun(x: Tensor) -> Tensor:
        return {x.shape[1]: x.sin()}[x.shape[1]].cos()

    region = traced(fun)

    with pytest.warns(RematWarning, match="for each size, in spite .* unhashable"):
        run(region, (sequence(2, 3),))
    quiet(region, sequence(2, 4))
    args = (sequence(2, 5),)
    assert_bitwise(run(region, args), run(fun, args))
    assert region.cache_info().misses == 3


SCALES = {"3": 2.0, "4": 3.0, "(2, 5, 8)": 4.0, "1.5": 5.0, "2.00": 6.0, "  5": 7.0}
TEXTS: dict[str, Callable[[Tensor], str]] = {
    "f-string": lambda x: f"{x.shape[1]}",
    "width": lambda x: f"{x.shape[1]:>3d}",
    "quotient": lambda x: f"{x.shape[1] / 2}",
    "digits": lambda x: f"{x.shape[1] / 2:.2f}",
    "str": lambda x: str(x.shape[1]),
    "repr": lambda x: repr(x.shape[1]),
    "percent": lambda x: "%s" % x.shape[1],  # noqa: UP031
    "shape": lambda x: str(tuple(x.shape)),
    "json": lambda x: json.dumps(list(x.shape)),
}


@pytest.mark.contract
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_of_a_size_is_that_of_each(text: Callable[[Tensor], str]) -> None:
    """In keys and in what is returned: a symbol's own text would be silently wrong."""

    def fun(x: Tensor) -> tuple[Tensor, str]:
        return x.sin() * SCALES.get(text(x), 9.0), text(x)

    region, told = traced(fun), list[str]()

    for length in (3, 4, 5):
        x = sequence(2, length)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", RematWarning)
            assert region(x.requires_grad_())[1] == text(x)
        told += [str(each.message) for each in said]
        first, plain = (lambda x: region(x)[0]), (lambda x: fun(x)[0])
        assert_bitwise(run(first, (x,)), run(plain, (x,)))

    assert sum("is traced for each size" in each for each in told) == 1


SCALED: dict[str, Callable[[Tensor], Any]] = {
    "json": lambda x: json.loads(json.dumps({"n": [x.shape[1]]}, default=str))["n"],
    "indented": lambda x: json.loads(
        json.dumps([x.shape[1] / 2], default=str, indent=1)
    ),
    "array": lambda x: np.array([x.shape[1], 2]).astype(np.float32).tolist(),
    "array of quotients": lambda x: np.array([x.shape[1] / 2]).tolist(),
    "dtype": lambda x: [2.0 if np.asarray(x.shape[1]).dtype == np.int64 else 3.0],
    "is True": lambda x: [2.0 if (x.shape[1] > 3) is True else 3.0],
    "is False": lambda x: [2.0 if (x.shape[1] / 2 <= 1.5) is False else 3.0],
    "type": lambda x: [2.0 if type(x.shape[1] == 4) is bool else 3.0],
    "not equal": lambda x: [2.0 if (x.shape[1] != 5) is True else 3.0],
    "equal sizes": lambda x: [2.0 if (x.shape[0] == x.shape[1]) is True else 3.0],
}


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.parametrize("scale", SCALED.values(), ids=SCALED)
def test_a_size_is_to_others_what_a_number_is(scale: Callable[..., Any]) -> None:
    """To json, to numpy, and to who asks whether a comparison is True itself."""

    def fun(x: Tensor) -> Tensor:
        return x.sin() * sum(scale(x))

    region = traced(fun)

    for length in (3, 4, 5, 2):
        x = sequence(2, length)
        assert_bitwise(run(region, (x,)), run(fun, (x,)))


def test_a_comparison_is_traced_on_both_sides() -> None:
    """One trace for each answer, not for each size."""
    region = traced(lambda x: x.sin() if (x.shape[1] > 5) is True else x.cos())

    for length in range(3, 9):
        region(sequence(2, length).requires_grad_())

    assert region.cache_info().misses == 2


@functools.singledispatch
def kind_of(number: object) -> float:
    """What a number is, to who asks by `singledispatch`."""
    return 7.0


kind_of.register(int)(lambda number: 2.0 + number)


def matched(number: object) -> float:
    """What a number is, to who asks by `match`."""
    match number:
        case int():
            return 2.0
        case _:
            return 3.0


KINDS: dict[str, Callable[[Tensor], float]] = {
    "int": lambda x: 2.0 if isinstance(x.shape[1], int) else 3.0,
    "no bool": lambda x: 2.0 if isinstance(x.shape[1], bool) else 3.0,
    "integral": lambda x: 2.0 if isinstance(x.shape[1], numbers.Integral) else 3.0,
    "float": lambda x: 2.0 if isinstance(x.shape[1] / 2, float) else 3.0,
    "bool": lambda x: 2.0 if isinstance(x.shape[1] > 2, bool) else 3.0,
    "match": lambda x: matched(x.shape[1]),
    "singledispatch": lambda x: kind_of(x.shape[1]),
}


@pytest.mark.contract
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_size_is_a_number_to_who_asks(kind: Callable[[Tensor], float]) -> None:
    """And stays open: all sizes have one trace."""

    def fun(x: Tensor) -> Tensor:
        return x.sin() * kind(x)

    region = traced(fun)

    for length in (3, 5, 4):
        args = (sequence(2, length),)
        assert_bitwise(run(region, args), run(fun, args))

    assert region.cache_info().misses == 1


def test_symbols_are_as_they_were_outside_of_a_trace() -> None:
    """What they answer in a trace is undone, also where the trace has failed."""
    before = [vars(kind).copy() for kind in SYMBOLS]

    with pytest.raises(TraceError):
        traced(lambda x: x.sin() if x.sum() > 0 else x)(sequence(2, 3).requires_grad_())

    assert [vars(kind) for kind in SYMBOLS] == before


SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
ROUNDED: dict[str, Callable[[Tensor], Any]] = {
    "returned": lambda x: (x.sin(), x.shape[1] * 0.1 * 3.0),
    "tensor": lambda x: x.sin() * torch.tensor(x.shape[1] * 0.1 * 3.0),
    "float": lambda x: x.sin() * float(x.shape[1] * 0.1 * 3.0),
    "int": lambda x: x.sin() * int(x.shape[1] * 0.1 * 3.0 * 10),
    "sum": lambda x: (x.sin(), x.shape[1] / 2 + x.shape[0] / 3 + x.shape[2] / 7),
}


@pytest.mark.contract
@pytest.mark.parametrize("fun", ROUNDED.values(), ids=ROUNDED)
def test_a_rounded_number_has_the_bits_of_the_function(
    fun: Callable[[Tensor], Any],
) -> None:
    """Torch's symbols reorder factors and terms: 3 * 0.1 * 3.0 is not 0.3 * 3.0."""
    region = traced(fun)

    quiet(region, sequence(2, 3))
    with pytest.warns(RematWarning, match="each size of dimension 1"):
        run(region, (sequence(2, 6),))
    for length in (3, 6, 7):
        x = sequence(2, length).requires_grad_()
        (found, *numbers_), (expected, *others) = listed(region(x)), listed(fun(x))
        assert_bitwise(found, expected)
        assert list(map(repr, numbers_)) == list(map(repr, others))


def listed(result: Any) -> list[Any]:
    """What a function returns, one or several."""
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.contract
def test_a_fifth_trace_is_told_of() -> None:
    """A product that is needed as a number fixes no size: each product is a trace."""

    def fun(x: Tensor) -> Tensor:
        return x.sin() * len(range(x.shape[0] * x.shape[1]))

    region = traced(fun)
    for length in (3, 4, 5, 6):
        quiet(region, sequence(length, 2 * length))
    args = (sequence(7, 14),)
    with pytest.warns(RematWarning, match="for a fifth time, in spite of"):
        assert_bitwise(run(region, args), run(fun, args))

    quiet(region, sequence(8, 16))
    assert region.cache_info().misses == 6


def too_long(x: Tensor) -> Tensor:
    """Refuses some lengths by itself."""
    if x.shape[1] > 4:
        raise ValueError(f"{x.shape[1]} positions are too many")
    return x.sin()


@pytest.mark.contract
def test_an_error_of_the_function_is_its_own() -> None:
    """Its text has the number, its traceback leads into the function."""
    region = traced(too_long)
    quiet(region, sequence(2, 3))

    with pytest.raises(ValueError, match=r"^6 positions are too many$") as raised:
        region(sequence(2, 6).requires_grad_())

    assert raised.traceback[-1].name == "too_long"
    assert raised.value.__context__ is None
    quiet(region, sequence(2, 4))
    assert region.cache_info().misses == 1


@pytest.mark.contract
def test_a_derivative_that_fails_with_symbols_is_traced_for_each() -> None:
    """The variance of one column: its backward divides a size by zero."""
    region = traced(lambda x: x.sin()[..., : x.shape[1] // 2].var(-1))

    args = (sequence(2, 2),)
    with (
        pytest.warns(RematWarning, match="fails: float division by zero"),
        pytest.warns(UserWarning, match="degrees of freedom"),
    ):
        assert_bitwise(run(region, args), run(region.__wrapped__, args))


def test_a_branch_on_a_value_is_refused_as_ever() -> None:
    """The message is that of a trace of one size."""
    region = traced(lambda x: x.sin() if x.sum() > 0 else x)

    with pytest.raises(TraceError, match="value"):
        region(sequence(2, 3).requires_grad_())


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
