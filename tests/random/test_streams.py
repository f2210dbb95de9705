"""The numbers themselves: published vectors, torch's kernels, and ours without them.

"Core round is checked against the published Random123 known-answer vectors; the streams
against known answers regenerated from the newest torch."
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import random
from remat.random import _draws, _native, _philox, _portable
from tests.random import known_answers

pytestmark = pytest.mark.contract

HAS_KERNELS = _native.has_kernels("cpu")
needs_kernels = pytest.mark.skipif(
    not HAS_KERNELS, reason="torch 2.15 is the first with these kernels on a CPU"
)

# Random123 1.14, tests/kat_vectors: counter, key, result of "philox4x32 10".
VECTORS = {
    "zeros": (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    "ones": (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize(("counter", "key", "known"), VECTORS.values(), ids=VECTORS)
def test_the_rounds_give_the_published_vectors(
    counter: Any, key: Any, known: Any
) -> None:
    """Philox4x32-10 as Random123 publishes it."""
    words: Any = tuple(torch.tensor([[word]]) for word in counter)
    halves: Any = tuple(torch.tensor([[half]]) for half in key)

    found = _philox.scramble(words, halves)

    assert tuple(int(word) for word in found) == known


@pytest.mark.parametrize("offset", [0, 2**32 - 3, 2**64 - 2])
@pytest.mark.parametrize("seed", [0, 2**63 + 12345])
def test_few_keys_are_those_of_many(seed: int, offset: int) -> None:
    """A key is the same, whether it is computed by Python or by tensors."""
    keys = torch.tensor([[seed, offset]], dtype=torch.uint64)

    few, many = _portable.split(keys, 5), _portable.split(keys, 100)

    assert torch.equal(few, many[:, :5])


def ours(implementation: Any) -> Any:
    """The draws of `remat.random` by one implementation, under torch's names."""

    def drawn(key: Tensor, shape: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.empty(1, *shape, dtype=dtype), key[None]

    def integers(key: Tensor, shape: Any, dtype: torch.dtype, low: int, high: int):
        return implementation.integers(*drawn(key, shape, dtype), low, high - low)[0]

    def bits(key: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
        info = torch.iinfo(dtype)
        return integers(key, shape, dtype, info.min, info.max + 1)

    def uniform(key: Tensor, shape: Any, dtype: torch.dtype, low: float, high: float):
        return implementation.uniform(*drawn(key, shape, dtype), low, high)[0]

    def normal(key: Tensor, shape: Any, dtype: torch.dtype, mean: float, std: float):
        return implementation.normal(*drawn(key, shape, dtype), mean, std)[0]

    def split(key: Tensor, num: int) -> Tensor:
        return implementation.split(key[None], num)[0]

    return SimpleNamespace(
        bits=bits,
        randint=integers,
        uniform=uniform,
        normal=normal,
        split=split,
        fold_in=random.fold_in,
    )


def public() -> Any:
    """The public functions, under torch's names for their arguments."""
    return SimpleNamespace(
        bits=random.bits,
        # Past the check of the range: torch draws from some that are biased.
        randint=lambda key, shape, dtype, low, high: _draws._draw_integers(
            key, [*shape], low, high - 1, dtype
        ),
        uniform=lambda key, shape, dtype, low, high: random.uniform(
            key, shape, dtype=dtype, minval=low, maxval=high
        ),
        normal=random.normal,
        split=random.split,
        fold_in=random.fold_in,
    )


IMPLEMENTATIONS = {
    "portable": lambda: ours(_portable),
    "native": lambda: ours(_native),
    "public": public,
    "torch": known_answers.torchs_own,
}


@pytest.mark.parametrize(
    "name",
    [
        "portable",
        "public",
        pytest.param("native", marks=needs_kernels),
        pytest.param("torch", marks=needs_kernels),
    ],
)
def test_known_answers(name: str) -> None:
    """All but normal numbers are those of the file, to the last bit."""
    found = known_answers.answers(IMPLEMENTATIONS[name]())
    known = known_answers.recorded()

    assert found.keys() == known.keys()
    for key, draws in known.items():
        assert found[key].keys() == draws.keys()
        for draw, numbers in draws.items():
            if draw.startswith("normal"):
                assert_close_to_normal(draw, found[key][draw], numbers)
            else:
                assert found[key][draw] == numbers, f"{draw} of the key {key}"


def assert_close_to_normal(draw: str, found: list[str], known: list[str]) -> None:
    """Within 4 units in the last place of a number before it is scaled."""
    _, name, mean, std = draw.split()
    step = torch.finfo(getattr(torch, name)).eps
    for one, other in zip(found, known, strict=True):
        a, b = float.fromhex(one), float.fromhex(other)
        size = max(abs(b), abs(b - float(mean)), float(std) * 2**-3)
        assert abs(a - b) <= 4 * step * size, draw


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers_without_torchs_kernel(dtype: torch.dtype) -> None:
    """At n = 10**6 at most 4 units in the last place apart, and mostly equal."""
    keys = random.key(3)[None]
    one = _portable.normal(torch.empty(1, 10**6, dtype=dtype), keys, 0.0, 1.0)
    other = _native.normal(torch.empty(1, 10**6, dtype=dtype), keys, 0.0, 1.0)

    bits = torch.int32 if dtype == torch.float32 else torch.int64
    units = (one.view(bits).long() - other.view(bits).long()).abs()
    assert units.max() <= 4
    assert (units == 0).double().mean() > 0.5


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_public_draws_are_torchs(dtype: torch.dtype) -> None:
    """Where torch has the kernels, normal numbers too are its own to the bit."""
    key, theirs = random.key(11), known_answers.torchs_own()
    shape = (3, 1001)

    assert torch.equal(
        random.normal(key, shape, dtype=dtype), theirs.normal(key, shape, dtype=dtype)
    )
    assert torch.equal(
        random.uniform(key, shape, dtype=dtype), theirs.uniform(key, shape, dtype=dtype)
    )


@pytest.mark.parametrize(
    ("num_keys", "count"), [(1, 1), (1, 200_003), (3, 5), (3, 200_003), (70_000, 5)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pieces_are_one_stream(num_keys: int, count: int, dtype: torch.dtype) -> None:
    """However a draw is cut in pieces, it is the stream of each key from its start."""
    keys = random.split(random.key(5), num_keys)
    found = _portable.uniform(torch.empty(num_keys, count, dtype=dtype), keys, 0.0, 1.0)

    for row in {0, num_keys // 2, num_keys - 1}:
        alone = torch.empty(1, min(count, 7), dtype=dtype)
        _portable.uniform(alone, keys[row : row + 1], 0.0, 1.0)
        assert torch.equal(found[row, :7], alone[0])


@pytest.mark.parametrize("kind", ["split", "uniform", "normal", "integers"])
def test_a_device_whose_kernels_draw_other_numbers_is_not_served(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kernel is trusted with is checked on a few numbers first."""
    for name in ("split", "uniform", "normal", "integers"):
        monkeypatch.setattr(_native, name, getattr(_portable, name))
    agrees = _native._agrees.__wrapped__

    assert agrees(torch.device("cpu"))
    own = getattr(_portable, kind)
    others = {"split": lambda *args: own(*args).flip(1)}
    other = others.get(kind, lambda *args: own(*args).neg_())
    monkeypatch.setattr(_native, kind, other)
    assert not agrees(torch.device("cpu"))


@pytest.mark.parametrize(
    "name", ["portable", pytest.param("native", marks=needs_kernels)]
)
@pytest.mark.parametrize(
    "span", [1000, 2**40 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1], ids=hex
)
def test_integers_are_remainders_of_bits(name: str, span: int) -> None:
    """Without sign, whatever the range: the smallest number, and the bits modulo it."""
    draws, key = IMPLEMENTATIONS[name](), random.key(21)
    bits = draws.bits(key, (64,), torch.uint64).tolist()

    found = draws.randint(key, (64,), torch.uint64, 1, 1 + span).tolist()

    assert found == [(1 + each % span) % 2**64 for each in bits]
