"""`random.checking()`: a key that is consumed twice raises, a recomputation does not."""

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from remat import KeyReuseError, random, remat

pytestmark = pytest.mark.contract


def test_both_lines_are_named() -> None:
    """The message has the key, both lines, the reason and the remedy."""
    key = random.key(3)

    with random.checking():
        random.normal(key, (2,))
        with pytest.raises(KeyReuseError) as caught:
            random.uniform(key, (2,))

    first = test_both_lines_are_named.__code__.co_firstlineno + 5
    assert str(caught.value) == (
        f"the key [3, 0], consumed at test_checking.py:{first + 2}: was consumed before, "
        f"at test_checking.py:{first}. Both draws have the same bits, so numbers that "
        "should be independent are equal. Split it once, k1, k2 = random.split(key), or "
        "derive a key for each use, random.fold_in(key, 0) and random.fold_in(key, 1)."
    )


CONSUMERS: dict[str, Any] = {
    "split": random.split,
    "bits": random.bits,
    "uniform": random.uniform,
    "normal": random.normal,
    "truncated_normal": random.truncated_normal,
    "bernoulli": random.bernoulli,
    "randint": lambda key: random.randint(key, maxval=3),
    "permutation": lambda key: random.permutation(key, 3),
    "categorical": lambda key: random.categorical(key, logits=torch.zeros(3)),
    "gumbel": random.gumbel,
    "dropout": lambda key: random.dropout(key, torch.ones(2), 0.5),
}


@pytest.mark.parametrize("consume", CONSUMERS.values(), ids=CONSUMERS)
def test_what_consumes(consume: Any) -> None:
    """Splits and all draws, once each."""
    key = random.key(0)

    with random.checking():
        consume(key)
        with pytest.raises(KeyReuseError):
            consume(key.clone())  # the data counts, not the tensor


def test_fold_in_does_not_consume() -> None:
    """Other data give other keys; the same data the same key, which counts once."""
    key = random.key(0)

    with random.checking():
        for layer in range(3):
            random.normal(random.fold_in(key, layer), (2,))
        random.normal(key, (2,))
        with pytest.raises(KeyReuseError):
            random.normal(random.fold_in(key, torch.tensor(1)), (2,))


def test_a_split_and_a_fold_that_meet() -> None:
    """split(key)[0] is fold_in(key, 0): consumed twice by two names."""
    key = random.key(0)

    with random.checking():
        random.normal(random.split(key)[0], (2,))
        with pytest.raises(KeyReuseError):
            random.normal(random.fold_in(key, 0), (2,))


def test_mapped_keys_are_seen_one_by_one() -> None:
    """Different keys may be mapped; equal ones are a reuse."""
    keys = random.split(random.key(0), 3)

    with random.checking():
        vmap(random.normal)(keys)
        with pytest.raises(KeyReuseError):
            random.normal(keys[1])
    with random.checking(), pytest.raises(KeyReuseError):
        vmap(random.normal, in_dims=1)(keys[:1].expand(3, 2).t())


def block(x: Tensor, key: Tensor) -> Tensor:
    one, other = random.split(key)
    return random.dropout(other, torch.sin(random.dropout(one, x, 0.5)), 0.5).sin()


RECOMPUTING: dict[str, Any] = {
    "region": remat(block),
    "nested": remat(remat(block)),
    "rerun": remat(block, engine="rerun"),
    "torch": lambda x, key: checkpoint(block, x, key, use_reentrant=False),
}


@pytest.mark.parametrize("f", RECOMPUTING.values(), ids=RECOMPUTING)
def test_a_recomputation_is_no_reuse(f: Any) -> None:
    """Whoever recomputes, and however often."""
    x = torch.ones(4, requires_grad=True)

    with random.checking():
        y = f(x, random.key(0))
        y.sum().backward(retain_graph=True)
        y.sum().backward()


@pytest.mark.parametrize("f", [RECOMPUTING["region"], RECOMPUTING["rerun"]])
def test_a_backward_of_an_unchecked_forward(f: Any) -> None:
    """A backward draws again, and again, and consumes nothing."""
    y = f(torch.ones(4, requires_grad=True), random.key(0)).sum()

    with random.checking():
        y.backward(retain_graph=True)
        y.backward()


def test_under_transforms() -> None:
    """grad, vmap(grad) and grad(grad) consume each key once, and a reuse is found."""
    region = remat(block)
    x, keys = torch.ones(3, 4), random.split(random.key(0), 3)
    slope = grad(lambda x, key: region(x, key).sum())

    with random.checking():
        vmap(slope)(x, keys)
    with random.checking():
        grad(lambda x: slope(x, keys[0]).sum())(x[0])
    with random.checking(), pytest.raises(KeyReuseError, match=r"test_checking\.py"):
        grad(lambda x: region(region(x, keys[0]), keys[0]).sum())(x[0])


def test_each_use_of_the_context_starts_anew() -> None:
    """Nothing is remembered from one to the next."""
    key = random.key(0)

    for _ in range(2):
        with random.checking():
            random.normal(key)
    random.normal(key)


INNER_AND_OUTER = [random.checking, contextlib.nullcontext]


@pytest.mark.parametrize("first", INNER_AND_OUTER)
@pytest.mark.parametrize("second", INNER_AND_OUTER)
def test_a_block_within_another_shares_its_record(first: Any, second: Any) -> None:
    """What one consumed is known to the other and to a later one, in each direction."""
    key = random.key(0)

    with random.checking():
        with first():
            random.normal(key)
        with pytest.raises(KeyReuseError), second():
            random.normal(key)


def test_other_threads_are_not_checked() -> None:
    """A check is of the thread that asked for it."""
    key, failed = random.key(0), list[Exception]()

    def work() -> None:
        try:
            random.normal(key)
            random.normal(key)
        except KeyReuseError as error:
            failed.append(error)

    with random.checking():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert not failed
