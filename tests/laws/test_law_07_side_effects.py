"""Law 7, its second half.

"Python side effects run once, at trace time, as under jit; a function that changes
covered state while it is traced, or leaves a fake tensor in a user's object, raises
`SideEffectError`."
"""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from remat import CapturedTensorError, RematError, SideEffectError, remat
from tests.support import assert_bitwise, grads, seeded

Effect = Callable[[Any], Callable[[Tensor], Tensor]]
CALLS: list[Any] = []
COUNT = 0


def body(x: Tensor) -> Tensor:
    """What each function computes besides its effect."""
    return torch.sin(torch.sin(x))


def counts(held: Any) -> Callable[[Tensor], Tensor]:
    def fun(x: Tensor) -> Tensor:
        held.calls += 1
        return body(x)

    return fun


def appends(held: Any) -> Callable[[Tensor], Tensor]:
    def fun(x: Tensor) -> Tensor:
        held.log.append("called")
        return body(x)

    return fun


def sets_entry(held: Any) -> Callable[[Tensor], Tensor]:
    def fun(x: Tensor) -> Tensor:
        held.table["n"] = held.table.get("n", 0) + 1
        return body(x)

    return fun


def keeps_attribute(held: Any) -> Callable[[Tensor], Tensor]:
    def fun(x: Tensor) -> Tensor:
        held.last = body(x)
        return held.last * 2

    return fun


def keeps_in_list(held: Any) -> Callable[[Tensor], Tensor]:
    def fun(x: Tensor) -> Tensor:
        held.log.append(body(x))
        return body(x)

    return fun


def keeps_in_dict(held: Any) -> Callable[[Tensor], Tensor]:
    def fun(x: Tensor) -> Tensor:
        held.table["h"] = body(x)
        return body(x)

    return fun


def appends_global(x: Tensor) -> Tensor:
    CALLS.append(1)
    return body(x)


