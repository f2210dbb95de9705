"""What a trace, whether or not it succeeds, leaves in a library's own objects: nothing."""

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import SideEffectError, TraceError, remat
from tests.support import assert_bitwise, installed, seeded

SOURCE = """
    import torch

    TABLES, PAIRS, LOG, KEPT = {}, {}, [], None

    def by_size(x):
        if len(x) not in TABLES:
            TABLES[len(x)] = torch.arange(float(len(x)))
        return x * TABLES[len(x)]

    def in_pairs(x):
        if len(x) not in PAIRS:
            PAIRS[len(x)] = (torch.ones(len(x)), torch.arange(float(len(x))))
        return x * PAIRS[len(x)][1]

    def in_a_global(x):
        global KEPT
        if KEPT is None:
            KEPT = torch.arange(float(len(x)))
        return x * KEPT

    class Memory:
        buffer = None

        def __init__(self):
            self.own = None

        def __call__(self, x):
            if self.own is None:
                self.own = torch.arange(float(len(x)))
            return x * self.own

    in_an_attribute = Memory()

    def in_a_list(x):
        LOG.append(torch.arange(float(len(x))))
        return x * LOG[-1]

    def keeping():
        kept = None

        def inner(x):
            nonlocal kept
            if kept is None:
                kept = torch.arange(float(len(x)))
            return x * kept

        return inner

    INNER = keeping()

    def in_a_closure(x):
        return INNER(x)
"""
# With what an error says of where it is.
NAMES = {
    "by_size": "in a dict",
    "in_pairs": "in an object outside the function",
    "in_a_global": "in a name or attribute `KEPT`",
    "in_an_attribute": "variable `helper.own` was None",
    "in_a_list": "in a list",
    "in_a_closure": "in a closure variable",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package where packages are installed: the walk does not follow its code."""
    with installed("keeps_tables", SOURCE, tmp_path, monkeypatch) as module:
        yield module


def user_of(helper: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that calls it."""
    return lambda x: helper(x).sin()


@pytest.mark.contract
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_that_a_trace_fills_is_as_before(library: Any, name: str) -> None:
    """The error says what to do; the library goes on to work, and so does the remedy."""
    fun, x = user_of(getattr(library, name)), seeded(4, dtype=torch.float32)
    region = remat(fun)

    with pytest.raises(SideEffectError, match=NAMES[name]):
        region(x.requires_grad_())

    assert_bitwise(fun(x), (x * torch.arange(4.0)).sin())
    assert_bitwise(remat(fun, engine="rerun")(x), fun(x))


LAST = [0]


def test_a_refusal_of_something_else_leaves_nothing_either(library: Any) -> None:
    """A function that changes state of its own is refused for that."""

    def fun(x: Tensor) -> Tensor:
        LAST[0] += 1
        return library.by_size(x).sin()

    x = seeded(4, dtype=torch.float32).requires_grad_()

    with pytest.raises(SideEffectError, match="while it was traced"):
        remat(fun)(x)

    assert_bitwise(fun(x), (x * torch.arange(4.0)).sin())


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_that_fails_later_leaves_nothing(library: Any, name: str) -> None:
    """Whatever its error is."""
    fun, x = user_of(getattr(library, name)), seeded(4, dtype=torch.float32)

    with pytest.raises(TraceError):
        remat(lambda x: fun(x) * float(x.sum()))(x.requires_grad_())

    assert_bitwise(fun(x), (x * torch.arange(4.0)).sin())


HOOKS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "what it is given": lambda w, g: setattr(w, "sample", g),
    "what it makes": lambda w, g: setattr(w, "sample", g * 2),
    "in a dict of its own": lambda w, g: setattr(w, "samples", {"sample": g}),
}


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.parametrize("name", HOOKS)
def test_what_a_hook_keeps_of_a_backward_is_told(name: str) -> None:
    """As libraries of gradients by example do, which put them beside their parameters."""
    w = seeded(3, 3).requires_grad_()

    def fun(x: Tensor) -> Tensor:
        y = (x @ w).sin()
        y.register_hook(functools.partial(HOOKS[name], w))
        return y * 2

    with pytest.raises(SideEffectError, match=r"`.*sample.*rerun"):
        remat(fun)(seeded(2, 3))
    assert all(each is None or each == {} for each in vars(w).values())
    remat(fun, engine="auto")(seeded(2, 3)).sum().backward()
    found = {**vars(w), **vars(w).get("samples", {})}["sample"]
    assert (type(found), found.shape) == (Tensor, (2, 3))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_program_is_not_searched_for() -> None:
    """Its trace may fail, where an operand has no derivative: it has left nothing anywhere."""
    searches: list[str] = []

    def count(phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and info["generation"] == 2:
            searches.append(phase)

    @remat
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, (4,), weight).sin()

    given = seeded(3, 4), seeded(4)
    gc.disable()
    gc.callbacks.append(count)
    try:
        torch.func.jvp(torch.func.grad(lambda *x: norm(*x).sum()), given, given)
    finally:
        gc.callbacks.remove(count)
        gc.enable()

    assert not searches


CACHES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "endless": functools.cache,
    "limited": functools.lru_cache(maxsize=2),
}


@pytest.mark.parametrize("memoize", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("refused", ["by a value", "by what it counts", "by itself"])
def test_a_cache_of_functools_is_emptied_after_any_refusal(
    memoize: Callable[[Callable[..., Any]], Callable[..., Any]], refused: str
) -> None:
    """Whatever a trace is refused for, the other engine finds no stand-in in the cache."""
    counts = {"calls": 0}

    @memoize
    def tables(n: int) -> dict[str, Tensor]:
        return {"cos": torch.arange(float(n)).cos()}

    def fun(x: Tensor) -> Tensor:
        y = x * tables(len(x))["cos"]
        if refused == "by a value" and float(y.detach().sum()) > 1e6:
            return y
        if refused == "by what it counts":
            counts["calls"] += 1
        return y.sin()

    x = seeded(3).requires_grad_()
    with pytest.raises((SideEffectError, TraceError), match='engine="rerun"'):
        remat(fun)(x)

    assert type(tables(3)["cos"]) is Tensor
    assert_bitwise(remat(fun, engine="rerun")(x), fun(x))


def test_a_cache_of_a_function_without_a_name() -> None:
    """The error names the class of what is cached."""

    def table(factor: float, n: int) -> Tensor:
        return torch.arange(float(n)) * factor

    cached = functools.cache(functools.partial(table, 2.0))

    with pytest.raises(SideEffectError, match=r"the cache of `partial`, .* now empty"):
        remat(lambda x: x * cached(3))(seeded(3).requires_grad_())
