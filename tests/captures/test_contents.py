"""What holds values without attributes, and what comes to be there later: a new trace."""

import abc
import array
import collections
import dataclasses
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module

from remat import SideEffectError, remat
from tests.support import assert_bitwise, grads, seeded

Change = Callable[[], object]
Case = tuple[Callable[[Tensor], Tensor], Change]


def of_a_set() -> Case:
    held = {1, 2}
    return lambda x: x * len(held), lambda: held.add(3)


def in_a_set() -> Case:
    """It keeps its size."""
    held = {"a", "b"}
    return lambda x: x * (2 if "c" in held else 3), lambda: (
        held.remove("a"),
        held.add("c"),
    )


def of_a_set_in_a_dict() -> Case:
    held = {"skip": {1}}
    return lambda x: x * len(held["skip"]), lambda: held["skip"].add(2)


def of_a_deque() -> Case:
    held = collections.deque([1.0, 2.0], maxlen=2)
    return lambda x: x * held[0], lambda: held.append(5.0)


def of_a_deque_of_tensors() -> Case:
    held = collections.deque([torch.ones(3, dtype=torch.float64)])
    return lambda x: x * held[0], lambda: (
        held.clear(),
        held.append(seeded(3, seed=4)),
    )


def of_an_array() -> Case:
    held = np.array([2.0, 3.0])
    return lambda x: x * float(held[0]), lambda: held.__setitem__(0, 7.0)


def of_a_part_of_an_array() -> Case:
    held = np.arange(6.0).reshape(2, 3)
    part = held[:, 1]
    return lambda x: x * float(part.sum()), lambda: held.__setitem__((0, 1), 7.0)


def of_the_shape_of_an_array() -> Case:
    class Holder:
        array = np.zeros((2, 3))

    held = Holder()
    held.array = np.zeros((2, 3))
    return lambda x: x * held.array.shape[0], lambda: setattr(
        held, "array", np.zeros((3, 2))
    )


def of_bytes() -> Case:
    held = bytearray(b"ab")
    return lambda x: x * held[0], lambda: held.__setitem__(0, 3)


def of_a_standard_array() -> Case:
    held = array.array("d", [2.0, 3.0])
    return lambda x: x * held[1], lambda: held.__setitem__(1, 5.0)


def of_a_read_only_mapping() -> Case:
    behind = {"scale": 2.0}
    held = types.MappingProxyType(behind)
    return lambda x: x * held["scale"], lambda: behind.__setitem__("scale", 5.0)


def of_a_metaclass() -> Case:
    class Meta(type):
        scale = 2.0

    class Made(metaclass=Meta):
        pass

    return lambda x: x * Made.scale, lambda: setattr(Meta, "scale", 5.0)


class _Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __iter__(self) -> Iterator[float]:
        return iter((self.scale,))


def _of_a_made_class(made: Any) -> Case:
    """What makes a class lends it the name of a module of the standard library."""
    held = made(2.0)
    return lambda x: x * held.scale, lambda: setattr(held, "scale", 5.0)


def of_a_class_of_abc() -> Case:
    return _of_a_made_class(abc.ABCMeta("Made", (_Scaled,), {}))


def of_a_new_class() -> Case:
    return _of_a_made_class(types.new_class("Made", (_Scaled,)))


def of_a_made_dataclass() -> Case:
    return _of_a_made_class(dataclasses.make_dataclass("Made", ["scale"]))


def of_what_is_set_on_a_tensor() -> Case:
    """By a name that stands in a text."""
    held: Any = seeded(3)
    held.scale = 2.0
    return lambda x: x * getattr(held, "scale", 1.0), lambda: setattr(held, "scale", 5)


CONTENTS = [
    of_what_is_set_on_a_tensor,
    *(of_a_class_of_abc, of_a_new_class, of_a_made_dataclass),
    *(of_a_set, in_a_set, of_a_set_in_a_dict, of_a_deque, of_a_deque_of_tensors),
    *(of_an_array, of_a_part_of_an_array, of_the_shape_of_an_array),
    *(of_bytes, of_a_standard_array, of_a_read_only_mapping, of_a_metaclass),
]


