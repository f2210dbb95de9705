"""What lossy storages promise: bounds, bytes, and no bias where none is promised."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import checkpoint_name, policies, random, remat, storage
from remat._graph.meta import TensorMeta
from remat._regions.waiting import Waiting, wait
from remat.reporting import LiveBytes
from remat.storage import Place, Stored
from tests.benchmarks.rounding import NONLINEAR, NUM_DRAWS, bias, draws


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
    return drawn.to(torch.get_default_device())


@pytest.mark.parametrize(
    ("how", "value", "times"),
    [
        (storage.Quantize(8), normal(64, 1024), 3.9),
        (storage.Quantize(4), normal(64, 1024), 7.7),
        (storage.Quantize(2), normal(64, 1024), 15.0),
        (storage.Cast(torch.bfloat16), normal(64, 1024), 2.0),
        (storage.Sparse(), (normal(64, 1024) - 1.2815).relu(), 7.0),
        (storage.Sparse(), F.dropout(normal(64, 1024), 0.9), 6.0),
        (storage.Quantize(8), normal(64, 1024) > 0, 8.0),
    ],
    ids=["8 bits", "4 bits", "2 bits", "bfloat16", "relu", "dropout", "truth values"],
)
def test_bytes_that_wait(how: storage.AbstractStorage, value: Tensor, times: float):
    """By the tensors that are held, scales and masks included."""
    waiting = wait(value, how, Place())
    assert isinstance(waiting, Waiting)
    held = sum(t.untyped_storage().nbytes() for t in waiting.stored.tensors)

    assert value.nbytes / held >= times
    assert held == waiting.stored.size_bytes


@pytest.mark.parametrize(
    ("how", "value"),
    [
        (storage.Quantize(8), normal()),
        (storage.Quantize(2, group_size=1), normal(64)),
        (storage.Quantize(8, group_size=4), normal(64, dtype=torch.bfloat16)),
        (storage.Quantize(8), normal(64).to(torch.float8_e5m2)),
        (storage.Quantize(8, group_size=2), normal(64, dtype=torch.float64)),
    ],
    ids=["one number", "groups of one", "16 bits", "8 bits", "64 bits"],
)
def test_what_would_not_get_smaller_waits_as_it_is(
    how: storage.AbstractStorage, value: Tensor
) -> None:
    """With a minimum and a step for each group it would take as many bytes, or more."""
    assert wait(value, how, Place()) is value


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("size", [1, 100, 256, 257, 1000])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_bound_of_a_group(
    bits: int, size: int, dtype: torch.dtype, stochastic: bool
) -> None:
    """Each number is within a step of its group, half a step where it is rounded."""
    value = normal(size, seed=size, dtype=torch.float64).to(dtype)
    options = {"stochastic": True, "key": random.key(3)} if stochastic else {}

    found = storage.Quantize(bits, **options).store(value).restore()

    padded = torch.cat([value, value[-1:].expand(-size % 256)]).double().view(-1, 256)
    low, high = padded.aminmax(dim=1, keepdim=True)
    # The minimum is rounded by a part in 128 at most, and so is the step.
    width = (high - low + low.abs() / 128) / (2**bits - 1) * (1 + 1 / 128)
    bound = (width * (1 if stochastic else 0.5)).expand(-1, 256).reshape(-1)[:size]
    slack = torch.finfo(dtype).eps * 8
    assert ((found - value).double().abs() <= bound + slack).all()


def test_a_tail_is_not_widened() -> None:
    """The numbers that fill the last group up are its own."""
    value = torch.cat([normal(256), torch.full((3,), 1e6)])
    error = (storage.Quantize(8).store(value).restore() - value)[256:].abs().max()

    assert error <= 1e6 / 128 / 255


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(
    ("options", "most"), [({}, 2), ({"stochastic": True, "key": (1, 0)}, 2 + 8)]
)
def test_quantizing_takes_little_memory(bits: int, options: Any, most: int) -> None:
    """What waits, and two bytes a number beside it; a random number for each is whole."""
    value = normal(1024 * 1024)

    with LiveBytes() as live:
        stored = storage.Quantize(bits, **options).store(value)

    parts = [part for part in stored.parts if isinstance(part, Tensor)]
    waits = sum(part.untyped_storage().nbytes() for part in parts)
    assert live.peak_bytes - waits <= (most + 0.1) * value.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_numbers_that_stand_on_levels_come_back_as_they_were(
    bits: int, dtype: torch.dtype
) -> None:
    """Whole numbers from the least level to the highest, and groups of one number."""
    levels = torch.arange(2**bits, dtype=dtype) - 3
    same = [torch.full((256,), number, dtype=dtype) for number in (0.0, 1.0, -0.5)]
    value = torch.cat([levels.repeat(256 // len(levels)), *same])

    assert torch.equal(storage.Quantize(bits).store(value).restore(), value)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_group_with_a_bad_number_is_nan_throughout(bad: float) -> None:
    """Never a finite number that looks right; other groups do not notice."""
    value = normal(1000)
    value[300] = bad
    found = storage.Quantize(4).store(value).restore()

    assert found[256:512].isnan().all()
    assert found[:256].isfinite().all()
    assert found[512:].isfinite().all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
@pytest.mark.parametrize(
    "numbers", [(1, -1, 0, 0.99), (-1,), (1,), (-1, -0.999)], ids=str
)
def test_the_bound_of_a_group_at_the_ends_of_the_range(
    dtype: torch.dtype, numbers: tuple[float, ...]
) -> None:
    """A group may span all of the range, or lie below the least number of the scales' dtype."""
    most = torch.finfo(dtype).max
    value = torch.tensor(numbers, dtype=torch.float64).mul(most).to(dtype).repeat(64)

    found = storage.Quantize(8).store(value).restore()

    # In parts of the largest number; a minimum is rounded by a part in 128 at most.
    low, high = min(numbers), max(numbers)
    step = (high - low + abs(low) / 128) / 255 * (1 + 1 / 128)
    error = (found.double() / most - value.double() / most).abs()
    assert (error <= step / 2 + 4 * torch.finfo(dtype).eps).all()


