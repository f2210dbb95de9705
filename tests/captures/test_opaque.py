"""Objects of which nothing can be seen: another one is told by its identity."""

import ctypes
import gc
import io
import operator
import queue
import string
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import remat
from remat import TraceError
from tests.support import seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    # What it holds is told besides.
    pytest.mark.filterwarnings("ignore:.*is not compared from call to call"),
]

X = seeded(3, 4).requires_grad_()

Use = Callable[[Any, Tensor], Tensor]


def scripted(scale: float) -> Any:
    """A function of TorchScript, all of which are of one class."""
    code = f"def scaled(x):\n  return x * {scale}\n"
    return torch.jit.CompilationUnit(code).scaled


def holding(item: Any) -> Any:
    """An array of objects."""
    found = np.empty(1, dtype=object)
    found[0] = item
    return found


def queued(number: float) -> "queue.Queue[float]":
    """A queue of one number."""
    found = queue.Queue[float]()
    found.put(number)
    return found


def raised() -> threading.Event:
    """An event that has happened."""
    found = threading.Event()
    found.set()
    return found


#: Two objects of one class, and a function that they make differ.
PAIRS: dict[str, tuple[Any, Any, Use]] = {
    "TorchScript": (scripted(2.0), scripted(5.0), lambda c, x: c(x)),
    "itemgetter": (
        operator.itemgetter(0),
        operator.itemgetter(1),
        lambda c, x: c((x, 2 * x)),
    ),
    "attrgetter": (
        operator.attrgetter("ndim"),
        operator.attrgetter("itemsize"),
        lambda c, x: x * c(x),
    ),
    "methodcaller": (
        operator.methodcaller("sin"),
        operator.methodcaller("exp"),
        lambda c, x: c(x),
    ),
    "methods of one number": ((2.0).__mul__, (2.0).__add__, lambda c, x: x * c(3.0)),
    "methods of two": ((2.0).__mul__, (5.0).__mul__, lambda c, x: x * c(3.0)),
    "methods of one list": ([3, 1, 1].index, [3, 1, 1].count, lambda c, x: x * c(3)),
    "generators": (
        torch.Generator().manual_seed(2),
        torch.Generator().manual_seed(5),
        lambda c, x: x * c.initial_seed(),
    ),
    "templates": (
        string.Template("a"),
        string.Template("aaa"),
        lambda c, x: x * len(c.template),
    ),
    "queues": (queued(2.0), queued(5.0), lambda c, x: x * c.queue[0]),
    "events": (
        threading.Event(),
        raised(),
        lambda c, x: x * (5.0 if c.is_set() else 2.0),
    ),
    "ctypes": (ctypes.c_double(2.0), ctypes.c_double(5.0), lambda c, x: x * c.value),
    "memory": (memoryview(b"2"), memoryview(b"5"), lambda c, x: x * c[0]),
    "texts": (io.StringIO("2"), io.StringIO("5"), lambda c, x: x * float(c.getvalue())),
    "errors": (ValueError(2.0), ValueError(5.0), lambda c, x: x * c.args[0]),
    "large arrays": (
        np.full(20_000, 2.0),
        np.full(20_000, 5.0),
        lambda c, x: x * float(c[0]),
    ),
    "arrays of objects": (holding(2.0), holding(5.0), lambda c, x: x * c[0]),
}


def closed_over(use: Use, one: Any) -> Callable[[Tensor], Tensor]:
    """A function of a factory: those of one factory share their traces."""
    return lambda x: use(one, x)


class Layer(nn.Module):
    """A layer that holds an object."""

    def __init__(self, use: Use, one: Any) -> None:
        super().__init__()
        self.use, self.one = use, one

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.one, x)


@pytest.mark.parametrize("name", PAIRS)
def test_two_functions_of_one_code(name: str) -> None:
    """Each runs with its own object, and once more without another trace."""
    *pair, use = PAIRS[name]
    functions = [closed_over(use, one) for one in pair]
    regions: list[Any] = [remat.remat(each) for each in functions]
    regions[0].cache_clear()  # that of the code
    for function, region in zip(functions * 2, regions * 2, strict=True):
        assert torch.equal(region(X), function(X))
    assert regions[0].cache_info().misses == 2