def assert_follows(fun: Callable[[Tensor], Tensor], change: Change) -> None:
    """A region is the plain function, before and after a change."""
    region, x = remat(fun), seeded(3).requires_grad_()
    assert_bitwise(region(x), fun(x))
    traces = region.cache_info().misses
    assert_bitwise(region(x), fun(x))
    assert region.cache_info().misses == traces
    change()
    assert_bitwise(region(x), fun(x))


@pytest.mark.contract
@pytest.mark.parametrize("case", CONTENTS)
def test_contents_are_compared(case: Callable[[], Case]) -> None:
    assert_follows(*case())


@pytest.mark.contract
@pytest.mark.parametrize(
    ("held", "change"),
    [
        ({1}, lambda held: held.add(2)),
        (collections.deque([1]), lambda held: held.append(2)),
        (np.ones(2), lambda held: held.__setitem__(0, 5.0)),
        (bytearray(b"a"), lambda held: held.__setitem__(0, 5)),
    ],
)
def test_a_change_of_contents_in_the_trace_is_an_error(held: Any, change: Any) -> None:
    """It would happen once; it is undone."""
    before = str(held)

    def fun(x: Tensor) -> Tensor:
        change(held)
        return x.sin()

    with pytest.raises(SideEffectError, match="while it was traced"):
        remat(fun)(seeded(3).requires_grad_())

    assert str(held) == before


def caught(x: Tensor) -> Tensor:
    try:
        return x * LATE  # pyright: ignore[reportUndefinedVariable]
    except NameError:
        return x


def shadowed(x: Tensor) -> Tensor:
    return x * abs(-2)


class Config:
    """A class to which an attribute is added."""


def helper(x: Tensor) -> Tensor:
    return x * getattr(helper, "scale", 1.0)


def of_a_class(x: Tensor) -> Tensor:
    return x * getattr(Config, "scale", 1.0)


settings = types.ModuleType("settings_of_this_test")


def of_a_python_module(x: Tensor) -> Tensor:
    return x * (settings.scale if hasattr(settings, "scale") else 1.0)


def of_a_library(x: Tensor) -> Tensor:
    return x * math.tau


TABLE: Any = torch.ones(3, dtype=torch.float64)


def of_a_tensor(x: Tensor) -> Tensor:
    return x * (TABLE if hasattr(TABLE, "late") else TABLE * 2)


def tried_of_a_tensor(x: Tensor) -> Tensor:
    try:
        return x * TABLE.late
    except AttributeError:
        return x * TABLE


HERE = sys.modules[__name__]
LATER = [
    pytest.param(caught, HERE, "LATE", 4.0, id="global"),
    pytest.param(shadowed, HERE, "abs", lambda x: 7, id="builtin"),
    pytest.param(helper, helper, "scale", 3.0, id="function"),
    pytest.param(of_a_class, Config, "scale", 3.0, id="class"),
    pytest.param(of_a_python_module, settings, "scale", 3.0, id="module"),
    pytest.param(of_a_library, math, "tau", 1.0, id="library"),
    pytest.param(of_a_tensor, TABLE, "late", 3.0, id="tensor"),
    pytest.param(tried_of_a_tensor, TABLE, "late", 3.0, id="tensor-tried"),
]