def counts_global(x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return body(x)


class Counting(nn.Module):
    """A module that counts its calls in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return body(x)


EFFECTS = [counts, appends, sets_entry, keeps_attribute, keeps_in_list, keeps_in_dict]


def state() -> SimpleNamespace:
    """An object of a user, with a counter, a list and a dict."""
    return SimpleNamespace(calls=0, log=[], table={})


@pytest.mark.contract
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_change_of_covered_state_is_an_error(effect: Effect) -> None:
    """The error names the place, and the object is as before."""
    held = state()

    with pytest.raises(SideEffectError) as error:
        remat(effect(held))(seeded(3).requires_grad_())

    assert held == state()
    names = ("calls", "log", "table", "last")
    assert any(name in str(error.value) for name in names)


@pytest.mark.parametrize("effect", [counts, keeps_attribute])
def test_the_error_says_which_function(effect: Effect) -> None:
    """The user's file and line stand in the text, as in every error."""
    with pytest.raises(SideEffectError, match=r"test_law_07_side_effects\.py:\d+"):
        remat(effect(state()))(seeded(3).requires_grad_())


@pytest.mark.parametrize("fun", [appends_global, counts_global])
def test_a_change_of_a_global_is_an_error(fun: Callable[[Tensor], Tensor]) -> None:
    """The global's name is in the text, and the global is as before."""
    with pytest.raises(SideEffectError, match=r"CALLS|COUNT"):
        remat(fun)(seeded(3).requires_grad_())

    assert CALLS == []
    assert COUNT == 0


def test_a_module_that_counts_is_an_error() -> None:
    """The counter of a module is covered state: it is put back."""
    model = Counting()

    with pytest.raises(
        SideEffectError, match=r"calls.* in place \(self\.buffer\.copy_"
    ):
        remat(model)(seeded(3).requires_grad_())

    assert model.calls == 0


def test_a_cell_that_counts_is_an_error() -> None:
    """So is a variable of an enclosing function."""
    calls = 0

    def fun(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return body(x)

    with pytest.raises(SideEffectError, match="calls"):
        remat(fun)(seeded(3).requires_grad_())

    assert calls == 0


def test_it_raises_again_and_then_works_when_repaired() -> None:
    """The failed trace is not remembered as a good one."""
    held = state()
    fun = counts(held)
    for _ in range(2):
        with pytest.raises(RematError):
            remat(fun)(seeded(3).requires_grad_())

    assert_bitwise(grads(remat(body), [seeded(3)]), grads(body, [seeded(3)]))


def test_an_effect_that_restores_itself_is_none() -> None:
    """State that is back when the function ends has not changed."""
    held = state()

    def fun(x: Tensor) -> Tensor:
        held.calls += 1
        y = body(x) * held.calls
        held.calls -= 1
        return y

    assert_bitwise(grads(remat(fun), [seeded(3)]), grads(fun, [seeded(3)]))
    assert held == state()


class Kept:
    """An object with an attribute for the time of a block, and one found once."""

    def __init__(self) -> None:
        self.factor = 2.0

    def __enter__(self) -> float:
        self.before = self.factor
        self.entered = True
        return self.before

    def __exit__(self, *_: object) -> None:
        assert self.entered
        del self.before

    @functools.cached_property
    def doubled(self) -> float:
        return 2 * self.factor


class Cast(nn.Module):
    """A module that enters a context of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.context = torch.autocast("cpu", torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        with self.context:
            return body(x) @ x.mT


def entered(kept: Kept) -> Callable[[Tensor], Tensor]:
    def fun(x: Tensor) -> Tensor:
        with kept as factor:
            return body(x) * factor

    return fun


@pytest.mark.contract
@pytest.mark.parametrize(
    "make",
    [
        lambda: entered(Kept()),
        lambda: torch.autocast("cpu", torch.bfloat16)(lambda x: body(x) @ x.mT),
        Cast,
    ],
    ids=["context_manager", "decorated", "module"],
)
def test_what_is_written_before_it_is_read_is_no_state(make: Callable[[], Any]) -> None:
    """Nothing rests on what stood there before, as in what is kept for an exit."""
    region: Any = remat(make())
    fun = make()

    for _ in range(2):
        assert_bitwise(grads(region, [seeded(3, 3)]), grads(fun, [seeded(3, 3)]))
    assert region.cache_info().misses == 1


@pytest.mark.contract
def test_a_property_may_be_found_in_a_trace() -> None:
    """It is kept, as in a plain call, and a later change of it is noticed."""
    held, plain = Kept(), Kept()
    region = remat(lambda x: body(x) * held.doubled)

    for change in (lambda _: None, lambda kept: setattr(kept, "doubled", 7.0)):
        for kept in (held, plain):
            change(kept)
        found = grads(region, [seeded(3)])
        assert_bitwise(found, grads(lambda x: body(x) * plain.doubled, [seeded(3)]))
        assert vars(held) == vars(plain)


def test_a_tensor_may_not_be_found_so() -> None:
    """It would be one of the trace, without data."""

    class Masked(Kept):
        @functools.cached_property
        def mask(self) -> Tensor:
            return torch.ones(3)

    held = Masked()
    with pytest.raises(SideEffectError, match="mask"):
        remat(lambda x: body(x) * held.mask)(seeded(3).requires_grad_())

    assert "mask" not in vars(held)


def test_objects_made_inside_may_change() -> None:
    """What is made in the call and dies with it is no state of anybody."""

    def fun(x: Tensor) -> Tensor:
        local = state()
        local.log.append(body(x))
        local.last = local.log[0]
        return local.last * 2

    assert_bitwise(grads(remat(fun), [seeded(3)]), grads(fun, [seeded(3)]))


def test_a_restored_effect_of_rerun_runs_again() -> None:
    """`engine="rerun"` runs Python again by contract, and raises nothing."""
    held = state()
    grads(remat(counts(held), engine="rerun"), [seeded(3)])

    assert held.calls >= 1


CACHES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "endless": functools.cache,
    "limited": functools.lru_cache(maxsize=2),
}


@pytest.mark.parametrize("memoize", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize(
    "pack", [lambda t: t, lambda t: {"mask": (t,)}], ids=["alone", "deep"]
)
def test_a_tensor_in_a_cache_of_functools(
    memoize: Callable[[Callable[..., Any]], Callable[..., Any]],
    pack: Callable[[Tensor], Any],
) -> None:
    """A trace's tensor does not stay in it, and one of before cannot be followed."""

    @memoize
    def masked(n: int) -> Any:
        return pack(torch.ones(n, n).tril())

    def fun(x: Tensor) -> Tensor:
        (mask,) = tree_leaves(masked(x.shape[0]))
        return (x * mask).sin()

    def repaired(x: Tensor) -> Tensor:
        made: Any = masked
        (mask,) = tree_leaves(made.__wrapped__(x.shape[0]))
        return (x * mask).sin()

    inputs = [seeded(3, 3)]
    with pytest.raises(SideEffectError, match=r"in the cache of `masked`, .*`masked\."):
        grads(remat(fun), inputs)
    right = grads(fun, inputs)
    with pytest.raises(CapturedTensorError, match=r"functools\.cache .*`__wrapped__`"):
        grads(remat(fun), inputs)

    assert_bitwise(grads(remat(repaired), inputs), right)


@dataclasses.dataclass
class Unregistered:
    """A dataclass that nobody told torch's pytree about."""

    hidden: Tensor
    size: int = 3


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "a dataclass": Unregistered,
    "an object": lambda t: SimpleNamespace(hidden=[t]),
    "beside a tensor": lambda t: (t, Unregistered(t.cos())),
    "an object in an object": lambda t: SimpleNamespace(inner=Unregistered(t)),
}


@pytest.mark.parametrize("engine", ["trace", "rerun", "auto"])
@pytest.mark.parametrize("pack", RETURNED.values(), ids=RETURNED)
def test_a_tensor_returned_where_pytree_does_not_look(
    pack: Callable[[Tensor], Any], engine: Any
) -> None:
    """The error names the class, and says how a dataclass is registered."""
    with pytest.raises(
        SideEffectError,
        match=r"inside a (Unregistered\..*Register it|SimpleName\w+\..*them outside)",
    ):
        remat(lambda x: pack(x.sin()), engine=engine)(seeded(3).requires_grad_())


def test_an_argument_returned_where_pytree_does_not_look() -> None:
    """A transform to be called later, as of a flow: `torch.func.grad` gave zeros."""

    def later(x: Tensor) -> Any:
        return SimpleNamespace(call=functools.partial(torch.mul, x))

    region = remat(later, engine="rerun")
    with pytest.raises(SideEffectError, match=r"inside a \w+\..*them outside"):
        torch.func.grad(lambda x: region(x).call(seeded(3)).sum())(seeded(3, seed=1))


def test_a_tensor_left_by_a_region_in_a_region() -> None:
    """The looks of the inner trace are none of the outer one, which knows no such tensor."""
    inner = remat(lambda x: (x.sin(), Unregistered(x.cos())))

    with pytest.raises(SideEffectError, match=r"inside a \w+\..*Register it"):
        remat(lambda x: inner(x)[0].exp())(seeded(3).requires_grad_())


@pytest.mark.contract
def test_what_only_a_graph_of_torch_holds_was_not_left() -> None:
    """A write that no output rests on, into what made it: autograd's graph is a cycle."""

    def fun(x: Tensor) -> Tensor:
        out = torch.sin(x * x)
        fresh = x.clone()
        index = torch.zeros_like(fresh[:1], dtype=torch.long)
        fresh.scatter_(0, index, fresh[:1] * x.sum())
        return out

    inputs = [seeded(3, 3, 2).requires_grad_()]

    assert_bitwise(grads(remat(fun), inputs), grads(fun, inputs))
