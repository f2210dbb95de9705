"""Keys: how they are made, split and told apart, and what is said of a wrong one."""

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from remat import random

pytestmark = pytest.mark.contract


def test_a_key_is_seed_and_offset() -> None:
    """The layout is torch's: uint64 (seed, offset)."""
    key = random.key(42)

    assert key.dtype == torch.uint64
    assert key.tolist() == [42, 0]


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 - 1])
def test_seeds_of_64_bits(seed: int) -> None:
    """A negative seed stands for its bits."""
    assert random.key(seed).tolist() == [seed % 2**64, 0]


def test_the_device_of_a_key() -> None:
    """Draws live where their key lives."""
    key = random.key(0, device="meta")

    assert key.device.type == "meta"
    assert random.uniform(key, (3,)).device.type == "meta"
    assert random.split(key).shape == (2, 2)


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [
        (0.5, TypeError, "takes an integer, not 0.5"),
        (True, TypeError, "takes an integer, not True"),
        ("a", TypeError, r"write random.fold_in\(random.key\(0\), number\)"),
        (2**64, ValueError, r"an integer in \[-2\*\*63, 2\*\*64\), not 18446744073709"),
        (-(2**63) - 1, ValueError, r"random.key\(seed\) takes an integer in"),
    ],
)
def test_seeds_that_are_refused(seed: Any, error: type[Exception], words: str) -> None:
    """A message says what a seed is."""
    with pytest.raises(error, match=words):
        random.key(seed)


def test_split_and_fold_in_derive_the_same_keys() -> None:
    """split(key, n)[i] is fold_in(key, i), whatever n."""
    key = random.key(7)

    keys = random.split(key, 5)

    assert torch.equal(keys[:2], random.split(key))
    for place, derived in enumerate(keys):
        assert torch.equal(random.fold_in(key, place), derived)
    assert len({tuple(each.tolist()) for each in keys}) == 5


@pytest.mark.parametrize("number", [0, 3, -1, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.int32, torch.uint8])
def test_a_number_folds_alike_as_int_and_as_tensor(
    number: int, dtype: torch.dtype
) -> None:
    """The dtype of the tensor does not matter."""
    wanted = number % 2**64 if dtype == torch.uint64 else number
    if not torch.iinfo(dtype).min <= wanted <= torch.iinfo(dtype).max:
        return
    key = random.fold_in(random.key(3), 1)

    tensor = torch.tensor(wanted, dtype=dtype)

    assert torch.equal(random.fold_in(key, tensor), random.fold_in(key, number))


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (0.5, TypeError, "takes an integer, not 0.5"),
        ("layer", TypeError, "Number the things to be told apart"),
        (torch.tensor(0.5), TypeError, "an integer tensor, not torch.float32"),
        (torch.tensor(True), TypeError, "an integer tensor, not torch.bool"),
        (torch.arange(3), ValueError, r"one number, not a tensor of shape \(3,\)"),
        (2**64, ValueError, r"in \[-2\*\*63, 2\*\*64\)"),
    ],
)
def test_data_that_is_refused(data: Any, error: type[Exception], words: str) -> None:
    """A message says what can be folded in."""
    with pytest.raises(error, match=words):
        random.fold_in(random.key(0), data)


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), torch.Size([1, 3, 2])], ids=str)
def test_a_split_into_a_shape(shape: tuple[int, ...]) -> None:
    """The keys of a split into as many, in that shape; alike for each mapped key."""
    keys = random.split(random.key(7), 2)

    each = [random.split(key, math.prod(shape)).view(*shape, 2) for key in keys]

    assert torch.equal(random.split(keys[0], shape), each[0])
    mapped = vmap(lambda key: random.split(key, shape))(keys)
    assert torch.equal(mapped, torch.stack(each))


@pytest.mark.parametrize(("num", "shown"), [(0, "0"), ((2, 0), r"\(2, 0\)")], ids=str)
def test_a_split_into_none(num: Any, shown: str) -> None:
    """At least one key comes out."""
    with pytest.raises(ValueError, match=f"makes at least one key, not {shown}"):
        random.split(random.key(0), num)


WRONG = {
    "seed": (0, "not 0"),
    "dtype": (torch.zeros(2), r"not a float32 tensor of shape \(2,\)"),
    "int64": (torch.zeros(2).long(), r"not a int64 tensor of shape \(2,\)"),
    "batch": (random.split(random.key(0), 3), r"not a uint64 tensor of shape \(3, 2\)"),
    "none": (None, "not None"),
}
CONSUMERS: dict[str, Any] = {
    "split": random.split,
    "fold_in": lambda key: random.fold_in(key, 0),
    "bits": random.bits,
    "uniform": random.uniform,
    "normal": random.normal,
    "truncated_normal": lambda key: random.truncated_normal(key, (2,)),
    "bernoulli": random.bernoulli,
    "randint": lambda key: random.randint(key, maxval=3),
    "permutation": lambda key: random.permutation(key, 3),
    "categorical": lambda key: random.categorical(key, logits=torch.zeros(3)),
    "gumbel": random.gumbel,
    "dropout": lambda key: random.dropout(key, torch.ones(2), 0.5),
}


@pytest.mark.parametrize("function", CONSUMERS)
@pytest.mark.parametrize(("key", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_key_says_how_to_make_one(function: str, key: Any, words: str) -> None:
    """At once, with what was given, and with the functions that make keys."""
    with pytest.raises(TypeError, match=words) as caught:
        CONSUMERS[function](key)

    said = f"random.{function} takes a key, a uint64 tensor of shape (2,)"
    assert said in str(caught.value)
    assert "random.key(seed)" in str(caught.value)
    assert "torch.func.vmap maps a function over several keys" in str(caught.value)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("split"), st.integers(0, 4)),
        st.tuples(st.just("fold_in"), st.integers(-(2**63), 2**64 - 1)),
    ),
    max_size=6,
)


def walk(key: Tensor, path: list[tuple[str, int]]) -> Tensor:
    """The key at the end of a path in the tree of splits and folds."""
    for step, number in path:
        key = (
            random.split(key, 5)[number]
            if step == "split"
            else random.fold_in(key, number)
        )
    return key


@hypothesis.given(
    seed=st.integers(0, 2**64 - 1), first=steps, second=steps, size=st.integers(1, 9)
)
def test_any_tree_of_keys(
    seed: int, first: list[Any], second: list[Any], size: int
) -> None:
    """One path gives one key, at every walk; paths of unlike data give unlike keys."""
    key = random.key(seed)
    one, other = walk(key, first), walk(key, second)

    assert torch.equal(one, walk(key, first))
    assert torch.equal(random.bits(one, (size,)), random.bits(one, (size,)))
    same = [number % 2**64 for _, number in first] == [
        number % 2**64 for _, number in second
    ]
    assert torch.equal(one, other) == same
