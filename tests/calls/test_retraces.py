"""Many traces of one function: told at the tenth, bounded, and freed (law 5, and the cache)."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from remat import RematWarning, modules, remat
from remat._calls import decorated
from tests.support import assert_bitwise, grads, seeded


def fresh(**options: Any) -> Any:
    """A region of a function whose traces no other test shares."""
    region: Any = remat(lambda x, n=1.0: torch.sin(torch.sin(x)) * n, **options)
    region.cache_clear()  # traces belong to the code
    return region


def texts_of(calls: int, call: Callable[[int], Any]) -> list[tuple[int, str]]:
    """The warnings of calls, and the call that each came from."""
    found = []
    for index in range(calls):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(index)
        found += [(index, str(warning.message)) for warning in caught]
    return found


class Scaled(nn.Module):
    """Reads a number that its user changes."""

    factor = 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(torch.sin(x)) * self.factor


def by_attribute() -> Callable[[int], Any]:
    """A module, one attribute of which is different at each call."""
    module = Scaled()
    region = remat(module)

    def call(index: int) -> None:
        module.factor = index
        region(seeded(3).requires_grad_())

    return call


def by_closure() -> Callable[[int], Any]:
    """A function that is made and decorated anew for each call."""

    def call(index: int) -> None:
        remat(lambda x: torch.sin(torch.sin(x)) * index)(seeded(3).requires_grad_())

    return call


def by_argument(make: Callable[[int], Any]) -> Callable[[], Callable[[int], Any]]:
    """A function whose argument differs."""

    def begin() -> Callable[[int], Any]:
        region = fresh()
        return lambda index: region(make(index).requires_grad_())

    return begin


def by_number_of_tensors() -> Callable[[int], Any]:
    """A function of as many tensors as it is given."""

    @remat
    def region(*xs: Tensor) -> Tensor:
        return torch.sin(torch.stack(xs).sum(0))

    return lambda index: region(*(seeded(3).requires_grad_() for _ in range(1 + index)))


def by_arrangement() -> Callable[[int], Any]:
    """One tensor, as often as it is passed."""

    @remat
    def region(*xs: Tensor) -> Tensor:
        return torch.cos(torch.stack(xs).sum(0))

    return lambda index: region(*[seeded(3).requires_grad_()] * (1 + index))


def by_kind() -> Callable[[int], Any]:
    """An argument that is a number and a tensor in turn, beside one that changes."""
    region = fresh()
    scales = [1.5, torch.tensor(1.5)]
    return lambda index: region(seeded(3 + index).requires_grad_(), scales[index % 2])


CAUSES: dict[str, tuple[Callable[[], Callable[[int], Any]], str]] = {
    "size": (
        by_argument(lambda index: seeded(2, 3 + index)),
        r"size of dimension 1 of `x` \(9 times, at last: from 11 to 12\).*dynamic_shapes",
    ),
    "strides": (
        by_argument(lambda index: torch.zeros(3, 9 + index)[:, :3]),
        r"the strides of `x` \(9 times.*x\.contiguous\(\)",
    ),
    "rank": (
        by_argument(lambda index: torch.zeros((2,) * (1 + index))),
        r"changed `x` \(9 times.*Make each call alike",
    ),
    "attribute": (
        by_attribute,
        r"self\.factor \(9 times, at last: self\.factor was 8 and is 9\).*0-d tensor",
    ),
    "number of tensors": (
        by_number_of_tensors,
        r"`xs\.1` \(1 times, at last: from None to float64\[3\]\).*Make each call alike",
    ),
    "arrangement": (by_arrangement, r"how arguments are nested \(9 times.*Make each"),
    "kind": (
        by_kind,
        r"`n` \(9 times, at last: from 1.5 to float32.*Make each call alike",
    ),
    "closure": (by_closure, r"closure variable `index` \(9 times.*0-d tensor"),
}


@pytest.mark.contract
@pytest.mark.parametrize(("begin", "words"), CAUSES.values(), ids=CAUSES)
def test_the_tenth_trace_warns(begin: Any, words: str) -> None:
    """Whatever made it: it names what changed, how often, and what helps; once."""
    ((when, text),) = texts_of(12, begin())

    assert when == 9
    assert "was traced for a tenth time" in text
    with pytest.warns(RematWarning, match=f"(?s){words}"):
        warnings.warn(text, RematWarning, stacklevel=1)


@pytest.mark.contract
def test_layers_of_one_class_are_counted_one_by_one() -> None:
    """A net of twelve layers that differ in size needs twelve traces; that is no accident."""
    layers = [nn.Sequential(nn.Linear(3 + k, 4 + k), nn.Tanh()) for k in range(12)]
    net = nn.Sequential(*layers).double()
    modules.apply(net, "*")

    assert texts_of(1, lambda _: net(seeded(2, 3).requires_grad_())) == []


@pytest.mark.contract
def test_the_cache_keeps_what_was_used_last() -> None:
    """At its bound the trace that was used longest ago goes, however calls found the others."""
    region = fresh(cache_size=3)

    def misses(size: int) -> int:
        x = seeded(size)
        found = grads(region, [x])
        assert_bitwise(found, grads(lambda x: torch.sin(torch.sin(x)) * 1.0, [x]))
        return region.cache_info().misses

    assert [misses(size) for size in (2, 3, 4, 4, 2, 2)] == [1, 2, 3, 3, 3, 3]
    assert [misses(size) for size in (5, 2, 4, 3)] == [4, 4, 4, 5]
    info = region.cache_info()
    assert (info.maxsize, info.currsize) == (3, 3)
    assert info.hits == 5


@pytest.mark.contract
@pytest.mark.parametrize("dynamic_shapes", [False, True])
def test_dropped_traces_are_freed(dynamic_shapes: bool) -> None:
    """Their graphs and programs go, so that a run of many lengths holds as much as at the bound."""
    region = fresh(cache_size=4, dynamic_shapes=dynamic_shapes)
    seen: list[weakref.ref[Any]] = []
    alive = []
    for size in range(2, 11):
        region(seeded(size).requires_grad_()).sum().backward()
        entries = [each for found in region._cache.entries.values() for each in found]
        newest = max(entries, key=lambda entry: entry.used)
        seen.append(weakref.ref(newest.stages.analysis))
        gc.collect()
        alive.append(sum(each() is not None for each in seen))

    # A trace with open sizes keeps that of its first call.
    assert alive[5:] == [4 + dynamic_shapes] * 4
    assert len(region._cache.routes) <= 4


def test_a_run_of_many_lengths_holds_what_the_bound_says() -> None:
    """After the bound no object is added, by torch's record of fake tensors neither."""
    region = fresh(cache_size=30)
    counts = []

    def call(index: int) -> None:
        region(seeded(index + 2).requires_grad_()).sum().backward()
        if index % 10 == 9:
            FakeTensorMode.cache.clear()
            gc.collect()
            counts.append(len(gc.get_objects()))

    texts = texts_of(60, call)

    assert len(texts) == 1
    assert region.cache_info().currsize == 30
    assert max(counts[3:]) - min(counts[3:]) < 0.05 * (counts[2] - counts[0])


