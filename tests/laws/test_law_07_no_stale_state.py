"""Law 7, no stale state.

"Covered, and checked at every call: closure cells, named globals (through user-defined
helpers), defaults, partials, simple attributes *read in the trace* of reached modules
and objects, lists and dicts of these, `training`. A change retraces. Python side effects
run once, at trace time, as under jit; a function that changes covered state while it is
traced, or leaves a fake tensor in a user's object, raises `SideEffectError`."
"""

import collections
import enum
import functools
import math
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from remat import RecomputationError, remat
from tests.support import assert_bitwise, seeded

Fun = Callable[..., Tensor]
State = tuple[Fun, Callable[[], object]]
FACTOR: Any = 2.0
TABLE = {"scale": 2.0}


def scaled(x: Tensor, factor: Any) -> Tensor:
    """Depends on the factor's value, on its type, and on the sign of a zero."""
    kind = {bool: 1.5, int: 2.5, float: 3.5}[type(factor)]
    return torch.sin(torch.sin(x) * (factor + kind)) * math.copysign(1.0, factor)


def reads_global(x: Tensor) -> Tensor:
    return scaled(x, FACTOR)


def helper(x: Tensor) -> Tensor:
    return scaled(x, FACTOR)


def other_helper(x: Tensor) -> Tensor:
    return torch.cos(torch.sin(x))


def through_a_helper(x: Tensor) -> Tensor:
    return helper(x) + TABLE["scale"]


class Pair(NamedTuple):
    left: int
    right: int


class Holder:
    """State in an attribute, in an object in an attribute, in a class attribute."""

    shared = 2.0

    def __init__(self, value: Any = 2.0) -> None:
        self.value = value
        self.inner = SimpleNamespace(value=value, values=[value], table={"a": value})

    def method(self, x: Tensor) -> Tensor:
        return scaled(x, self.value)

    def patched(self, x: Tensor) -> Tensor:
        return scaled(x, 4.0)


def set_global(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().__setitem__(name, value)


def cell() -> State:
    factor = 2.0

    def change() -> None:
        nonlocal factor
        factor = 3.0

    return (lambda x: scaled(x, factor)), change


def default() -> State:
    def fun(x: Tensor, factor: Any = 2.0) -> Tensor:
        return scaled(x, factor)

    return fun, lambda: setattr(fun, "__defaults__", (3.0,))


def keyword_default() -> State:
    def fun(x: Tensor, *, factor: Any = 2.0) -> Tensor:
        return scaled(x, factor)

    return fun, lambda: setattr(fun, "__kwdefaults__", {"factor": 3.0})


def partial() -> State:
    fun = functools.partial(scaled, factor=2.0)
    return fun, lambda: fun.keywords.update(factor=3.0)


def on_holder(
    read: Callable[[Holder], Any], change: Callable[[Holder], object]
) -> State:
    holder = Holder()
    return (lambda x: scaled(x, read(holder))), (lambda: change(holder))


def under(key: Any) -> State:
    table = {key: 2.0}
    return (lambda x: scaled(x, table[key])), lambda: table.update({key: 3.0})


def keys_swap() -> State:
    first, second = Holder(), Holder()
    table = {first: 2.0, second: 3.0}

    def change() -> None:
        table.clear()
        table.update({second: 2.0, first: 3.0})

    return (lambda x: scaled(x, table[first])), change


def tensor_under_an_object() -> State:
    holder = Holder()
    table: dict[Holder, Tensor] = {holder: seeded(3, 3)}
    return (lambda x: x @ table[holder]), lambda: table.update(
        {holder: seeded(3, 3, seed=9)}
    )


def class_attribute_appears() -> State:
    class Bare:
        pass

    holder: Any = Bare()

    def fun(x: Tensor) -> Tensor:
        try:
            return scaled(x, holder.factor)
        except AttributeError:
            return scaled(x, 2.0)

    return fun, lambda: setattr(Bare, "factor", 3.0)


def method_attribute() -> State:
    holder = Holder()
    return holder.method, lambda: setattr(holder, "value", 3.0)


def list_grows() -> State:
    values = [2.0]
    return (lambda x: scaled(x, sum(values))), lambda: values.append(1.0)


def dict_grows() -> State:
    table = {"a": 2.0}
    return (lambda x: scaled(x, sum(table.values()))), lambda: table.update(b=1.0)


def key_appears() -> State:
    table: dict[str, float] = {}
    return (lambda x: scaled(x, table.get("a", 2.0))), lambda: table.update(a=3.0)


def becomes_none() -> State:
    holder: Any = SimpleNamespace(w=seeded(3))
    fun = lambda x: x.sin() if holder.w is None else x.sin() * holder.w.sin()  # noqa: E731
    return fun, lambda: setattr(holder, "w", None)


def tensor_changes_shape() -> State:
    holder = SimpleNamespace(w=seeded(3))
    return (lambda x: (x * holder.w).sin()), lambda: setattr(holder, "w", seeded(2, 1))


def tensor_replaced() -> State:
    tensors = [seeded(3)]
    return (lambda x: (x * tensors[0]).sin()), lambda: tensors.__setitem__(
        0, seeded(3, seed=5)
    )


def model_state(change: Callable[[Any], object]) -> State:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
    ).double()
    model.eval()
    return model, lambda: change(model)