def tanh_of_product(x: Tensor, w: Tensor) -> Tensor:
    """The backward reads the product."""
    return checkpoint_name(x @ w, "h").tanh().sum()


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (2, 0)], ids=str)
@pytest.mark.parametrize("chained", [False, True], ids=["alone", "after a cast"])
@pytest.mark.parametrize("group_size", [8, 256])
def test_examples_of_a_vmap_share_no_group(
    dims: tuple[int, ...], chained: bool, group_size: int
) -> None:
    """The gradient of each is that of a call of its own, next to much larger ones."""
    how: storage.AbstractStorage = storage.Quantize(4, group_size)
    how = storage.Cast(torch.float32) >> how if chained else how
    policy = policies.save_only_these_names("h").stored(how)
    alone = torch.func.grad(remat(tanh_of_product, policy=policy))
    w = normal(5, 5, dtype=torch.float64)
    examples = normal(*[3] * len(dims), 7, 5, seed=1, dtype=torch.float64)
    examples *= 10.0 ** torch.arange(3).view(-1, *[1] * (examples.dim() - 1))

    mapped, x = alone, examples
    for level, dim in enumerate(reversed(dims)):
        mapped = torch.func.vmap(mapped, (dim, None))
        x = x.movedim(len(dims) - 1 - level, dim + len(dims) - 1 - level)
    found = mapped(x, w).flatten(0, len(dims) - 1)

    one_by_one = torch.stack([alone(x, w) for x in examples.flatten(0, len(dims) - 1)])
    torch.testing.assert_close(found, one_by_one)


def test_a_mapped_value_holds_no_more_than_its_examples() -> None:
    """What is stated of one example bounds what each of several holds."""
    how, examples = storage.Quantize(2, 16), normal(4, 7, 7)
    waiting = wait(examples, how, Place(mapped=(0,)))
    assert isinstance(waiting, Waiting)
    stated = how.held(TensorMeta.of(examples[0])).size_bytes

    assert 4 * (stated - 1) < waiting.stored.size_bytes <= 4 * stated


def test_keys_and_places_draw_apart() -> None:
    """The same key and place round the same; others do not."""
    value = normal(256)

    def rounded(seed: int, place: int) -> Tensor:
        how = storage.Quantize(2, stochastic=True, key=random.key(seed))
        return how.store(value, Place(place)).restore()

    assert torch.equal(rounded(0, 0), rounded(0, 0))
    assert not torch.equal(rounded(0, 0), rounded(0, 1))
    assert not torch.equal(rounded(0, 0), rounded(1, 0))


def _misread(stored: Stored) -> Tensor:
    """As if step and minimum had been rounded after the numbers were quantized."""
    packed, step, low = stored.tensors
    coarse = [each.view(torch.int16).bitwise_and(~15) for each in (step, low)]
    return stored.decode([packed, *(each.view(torch.bfloat16) for each in coarse)])


def rms_z(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the mean error in units of its standard deviation."""
    spread = found.std(dim=0) / NUM_DRAWS**0.5
    z = (found.mean(dim=0) - expected) / spread
    return float(z.square().mean().sqrt())


def test_a_weights_gradient_is_unbiased() -> None:
    """x.t() @ g is linear in x: its mean over the draws is the gradient itself.

    It would not be if what the same draws store were read a little wrong.
    """
    x, cotangent = normal(64, 32), normal(64, 32, seed=1)
    drawn = draws(x)

    def z(read: Callable[[Stored], Tensor]) -> float:
        found = torch.stack([*map(read, drawn)])
        gradients = torch.einsum("dni,nj->dij", found.double(), cotangent.double())
        return rms_z(gradients, x.double().t() @ cotangent.double())

    assert 0.9 <= z(Stored.restore) <= 1.1
    assert not 0.9 <= z(_misread) <= 1.1


#: Each operator's bias at 2 bits lies between these.
BOUNDS = {
    "GELU": (0.02, 0.4),
    "softmax, squared": (0.02, 0.8),
    "LayerNorm, squared": (0.05, 0.8),
}


@pytest.fixture(scope="module")
def rounded() -> tuple[Tensor, Tensor]:
    """A value, and what comes back of it: drawn once for all operators."""
    x = normal(16, 16)
    return x, torch.stack([each.restore() for each in draws(x)])


@pytest.mark.parametrize("name", NONLINEAR)
def test_other_operators_are_biased(name: str, rounded: tuple[Tensor, Tensor]) -> None:
    """Their backward is not linear in what is stored, as docs/storage.md says."""
    low, high = BOUNDS[name]

    error, deviation = bias(NONLINEAR[name], *rounded)

    assert low < error < high
    assert error > 3 * deviation