def test_what_torch_remembers_of_fake_tensors_is_bounded() -> None:
    """Its dictionary has no bound; a trace begins with an empty one if it has grown large."""
    region = fresh()
    for size in range(2, 5):
        FakeTensorMode.cache.update({(size, k): None for k in range(5000)})  # type: ignore[misc]
        region(seeded(size).requires_grad_())

    assert len(FakeTensorMode.cache) < 5000


@pytest.mark.parametrize("size", [0, -1, True, "8"])
def test_a_wrong_cache_size_is_an_error(size: Any) -> None:
    """It is a count of at least one."""
    with pytest.raises(
        (TypeError, ValueError), match=r"remat\(cache_size=\.\.\.\).*at least 1"
    ):
        remat(torch.sin, cache_size=size)


def test_policies_that_are_made_for_each_call_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest traces are freed, and a warning says what to do."""
    monkeypatch.setattr(decorated, "_MOST_OPTIONS", 3)
    monkeypatch.setattr(decorated, "_caches", {})

    def block(x: Tensor) -> Tensor:
        return x.sin().exp().sin()

    def step(index: int) -> weakref.ref[Any]:
        x = torch.ones(3, requires_grad=True)
        region: Any = remat(block, policy=lambda value: False)
        region(x).sum().backward()
        return weakref.ref(region._cache)

    kept: list[weakref.ref[Any]] = []
    told = texts_of(5, lambda index: kept.append(step(index)))
    gc.collect()

    assert [index for index, _ in told] == [3, 4]
    assert "Make the policy once, outside of the loop." in told[0][1]
    assert [each() is None for each in kept] == [True, True, False, False, False]