def untie(model: Any) -> None:
    model[2].weight = nn.Parameter(seeded(3, 3, seed=7))


def untied() -> State:
    model: Any = model_state(untie)[0]
    model[2].weight = model[0].weight
    return model, lambda: untie(model)


def hook_removed() -> State:
    model: Any = model_state(untie)[0]
    handle = model[0].register_forward_hook(lambda m, a, out: out.sin())
    return model, handle.remove


def overridden(
    read: Callable[[Any], Any], override: Any, *, as_value: bool = False
) -> State:
    """A class that has what is read from its base, until it gets its own."""

    class Base:
        factor = 2.0

        def given(self) -> float:
            return 2.0

    class Derived(Base):
        pass

    held = Derived if as_value else Derived()
    name = "factor" if as_value else "given"
    return (lambda x: scaled(x, read(held))), lambda: setattr(Derived, name, override)


def partial_method() -> State:
    class Config:
        def read(self, factor: float) -> float:
            return factor

        given = functools.partialmethod(read, 2.0)

    config = Config()
    return (lambda x: scaled(x, config.given())), lambda: setattr(
        Config, "given", functools.partialmethod(Config.read, 3.0)
    )


class Slotted:
    """A single slot, which may be a text as well as a tuple."""

    __slots__ = "value"

    def __init__(self) -> None:
        self.value = 2.0


class Private:
    """A slot that Python stores under another name."""

    __slots__ = ("__value",)

    def __init__(self) -> None:
        self.__value = 2.0

    @property
    def value(self) -> float:
        return self.__value

    @value.setter
    def value(self, value: float) -> None:
        self.__value = value


class Values(list[float]):
    """A list with an attribute."""

    value = 2.0


def of_object(held: Any) -> State:
    return (lambda x: scaled(x, held.value)), lambda: setattr(held, "value", 3.0)


def of_function() -> State:
    def fun(x: Tensor) -> Tensor:
        return scaled(x, own.value)

    own: Any = fun
    own.value = 2.0
    return fun, lambda: setattr(own, "value", 3.0)


def dispatched(is_method: bool) -> State:
    @functools.singledispatch
    def given(_: object) -> float:
        raise TypeError

    @given.register
    def _(_: int) -> float:
        return FACTOR

    class Config:
        given = functools.singledispatchmethod(lambda self, _: TypeError())
        given.register(int, lambda self, _: FACTOR)

    read: Any = Config().given if is_method else given
    return (lambda x: scaled(x, read(1))), set_global("FACTOR", 3.0)


class Kind(enum.Enum):
    """An enumeration with methods, and with functions for values."""

    ONE = functools.partial(lambda: FACTOR)
    TWO = 2

    def given(self) -> float:
        return FACTOR


class Text(str):
    """A text with a method."""

    def given(self) -> float:
        return FACTOR


def with_methods(value: Any) -> State:
    held = (value, "a")
    return (lambda x: scaled(x, held[0].given())), set_global("FACTOR", 3.0)


def of_collections(held: Any) -> State:
    return (lambda x: scaled(x, held[0])), lambda: held.__setitem__(0, 3.0)


class Context(threading.local):
    """State of a thread's own, over a default that all share."""

    value = 2.0


def on_context(kind: type[Any]) -> State:
    context = kind()
    fun = lambda x: scaled(x, getattr(context, "value", 2.0))  # noqa: E731
    return fun, lambda: setattr(context, "value", 3.0)


