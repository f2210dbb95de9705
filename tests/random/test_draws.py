"""Shapes, dtypes, ranges and options of each distribution, and what is refused."""

from typing import Any

import pytest
import torch

from remat import random

pytestmark = pytest.mark.contract

KEY = random.key(9)
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)

INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


@each_float
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize(
    "draw",
    [random.uniform, random.normal, random.truncated_normal, random.gumbel],
)
def test_floating_draws(draw: Any, shape: Any, dtype: torch.dtype) -> None:
    """Shape and dtype as asked for, and every number finite."""
    drawn = draw(KEY, shape, dtype=dtype)

    assert drawn.shape == shape
    assert drawn.dtype == dtype
    assert drawn.isfinite().all()
    assert torch.equal(drawn, draw(KEY, shape, dtype=dtype))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_bits_reach_both_ends(dtype: torch.dtype) -> None:
    """Each bit of the dtype is set in some number and clear in another."""
    drawn = random.bits(KEY, (4096,), dtype=dtype).tolist()
    width = torch.iinfo(dtype).bits

    for bit in range(width):
        assert len({(number >> bit) & 1 for number in drawn}) == 2


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_randint_stays_within(dtype: torch.dtype) -> None:
    """All of a small range and nothing else; the whole range of the dtype, too."""
    info = torch.iinfo(dtype)
    drawn = random.randint(KEY, (4096,), minval=3, maxval=10, dtype=dtype)

    assert drawn.dtype == dtype
    assert set(drawn.tolist()) == set(range(3, 10))
    whole = random.randint(
        KEY, (64,), minval=info.min, maxval=info.max + 1, dtype=dtype
    )
    assert torch.equal(whole, random.bits(KEY, (64,), dtype=dtype))


@each_float
def test_uniform_bounds(dtype: torch.dtype) -> None:
    """Numbers fill [minval, maxval); tensor bounds broadcast, and scale alike."""
    drawn = random.uniform(KEY, (4096,), dtype=dtype, minval=-2.0, maxval=3.0)

    assert drawn.min() >= -2
    assert drawn.max() <= 3
    assert drawn.double().mean().item() == pytest.approx(0.5, abs=0.1)
    low, high = torch.tensor(-2.0, dtype=dtype), torch.tensor([3.0], dtype=dtype)
    again = random.uniform(KEY, (4096,), dtype=dtype, minval=low, maxval=high)
    torch.testing.assert_close(again, drawn)


def test_uniform_never_gives_one() -> None:
    """The unit interval is half open."""
    assert random.uniform(KEY, (10**6,)).max() < 1
    assert random.uniform(KEY, (10**6,), dtype=torch.bfloat16).max() < 1


def test_normal_is_scaled() -> None:
    """mean + std * z, by numbers and by tensors."""
    z = random.normal(KEY, (5,))
    scaled = random.normal(KEY, (5,), mean=2.0, std=0.5)

    torch.testing.assert_close(scaled, 2 + 0.5 * z)
    mean, std = torch.tensor(2.0), torch.full((5,), 0.5)
    torch.testing.assert_close(random.normal(KEY, (5,), mean=mean, std=std), scaled)


def test_parameters_get_gradients() -> None:
    """A draw is differentiable in its tensor mean, std and bounds."""
    z, u = random.normal(KEY, (5,)), random.uniform(KEY, (5,))

    def drawn(mean: Any, std: Any) -> Any:
        return random.normal(KEY, (5,), mean=mean, std=std).sum()

    def between(low: Any, high: Any) -> Any:
        return random.uniform(KEY, (5,), minval=low, maxval=high).sum()

    one = torch.tensor(1.0)
    gradients = torch.func.grad(drawn, (0, 1))(one, one)
    torch.testing.assert_close(gradients, (torch.tensor(5.0), z.sum()))
    gradients = torch.func.grad(between, (0, 1))(one, 2 * one)
    torch.testing.assert_close(gradients, ((1 - u).sum(), u.sum()))