@pytest.mark.contract
@pytest.mark.parametrize(("fun", "owner", "name", "value"), LATER)
def test_a_name_that_appears_later_makes_a_new_trace(
    fun: Any, owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_follows(fun, lambda: monkeypatch.setattr(owner, name, value, raising=False))


class WithoutDict:
    """Its values take no attributes of their own."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        return x * getattr(self, "scale", 1.0)


class WithDict(WithoutDict):
    """Its values do."""


def later_of_a_closure(held: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * getattr(held, "scale", 1.0)


def later_under_another_name(held: Any) -> Callable[[Tensor], Tensor]:
    def fun(x: Tensor, *, shown: Any = held) -> Tensor:
        try:
            return x * shown.scale
        except AttributeError:
            return x

    return fun


def later_in_a_list(held: Any) -> Callable[[Tensor], Tensor]:
    kept = [held]
    return lambda x: x * vars(kept[0]).get("scale", 1.0)


def later_of_its_class(held: Any) -> Callable[[Tensor], Tensor]:
    one = held()
    return lambda x: x * getattr(type(one), "scale", 1.0)


@pytest.mark.contract
@pytest.mark.parametrize(
    "ask",
    [
        later_of_a_closure,
        later_under_another_name,
        later_in_a_list,
        later_of_its_class,
        lambda held: held(),
    ],
    ids=["closure", "default", "list", "class-of", "own-method"],
)
@pytest.mark.parametrize("base", [WithDict, WithoutDict])
def test_a_class_may_get_later_what_code_has_asked_it_for(ask: Any, base: type) -> None:
    """By whatever way the code came to the class, or to a value of it."""
    held = types.new_class("Held", (base,), {}, lambda body: body.update(__slots__=()))
    assert_follows(ask(held), lambda: setattr(held, "scale", 3.0))


def test_a_function_of_a_closure_may_get_later_what_code_has_asked_it_for() -> None:
    def held() -> None: ...

    assert_follows(later_of_a_closure(held), lambda: setattr(held, "scale", 3.0))


@pytest.mark.contract
@pytest.mark.parametrize("is_marked_first", [False, True])
def test_equal_layers_whose_weights_differ_in_an_attribute_are_traced_apart(
    is_marked_first: bool,
) -> None:
    """As Megatron-LM marks the weights of experts: `getattr(w, "allreduce", True)`."""

    def layer(is_marked: bool) -> Callable[[Tensor], Tensor]:
        weight: Any = seeded(3)
        if is_marked:
            weight.allreduce = False
        return lambda x: x * weight if getattr(weight, "allreduce", True) else x

    for is_marked in (is_marked_first, not is_marked_first):
        fun, x = layer(is_marked), seeded(3)
        assert_bitwise(remat(fun)(x), fun(x))


class _Doubles:
    def __call__(self, _module: nn.Module, _args: object, y: Tensor) -> Tensor:
        return y * 2


FOR_ALL: dict[str, tuple[Any, Any]] = {
    "forward": (module.register_module_forward_hook, lambda _, __, y: y * 2),
    "before": (module.register_module_forward_pre_hook, lambda _, args: args[0] * 3),
    "backward": (
        module.register_module_full_backward_hook,
        lambda _, gradients, __: (gradients[0] * 5,),
    ),
    "before_backward": (
        module.register_module_full_backward_pre_hook,
        lambda _, gradients: (gradients[0] * 7,),
    ),
    "of_an_object": (module.register_module_forward_hook, _Doubles()),
}


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:.*a hook for all modules")
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("kind", FOR_ALL)
def test_hooks_for_all_modules_are_followed(kind: str, engine: Any) -> None:
    """Registered after a trace or before it, and removed: as the plain function."""
    linear, x = nn.Linear(4, 4, dtype=torch.float64), seeded(2, 4).requires_grad_()
    register, hook = FOR_ALL[kind]

    def fun(x: Tensor) -> Tensor:
        return linear(x).sin()

    region = remat(fun, engine=engine)
    before = grads(fun, (x,))
    assert_bitwise(grads(region, (x,)), before)
    handle = register(hook)
    try:
        during = grads(fun, (x,))
        assert_bitwise(grads(region, (x,)), during)
    finally:
        handle.remove()
    assert not torch.equal(*(cast("Tensor", each[0]) for each in (before, during)))
    assert_bitwise(grads(region, (x,)), before)


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_an_argument_of_a_made_class_is_looked_into(engine: Any) -> None:
    """Its tensors get their gradients, though the class claims to be of `abc`."""
    weight = seeded(3).requires_grad_()
    made: Any = abc.ABCMeta("Made", (_Scaled,), {})

    remat(lambda x, held: x * held.scale, engine=engine)(
        seeded(3), made(weight)
    ).sum().backward()

    assert_bitwise(weight.grad, seeded(3))


class Irreps(tuple[Any, ...]):
    """A tuple that has no length, as that of e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


class Scaled(nn.Module):
    """A module that holds one, of parts that are tuples too."""

    irreps = Irreps((Irreps((2.0,)),))

    def forward(self, x: Tensor) -> Tensor:
        for (factor,) in self.irreps:
            x = x * factor
        return x.sin()


def test_a_container_that_refuses_its_length() -> None:
    """It is watched by the length that it has."""
    region, plain, x = remat(model := Scaled()), Scaled(), seeded(3)
    for values in ((2.0,), (3.0,), (3.0, 4.0)):
        plain.irreps = model.irreps = Irreps(Irreps((each,)) for each in values)
        assert_bitwise(grads(region, [x]), grads(plain, [x]))