def variable_set(*default: Any) -> State:
    variable: ContextVar[Any] = ContextVar("variable")
    if default:
        variable = ContextVar("variable", default=default[0])
        return (lambda x: scaled(x, variable.get().value)), (
            lambda: setattr(variable.get(), "value", 3.0)
        )
    return (lambda x: scaled(x, variable.get(2.0))), lambda: variable.set(3.0)


def referent_changes() -> State:
    holder = Holder()
    reference = weakref.ref(holder)
    fun = lambda x: scaled(x, getattr(reference(), "value", 4.0))  # noqa: E731
    return fun, lambda: setattr(holder, "value", 3.0)


def referent_dies() -> State:
    holders = [Holder()]
    reference = weakref.ref(holders[0])
    return (lambda x: scaled(x, 2.0 if reference() else 3.0)), holders.clear


CHANGES: dict[str, Callable[[], State]] = {
    "thread_local": lambda: on_context(threading.local),
    "thread_local_class": lambda: on_context(Context),
    "context_variable": variable_set,
    "context_variable_default": lambda: variable_set(Holder()),
    "weak_referent": referent_changes,
    "weak_reference": referent_dies,
    "cell": cell,
    "global": lambda: (reads_global, set_global("FACTOR", 3.0)),
    "global_to_int": lambda: (reads_global, set_global("FACTOR", 2)),
    "global_through_helper": lambda: (through_a_helper, set_global("FACTOR", 3.0)),
    "helper_replaced": lambda: (through_a_helper, set_global("helper", other_helper)),
    "global_dict_entry": lambda: (through_a_helper, lambda: TABLE.update(scale=5.0)),
    "default": default,
    "keyword_default": keyword_default,
    "partial": partial,
    "attribute": lambda: on_holder(lambda h: h.value, lambda h: setattr(h, "value", 3.0)),
    "attribute_to_int": lambda: on_holder(lambda h: h.value, lambda h: setattr(h, "value", 2)),
    "nested_attribute": lambda: on_holder(
        lambda h: h.inner.value, lambda h: setattr(h.inner, "value", 3.0)
    ),
    "class_attribute": lambda: on_holder(
        lambda h: h.shared, lambda h: setattr(Holder, "shared", 3.0)
    ),
    "class_attribute_appears": class_attribute_appears,
    "shadowed_class_attribute": lambda: on_holder(
        lambda h: h.shared, lambda h: setattr(h, "shared", 3.0)
    ),
    "method_overridden": lambda: overridden(lambda h: h.given(), lambda _: 3.0),
    "class_attribute_overridden": lambda: overridden(lambda h: h.factor, 3.0, as_value=True),
    "attribute_of_a_function": of_function,
    "attribute_of_a_list": lambda: of_object(Values()),
    "single_slot": lambda: of_object(Slotted()),
    "private_slot": lambda: of_object(Private()),
    "partial_method": partial_method,
    "dispatched": lambda: dispatched(is_method=False),
    "dispatched_method": lambda: dispatched(is_method=True),
    "method_of_an_enumeration": lambda: with_methods(Kind.TWO),
    "value_of_an_enumeration": lambda: (
        (lambda x: scaled(x, Kind.ONE.value())), set_global("FACTOR", 3.0)
    ),
    "method_of_a_text": lambda: with_methods(Text("a")),
    "chain_map": lambda: of_collections(collections.ChainMap({0: 2.0})),
    "user_list": lambda: of_collections(collections.UserList([2.0])),
    "method_attribute": method_attribute,
    "list_element": lambda: on_holder(
        lambda h: h.inner.values[0], lambda h: h.inner.values.__setitem__(0, 3.0)
    ),
    "dict_entry": lambda: on_holder(
        lambda h: h.inner.table["a"], lambda h: h.inner.table.update(a=3.0)
    ),
    "list_grows": list_grows,
    "dict_grows": dict_grows,
    "key_appears": key_appears,
    "under_an_object": lambda: under(Holder()),
    "under_a_module": lambda: under(nn.Tanh()),
    "under_a_function": lambda: under(helper),
    "under_a_named_tuple": lambda: under(Pair(1, 2)),
    "under_an_object_in_a_tuple": lambda: under((Holder(), "a")),
    "under_a_tensor": lambda: under(seeded(2)),
    "keys_swap": keys_swap,
    "tensor_under_an_object": tensor_under_an_object,
    "tensor_to_none": becomes_none,
    "tensor_shape": tensor_changes_shape,
    "tensor_replaced": tensor_replaced,
    "training": lambda: model_state(lambda m: m.train()),
    "training_of_a_child": lambda: model_state(lambda m: m[1].train()),
    "parameter_replaced": lambda: model_state(untie),
    "parameter_data": lambda: model_state(lambda m: setattr(m[0].weight, "data", seeded(3, 3))),
    "parameter_in_place": lambda: model_state(lambda m: m[0].weight.data.mul_(2)),
    "parameter_frozen": lambda: model_state(lambda m: m[0].weight.requires_grad_(False)),
    "submodule_replaced": lambda: model_state(lambda m: m.__setitem__(2, nn.Tanh())),
    "submodule_appended": lambda: model_state(lambda m: m.append(nn.Tanh())),
    "hook_added": lambda: model_state(
        lambda m: m[0].register_forward_hook(lambda m, a, out: out.sin())
    ),
    "pre_hook_added": lambda: model_state(
        lambda m: m.register_forward_pre_hook(lambda m, a: (a[0].cos(),))
    ),
    "hook_removed": hook_removed,
    "untied": untied,
    "eps": lambda: model_state(lambda m: setattr(m[1], "eps", 0.5)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _restore_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FACTOR", "helper"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setitem(TABLE, "scale", 2.0)
    monkeypatch.setattr(Holder, "shared", 2.0)


def value_and_gradient(fun: Fun, *args: Any) -> tuple[Tensor, Tensor]:
    """The output at a fixed input, and the gradient there; buffers are put back."""
    x = seeded(2, 3, seed=3).requires_grad_()
    modules = fun.modules() if isinstance(fun, nn.Module) else ()
    saved = [
        (b, b.clone()) for module in modules for b in module.buffers(recurse=False)
    ]
    y = fun(x, *args)
    (grad,) = torch.autograd.grad(y.sum(), x)
    for buffer, value in saved:
        buffer.copy_(value)
    return y.detach(), grad


@pytest.mark.contract
@pytest.mark.parametrize("state", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(state: Callable[[], State]) -> None:
    """After the change, and after one more call, the region gives plain's new values."""
    fun, change = state()
    region = remat(fun)
    before = value_and_gradient(fun)
    assert_bitwise(value_and_gradient(region), before)

    change()

    after = value_and_gradient(fun)
    assert_bitwise(value_and_gradient(region), after)
    assert_bitwise(value_and_gradient(region), after)


# What these change are tensors themselves, which no place in the user's objects tells.
IN_TENSORS = {"parameter_data", "parameter_in_place", "parameter_frozen"}
SET_SINCE = {"context_variable"}


@pytest.mark.contract
@pytest.mark.parametrize("name", sorted(CHANGES.keys() - IN_TENSORS - SET_SINCE))
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_backward_finds_the_state_of_its_forward(engine: str, name: str) -> None:
    """What changed in between is as it was while a backward needs it, and only then."""
    fun, change = CHANGES[name]()
    region: Any = remat(fun, engine=engine)
    x = seeded(2, 3, seed=3).requires_grad_()
    buffers = [*fun.buffers()] if isinstance(fun, nn.Module) else []
    saved = [(buffer, buffer.clone()) for buffer in buffers]
    (expected,) = torch.autograd.grad(fun(x).sum(), x)
    for buffer, value in saved:
        buffer.copy_(value)

    out = region(x).sum()
    change()
    # A training run of batch_norm would write into what waits.
    after = None if buffers else fun(x).detach()
    (found,) = torch.autograd.grad(out, x)

    assert_bitwise(found, expected)
    assert after is None or torch.equal(fun(x), after)


# What changed cannot be put back for these.
GONE = {
    *("class_attribute", "class_attribute_appears", "hook_removed"),
    *("keys_swap", "tensor_to_none", "weak_reference"),
}


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - IN_TENSORS - SET_SINCE))
def test_a_backward_traced_late_finds_the_state_of_its_forward(name: str) -> None:
    """It sees what the forward saw, or raises; what changed stands there again after it."""
    fun, change = CHANGES[name]()
    region = remat(fun)
    x = seeded(2, 3, seed=3).requires_grad_()
    cotangent = seeded(3, 2, seed=5).t()
    modules = [*fun.modules()] if isinstance(fun, nn.Module) else []
    has_buffers = any(True for each in modules for _ in each.buffers(recurse=False))
    (expected,) = torch.autograd.grad(fun(x), x, cotangent)

    out = region(x)
    change()
    after = None if has_buffers else fun(x).detach()
    if name in GONE:
        with pytest.raises(RecomputationError, match="changed after the forward"):
            torch.autograd.grad(out, x, cotangent)
    else:
        assert_bitwise(torch.autograd.grad(out, x, cotangent)[0], expected)

    assert after is None or torch.equal(fun(x), after)


class Base:
    factor = 2.0

    def base(self) -> Any:
        return self.factor


class Dispatching(Base):
    table: ClassVar = {"factor": 2.0}

    def read(self) -> Any:
        return FACTOR


COMPUTED: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "global_of_a_method": ("read", lambda patch: patch.setitem(globals(), "FACTOR", 3.0)),
    "method": ("read", lambda patch: patch.setattr(Dispatching, "read", lambda _: 3.0)),
    "overridden": (
        "base", lambda patch: patch.setattr(Dispatching, "base", lambda _: 3.0, raising=False)
    ),
    "entry": ("table", lambda patch: patch.setitem(Dispatching.table, "factor", 3.0)),
    "value": ("factor", lambda patch: patch.setattr(Base, "factor", 3.0)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change"), COMPUTED.values(), ids=COMPUTED)
def test_what_a_class_has_under_a_computed_name(
    name: str,
    change: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`getattr` finds methods and constants of a class that no code mentions."""
    holder = Dispatching()

    def fun(x: Tensor) -> Tensor:
        found = getattr(holder, "".join(name))
        found = found() if callable(found) else found
        return scaled(x, found["factor"] if isinstance(found, dict) else found)

    region = remat(fun)
    assert_bitwise(value_and_gradient(region), value_and_gradient(fun))

    change(monkeypatch)

    assert_bitwise(value_and_gradient(region), value_and_gradient(fun))


def test_a_context_variable_that_was_unset_cannot_be_again() -> None:
    """A rerun that would need it so says that it cannot be."""
    fun, change = variable_set()
    out = remat(fun, engine="rerun")(seeded(2, 3).requires_grad_())

    change()

    with pytest.raises(
        RecomputationError, match=r"context variable `variable`: cannot"
    ):
        out.sum().backward()


@pytest.mark.contract
def test_each_thread_has_its_own_state() -> None:
    """A trace holds for what its own thread finds; a captured tensor is found there too."""
    context, variable = Context(), ContextVar[Tensor]("variable")
    fun = lambda x: scaled(x, context.value) * variable.get()  # noqa: E731
    region, found = remat(fun), list[Any]()

    def work(value: float) -> None:
        context.value = value
        variable.set(seeded(3, seed=int(value)).requires_grad_())
        found.append((value_and_gradient(region), value_and_gradient(fun)))
        region(seeded(2, 3)).sum().backward()
        first = variable.get().grad
        variable.get().grad = None
        fun(seeded(2, 3)).sum().backward()
        found.append((first, variable.get().grad))

    for value in (2.0, 3.0, 2.0):
        thread = threading.Thread(target=work, args=(value,))
        thread.start()
        thread.join()

    assert len(found) == 6
    for ours, plain in found:
        assert_bitwise(ours, plain)


STATICS = {
    "zero_sign": (0.0, -0.0),
    "one": (1, 1.0, True),
    "zero": (0, 0.0, False, -0.0),
    "nan": (math.nan, 1.0, math.nan),
}


@pytest.mark.contract
@pytest.mark.parametrize("values", STATICS.values(), ids=STATICS)
@pytest.mark.parametrize(
    "way", ["argument", "whole_argument", "set", "global", "attribute"]
)
def test_equal_values_of_unlike_kinds_differ(way: str, values: tuple[Any, ...]) -> None:
    """-0.0 is not 0.0, and 1, 1.0 and True are three values, wherever they stand."""
    holder = Holder()
    funs: dict[str, Fun] = {
        "argument": scaled,
        "whole_argument": scaled,
        "set": lambda x, values: scaled(x, *values),
        "global": lambda x, _: scaled(x, FACTOR),
        "attribute": lambda x, _: scaled(x, holder.value),
    }
    region = remat(funs[way], static_argnums=1 if way == "whole_argument" else ())

    for value in values * 2:
        set_global("FACTOR", value)()
        holder.value = value
        passed = {"argument": value, "whole_argument": value, "set": {value}}
        arguments = (passed.get(way),)
        plain = value_and_gradient(funs[way], *arguments)
        assert_bitwise(value_and_gradient(region, *arguments), plain)
