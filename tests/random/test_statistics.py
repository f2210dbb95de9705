"""What is drawn has the law that it should have, at n = 10**6 with fixed keys.

Each p-value is a fixed number, since the keys are: the threshold says how odd a
generator would have to be, not how often the test may fail.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from remat import random
from remat.random import _portable
from tests.support import swept

COUNT = 10**6
SEEDS = (0, 1, 12345)
THRESHOLD = 1e-3

each_seed = pytest.mark.parametrize("seed", [SEEDS[0], *swept(SEEDS[1:])])

TRUNCATED: Any = scipy.stats.truncnorm(-1.0, 2.0)
CONTINUOUS: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "uniform": (lambda key: random.uniform(key, (COUNT,)), scipy.stats.uniform()),
    "uniform float64": (
        lambda key: random.uniform(
            key, (COUNT,), dtype=torch.float64, minval=-3.0, maxval=5.0
        ),
        scipy.stats.uniform(-3.0, 8.0),
    ),
    "normal": (lambda key: random.normal(key, (COUNT,)), scipy.stats.norm()),
    "normal float64": (
        lambda key: random.normal(
            key, (COUNT,), dtype=torch.float64, mean=2.0, std=0.5
        ),
        scipy.stats.norm(2.0, 0.5),
    ),
    "portable normal": (
        lambda key: _portable.normal(torch.empty(1, COUNT), key[None], 0.0, 1.0)[0],
        scipy.stats.norm(),
    ),
    "truncated normal": (
        lambda key: random.truncated_normal(key, (COUNT,), lower=-1.0, upper=2.0),
        TRUNCATED,
    ),
    "gumbel": (lambda key: random.gumbel(key, (COUNT,)), scipy.stats.gumbel_r()),
}


@each_seed
@pytest.mark.parametrize(("draw", "law"), CONTINUOUS.values(), ids=CONTINUOUS)
def test_kolmogorov_smirnov(draw: Any, law: Any, seed: int) -> None:
    """The largest distance of the empirical distribution function."""
    drawn = draw(random.key(seed)).double().cpu().numpy()

    assert scipy.stats.kstest(drawn, law.cdf).pvalue > THRESHOLD


def chi_square(drawn: Tensor, probabilities: Any) -> float:
    """The p-value of counts of 0, 1, ... against their probabilities."""
    found = torch.bincount(drawn.long(), minlength=len(probabilities)).cpu().numpy()
    expected = np.asarray(probabilities) * found.sum()
    return scipy.stats.chisquare(found, expected).pvalue


@each_seed
@pytest.mark.parametrize("p", [0.5, 0.1, 0.999])
def test_bernoulli(p: float, seed: int) -> None:
    """As many True as `p` says."""
    drawn = random.bernoulli(random.key(seed), (COUNT,), p=p)

    assert chi_square(drawn, [1 - p, p]) > THRESHOLD


@each_seed
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("count", [2, 10, 129])
def test_randint(count: int, dtype: torch.dtype, seed: int) -> None:
    """All numbers of a range equally often."""
    drawn = random.randint(random.key(seed), (COUNT,), maxval=count, dtype=dtype)

    assert chi_square(drawn, [1 / count] * count) > THRESHOLD


@each_seed
def test_categorical(seed: int) -> None:
    """Indices as often as softmax says."""
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5])
    drawn = random.categorical(random.key(seed), (COUNT,), logits=logits)

    assert chi_square(drawn, logits.double().softmax(0).cpu().numpy()) > THRESHOLD


@each_seed
def test_permutation(seed: int) -> None:
    """All orders of three things equally often."""
    orders = random.permutation(random.key(seed), (COUNT // 10, 3), axis=1)
    names = orders[:, 0] * 2 + (orders[:, 1] > orders[:, 2])

    assert chi_square(names, [1 / 6] * 6) > THRESHOLD


@each_seed
def test_bits(seed: int) -> None:
    """Each bit is set half of the time, and no two of a word go together."""
    words = random.bits(random.key(seed), (COUNT,)).cpu().numpy().view(np.uint32)
    bits = np.unpackbits(words.view(np.uint8).reshape(COUNT, 4), axis=1).astype(float)
    signs = 2 * bits - 1

    products = signs.T @ signs / np.sqrt(COUNT)  # standard normal off the diagonal
    above = products[np.triu_indices(32, 1)]
    alone = signs.sum(0) / np.sqrt(COUNT)
    assert scipy.stats.kstest(above, "norm").pvalue > THRESHOLD
    assert scipy.stats.kstest(alone, "norm").pvalue > THRESHOLD


SIBLINGS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "split": lambda key: random.split(key, 2).unbind(),
    "fold_in": lambda key: (random.fold_in(key, 6), random.fold_in(key, 7)),
    "parent and child": lambda key: (key, random.split(key)[0]),
    "seeds": lambda key: (key, random.key(int(key[0]) + 1)),
    "ranks": lambda key: (random.fold_in(key, 0), random.fold_in(key, 2**32)),
}


@each_seed
@pytest.mark.parametrize("family", SIBLINGS.values(), ids=SIBLINGS)
def test_related_keys_are_independent(family: Any, seed: int) -> None:
    """Neither correlated nor dependent: their pairs fill the square evenly."""
    one, other = (
        random.uniform(key, (COUNT,)).double() for key in family(random.key(seed))
    )

    correlation: Any = scipy.stats.pearsonr(one.cpu().numpy(), other.cpu().numpy())
    cells = (one * 16).floor() * 16 + (other * 16).floor()
    assert correlation.pvalue > THRESHOLD
    assert chi_square(cells, [1 / 256] * 256) > THRESHOLD


def test_neighbours_in_a_stream_are_independent() -> None:
    """The four words of a block, and one block and the next."""
    drawn = random.uniform(random.key(0), (COUNT,)).double()

    for lag in (1, 2, 3, 4, 5, 8):
        found: Any = scipy.stats.pearsonr(
            drawn[:-lag].cpu().numpy(), drawn[lag:].cpu().numpy()
        )
        assert found.pvalue > THRESHOLD


def test_streams_of_many_keys_are_one_sample() -> None:
    """The first numbers of a million sibling keys are uniform, too."""
    keys = random.split(random.key(0), COUNT)

    drawn = torch.func.vmap(random.uniform)(keys).double().cpu().numpy()

    assert scipy.stats.kstest(drawn, "uniform").pvalue > THRESHOLD
