"""Functions over every kind of state that a trace covers, and what changes each."""

import collections
import enum
import functools
import math
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support import seeded

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

    ONE = enum.member(functools.partial(lambda: FACTOR))
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


class Scale(torch.autograd.Function):
    """A function of the user's, whose `apply` is a method of C."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = FACTOR
        return x.sin() * FACTOR

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * ctx.factor


apply_scale = Scale.apply


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
    "autograd_function": lambda: (Scale.apply, set_global("FACTOR", 3.0)),
    "autograd_function_by_its_apply": lambda: (
        lambda x: apply_scale(x).sin(), set_global("FACTOR", 3.0)
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


class Base:
    factor = 2.0

    def base(self) -> Any:
        return self.factor