@pytest.mark.parametrize("name", PAIRS)
def test_layers_of_one_class_and_what_is_put_in_later(name: str) -> None:
    one, other, use = PAIRS[name]
    net = nn.Sequential(Layer(use, one), Layer(use, other))
    plain = net(X)
    remat.modules.apply(net, Layer)
    assert torch.equal(net(X), plain)

    first: Any = net[0]
    first.one = other
    assert torch.equal(first(X), use(other, X))


# What may be iterated is refused there, for what it may hold.
ITERATED = {"large arrays", "arrays of objects", "texts", "memory"}


@pytest.mark.parametrize("name", [name for name in PAIRS if name not in ITERATED])
def test_arguments(name: str) -> None:
    """Each is static."""
    *pair, use = PAIRS[name]
    region: Any = remat.remat(use)
    for one in pair * 2:
        assert torch.equal(region(one, X), use(one, X))


def test_an_object_that_hides_a_tensor_is_traced_for_itself() -> None:
    """What another one's trace has seen says nothing of it."""
    w = seeded(4, seed=1).requires_grad_()

    def scaling(held: Any) -> Any:
        return remat.remat(lambda x: x * held[0])

    scaling(holding(2.0))(X)
    with pytest.raises(remat.CapturedTensorError, match="cannot be followed"):
        scaling(holding(w))(X)


def test_getters_of_the_same_are_one() -> None:
    """They say what they get; those made anew at each call share a trace."""
    region: Any = remat.remat(lambda get, x: get((x, 2 * x)))
    for _ in range(3):
        region(operator.itemgetter(1), X)
    assert region.cache_info().misses == 1


def test_schedules_are_told_apart_by_what_they_compare() -> None:
    """Equal ones share a trace of what holds their stack."""

    def held(schedule: Any) -> Any:
        stack = remat.chain([torch.sin] * 4, schedule=schedule)
        return remat.remat(lambda x: stack(x))

    every = remat.schedules.Every
    first, *others = regions = [held(every(2)), held(every(2)), held(every(3))]
    first.cache_clear()  # that of the code
    for region in regions:
        region(X)
    assert others[0].cache_info().misses == 2


def test_locks_are_no_reason_for_another_trace() -> None:
    """They hold no numbers."""

    def locked(lock: Any, x: Tensor) -> Tensor:
        with lock:
            return x.sin()

    regions: list[Any] = [
        remat.remat(closed_over(locked, threading.Lock())) for _ in range(2)
    ]
    regions[0].cache_clear()  # that of the code
    for region in regions:
        region(X)
    assert regions[0].cache_info().misses == 1


def test_what_can_be_referred_to_weakly_is_not_kept_alive() -> None:
    """Traces outlive the functions that they were made for."""

    def used() -> Any:
        generator = torch.Generator()
        remat.remat(closed_over(lambda c, x: x * c.initial_seed(), generator))(X)
        return weakref.ref(generator)

    generator = used()
    gc.collect()
    assert generator() is None


def test_what_a_python_module_makes_is_followed() -> None:
    """PEP 562: the module's own function gives what its namespace lacks."""
    values, settings = {"scale": 2.0}, types.ModuleType("settings")

    def lend(name: str) -> float:
        return values[name]

    settings.__getattr__ = lend  # pyright: ignore[reportAttributeAccessIssue]
    region: Any = remat.remat(lambda x: x * settings.scale)
    for scale in (2.0, 5.0):
        values["scale"] = scale
        assert torch.equal(region(X), X * scale)


def test_a_module_that_torch_has_traced_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: Any = torch.jit.trace(nn.Linear(4, 4), torch.ones(3, 4))
    with pytest.raises(TraceError, match=r"torch.jit.trace has made.*Decorate the mod"):
        remat.remat(module)