def test_bernoulli_is_uniform_below_p() -> None:
    """By a number and by a tensor of probabilities."""
    u = random.uniform(KEY, (1000,))

    assert torch.equal(random.bernoulli(KEY, (1000,), p=0.3), u < 0.3)
    p = torch.linspace(0, 1, 1000)
    assert torch.equal(random.bernoulli(KEY, (1000,), p=p), u < p)
    assert not random.bernoulli(KEY, (1000,), p=0.0).any()
    assert random.bernoulli(KEY, (1000,), p=1.0).all()
    large = random.bernoulli(KEY, (200_003,), p=0.3)
    assert torch.equal(large, random.uniform(KEY, (200_003,)) < 0.3)


@pytest.mark.parametrize(
    ("lower", "upper"), [(-1.0, 0.5), (2.0, 3.0), (-torch.inf, 0.0)]
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_truncated_normal_stays_within(
    lower: float, upper: float, as_tensor: bool
) -> None:
    """Strictly between its bounds."""
    bounds: Any = (torch.tensor(lower), torch.tensor(upper))
    bounds = bounds if as_tensor else (lower, upper)
    drawn = random.truncated_normal(KEY, (4096,), lower=bounds[0], upper=bounds[1])

    assert lower < drawn.min()
    assert drawn.max() < upper


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_categorical_draws_what_is_likely(axis: int) -> None:
    """An index along the axis, never one of probability zero."""
    logits = torch.zeros(3, 4).index_fill(axis, torch.tensor([1]), -torch.inf)
    batch = list(logits.select(axis, 0).shape)

    one = random.categorical(KEY, logits=logits, axis=axis)
    many = random.categorical(KEY, (500, *batch), logits=logits, axis=axis)

    assert list(one.shape) == batch
    assert set(many.unique().tolist()) == set(range(logits.shape[axis])) - {1}


def test_categorical_refuses_other_shapes() -> None:
    """The shape ends with that of the logits."""
    with pytest.raises(ValueError, match=r"must end with \(3,\), and is \(2,\)"):
        random.categorical(KEY, (2,), logits=torch.zeros(3, 5))


def test_permutations() -> None:
    """Of integers, of a tensor's rows, and of each row by itself."""
    x = torch.arange(12).reshape(4, 3)

    assert sorted(random.permutation(KEY, 100).tolist()) == list(range(100))
    rows = random.permutation(KEY, x)
    assert torch.equal(rows, x[random.permutation(KEY, 4)])
    columns = random.permutation(KEY, x, axis=1)
    assert torch.equal(columns.sort(1).values, x)
    apart = random.permutation(KEY, x.repeat(20, 1), axis=1, independent=True)
    assert torch.equal(apart.sort(1).values, x.repeat(20, 1))
    assert len({tuple((row - row.min()).tolist()) for row in apart}) == 6
    table = random.permutation(KEY, (50, 3), axis=1)
    assert torch.equal(table.sort(1).values, torch.arange(3).expand(50, 3))


def test_permutations_of_a_number() -> None:
    """Which may be a tensor without dimensions, as in JAX."""
    number = torch.tensor(5)

    assert torch.equal(random.permutation(KEY, number), random.permutation(KEY, 5))


DRAWS: dict[str, Any] = {
    "bits": random.bits,
    "uniform": random.uniform,
    "normal": random.normal,
    "truncated_normal": random.truncated_normal,
    "bernoulli": random.bernoulli,
    "randint": lambda key, shape: random.randint(key, shape, maxval=3),
    "permutation": random.permutation,
    "categorical": lambda key, shape: random.categorical(
        key, shape, logits=torch.zeros(3)
    ),
    "gumbel": random.gumbel,
    "split": random.split,
}
WRONG_SHAPES = {
    "negative": (
        -1,
        ValueError,
        "the size -1 is negative. A size is a number of places",
    ),
    "inferred": (
        (2, -1),
        ValueError,
        "the size -1 is negative. A size is a number of ",
    ),
    "fraction": (
        2.0,
        TypeError,
        "'float' object cannot be interpreted as an integer. ",
    ),
    "none": ((2, None), TypeError, "'NoneType' object cannot be interpreted as an int"),
    "tensor": (
        torch.tensor(0.5),
        TypeError,
        "only integer tensors of a single element",
    ),
}


@pytest.mark.parametrize("function", DRAWS)
@pytest.mark.parametrize(
    ("shape", "error", "words"), WRONG_SHAPES.values(), ids=WRONG_SHAPES
)
def test_a_wrong_shape_is_shown(
    function: str, shape: Any, error: type[Exception], words: str
) -> None:
    """As the user wrote it, with the function that was called."""
    with pytest.raises(error) as caught:
        DRAWS[function](KEY, shape)

    assert str(caught.value).startswith(f"random.{function}(key, {shape!r}): {words}")
    assert str(caught.value).endswith("a sequence of integers, each 0 or more.")


@each_float
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("size", [7, 200_003])
def test_dropout_is_a_scaled_bernoulli(
    rate: float, dtype: torch.dtype, size: int
) -> None:
    """x * bernoulli(key, x.shape, p=1 - rate) / (1 - rate), alike in every dtype."""
    x = torch.linspace(1, 2, size).to(dtype)
    kept = random.bernoulli(KEY, (size,), p=1 - rate)
    scale = torch.tensor(1 / (1 - rate) if rate < 1 else 0.0, dtype=dtype)

    found = random.dropout(KEY, x, rate)

    assert found.dtype == dtype
    assert torch.equal(found, x * (kept * scale))


def test_dropout_of_nothing() -> None:
    """A rate of 0 is the identity."""
    x = torch.ones(3)

    assert random.dropout(KEY, x, 0.0) is x


def test_dropout_of_complex_numbers() -> None:
    """Both parts of a number are dropped together."""
    x = torch.ones(100, dtype=torch.complex64) * (1 + 2j)

    found = random.dropout(KEY, x, 0.5)

    assert torch.equal(found.imag, 2 * found.real)
    assert set(found.real.tolist()) == {0.0, 2.0}


REFUSED: dict[str, Any] = {
    "rate": (lambda: random.dropout(KEY, torch.ones(2), 1.5), "a rate in .0, 1., not"),
    "integers": (
        lambda: random.dropout(KEY, torch.arange(2), 0.5),
        "takes a floating tensor, not torch.int64",
    ),
    "uniform int": (
        lambda: random.uniform(KEY, (2,), dtype=torch.int32),
        "draws torch.float32, torch.float64, torch.float16, torch.bfloat16, not torch.int32",
    ),
    "normal complex": (
        lambda: random.normal(KEY, (2,), dtype=torch.complex64),
        "random.normal draws torch.float32",
    ),
    "truncated_normal int": (
        lambda: random.truncated_normal(KEY, (2,), dtype=torch.int32),
        "random.truncated_normal draws torch.float32, .*, not torch.int32",
    ),
    "gumbel int": (
        lambda: random.gumbel(KEY, (2,), dtype=torch.int32),
        "random.gumbel draws torch.float32, .*, not torch.int32",
    ),
    "logits int": (
        lambda: random.categorical(KEY, logits=torch.arange(3)),
        r"random\.categorical\(logits=\.\.\.\) takes torch.float32, .*, not torch\.int64",
    ),
    "no logits": (
        lambda: random.categorical(KEY, logits=torch.zeros(3, 0)),
        r"random\.categorical\(logits=\.\.\., axis=-1\): the axis of logits of shape "
        r"\(3, 0\) is empty\. There is no index to draw\. Pass a logit for each index",
    ),
    "logits without the axis": (
        lambda: random.categorical(KEY, logits=torch.tensor(3.0)),
        r"random\.categorical\(axis=-1\): a tensor of shape \(\) has no such axis",
    ),
    "rows without the axis": (
        lambda: random.permutation(KEY, torch.zeros(2, 3), axis=2),
        r"random\.permutation\(axis=2\): a tensor of shape \(2, 3\) has no such axis\. "
        r"Axes are counted from 0, or back from -1\. Pass an axis of the tensor",
    ),
    "bits float": (
        lambda: random.bits(KEY, (2,), dtype=torch.float32),
        "random.bits draws torch.int32, torch.int64",
    ),
    "empty range": (
        lambda: random.randint(KEY, (2,), minval=3, maxval=3),
        r"not from \[3, 3\)",
    ),
    "outside": (
        lambda: random.randint(KEY, (2,), maxval=300, dtype=torch.uint8),
        r"within \[0, 255\], not from \[0, 300\)",
    ),
    "bounds of another shape": (
        lambda: random.uniform(KEY, (2,), minval=torch.zeros(3)),
        r"random\.uniform\(key, shape\) draws numbers of shape \(2,\), to which minval, of "
        r"shape \(3,\), does not broadcast\. Pass the shape of the result\.",
    ),
    "smallest numbers of another shape": (
        lambda: random.truncated_normal(KEY, (2,), lower=torch.zeros(3)),
        r"random\.truncated_normal.*shape \(2,\), to which lower, of shape \(3,\)",
    ),
    "largest numbers of more dimensions": (
        lambda: random.truncated_normal(KEY, (2,), upper=torch.ones(1, 2)),
        r"random\.truncated_normal.*shape \(2,\), to which upper, of shape \(1, 2\)",
    ),
    "means of more dimensions": (
        lambda: random.normal(KEY, (), mean=torch.zeros(3)),
        r"random\.normal.*shape \(\), to which mean, of shape \(3,\)",
    ),
    "deviations of a larger shape": (
        lambda: random.normal(KEY, (1,), std=torch.ones(3)),
        r"random\.normal.*shape \(1,\), to which std, of shape \(3,\)",
    ),
    "probabilities of another shape": (
        lambda: random.bernoulli(KEY, (), p=torch.zeros(2, 1)),
        r"random\.bernoulli.*shape \(\), to which p, of shape \(2, 1\)",
    ),
    "truncated elsewhere": (
        lambda: random.truncated_normal(KEY, 2, upper=torch.ones(3)),
        r"random\.truncated_normal.*shape \(2,\), to which upper, of shape \(3,\)",
    ),
    "bounds in the other order": (
        lambda: random.truncated_normal(KEY, (2,), lower=2.0, upper=-2.0),
        r"random\.truncated_normal takes lower < upper, not \(2\.0, -2\.0\)\.",
    ),
    "bounds with nothing between": (
        lambda: random.truncated_normal(KEY, (2,), lower=1, upper=1),
        r"takes lower < upper, not \(1, 1\)\.",
    ),
    "a bound that is no number": (
        lambda: random.truncated_normal(KEY, (2,), lower=float("nan")),
        r"takes lower < upper, not \(nan, 2\.0\)\.",
    ),
    "an empty interval": (
        lambda: random.uniform(KEY, (2,), minval=1.0, maxval=0.0),
        r"random\.uniform takes minval <= maxval, not \(1\.0, 0\.0\)\.",
    ),
    "a negative deviation": (
        lambda: random.normal(KEY, (2,), std=-1),
        r"random\.normal takes a std of 0 or more, not -1\.",
    ),
    "a deviation that is no number": (
        lambda: random.normal(KEY, (2,), std=float("nan")),
        r"takes a std of 0 or more, not nan\.",
    ),
    "a probability above one": (
        lambda: random.bernoulli(KEY, (2,), p=1.5),
        r"random\.bernoulli takes a p in \[0, 1\], not 1\.5\.",
    ),
    "biased": (
        lambda: random.randint(KEY, (2,), maxval=2**28 + 1),
        "Draw with dtype=torch.int64, or from a power of two",
    ),
    "biased in 64 bits": (
        lambda: random.randint(KEY, (2,), maxval=2**60 + 1, dtype=torch.int64),
        r"has 64 bits .* a range of 1152921504606846977.* Draw from a power of two",
    ),
}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(call: Any, words: str) -> None:
    """With what was given and what may be."""
    with pytest.raises((TypeError, ValueError, IndexError), match=words):
        call()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize(("lower", "upper"), [(-2.0, 2.0), (-0.3, 0.3), (1.0, 1.01)])
def test_truncated_numbers_are_within_their_bounds(
    dtype: torch.dtype, lower: float, upper: float
) -> None:
    """In the dtype of the result, which rounds what was computed, and bounds too."""
    drawn = random.truncated_normal(KEY, 20_000, lower=lower, upper=upper, dtype=dtype)

    assert lower < drawn.double().min()
    assert drawn.double().max() < upper


def test_wide_ranges_of_a_power_of_two() -> None:
    """No number is favored where the range divides the draws."""
    drawn = random.randint(KEY, (1000,), minval=-(2**29), maxval=2**29)

    assert drawn.min() >= -(2**29)
    assert drawn.max() < 2**29


def test_everything_after_shape_is_by_keyword() -> None:
    """So that nobody takes a bound for a size."""
    for draw in (random.uniform, random.normal, random.bits, random.bernoulli):
        with pytest.raises(TypeError, match="positional"):
            draw(KEY, (2,), 0.5)  # pyright: ignore[reportCallIssue]
