"""Arguments that are no tensors: static values, numpy arrays.

"Tensors are dynamic, numpy arrays are an error that says how; every other leaf is static,
compared by type and value." "`static_argnums`, `static_argnames` (by position or
keyword): the whole argument is compared by `==` and hash, not walked. A tenth retrace
because of one static value warns, and says: pass a 0-d tensor."
"""

import array
import datetime as dt
import decimal
import fractions
import pathlib
import re
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remat import StaticArgumentError, remat
from tests.support import assert_bitwise, grads, seeded


def double_sine(x: Tensor, factor: float = 1.0) -> Tensor:
    """Two sines."""
    return torch.sin(torch.sin(x) * factor)


def powered(x: Tensor, how: Any, *, times: Any = 1) -> Tensor:
    """Uses two objects that are not walked."""
    return (
        torch.sin(torch.sin(x) ** how["n"] if isinstance(how, dict) else x**how) * times
    )


class Config(dict):  # a dict that compares and hashes as a whole
    """A hashable mapping."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


@pytest.mark.contract
@pytest.mark.parametrize(
    "options",
    [{"static_argnums": 1}, {"static_argnums": (1,)}, {"static_argnames": "how"}, {"static_argnames": ("how", "times")}],
    ids=["num", "nums", "name", "names"],
)  # fmt: skip
@pytest.mark.parametrize("by_keyword", [False, True], ids=["positional", "keyword"])
def test_static_arguments(options: Any, by_keyword: bool) -> None:
    """Equal values share a trace, unequal ones do not, by position and by keyword."""
    region: Any = remat(powered, **options)
    region.cache_clear()  # traces belong to the code, which other tests share

    def call(n: int) -> None:
        how = Config(n=n)
        args, kwargs = ((), {"how": how}) if by_keyword else ((how,), {})
        found = grads(lambda x: region(x, *args, **kwargs), [seeded(3)])
        expected = grads(lambda x: powered(x, *args, **kwargs), [seeded(3)])
        assert_bitwise(found, expected)

    for n in (2, 2, 3, 2, 3):
        call(n)

    assert region.cache_info().misses == 2


@pytest.mark.contract
@pytest.mark.parametrize("how", [(), (2, 3), ((2, 3), 4)], ids=str)
def test_a_static_argument_of_several_leaves(how: Any) -> None:
    """A pytree that is static is one argument, and the one behind it keeps its name."""

    def scaled(x: Tensor, how: Any, scale: Tensor) -> Tensor:
        return torch.sin(torch.sin(x) * len(how)) * scale

    x, scale = seeded(3), seeded(3).requires_grad_()
    region = remat(scaled, static_argnums=1)

    assert_bitwise(
        grads(lambda *args: region(args[0], how, args[1]), [x, scale]),
        grads(lambda *args: scaled(args[0], how, args[1]), [x, scale]),
    )
    names = [each.path for each in region.saved_residuals(x, how, scale)]
    assert names == ["x", "scale"]


@pytest.mark.contract
@pytest.mark.parametrize("how", [(2, 3), iter((2, 3))], ids=["tuple", "iterator"])
def test_a_static_argument_of_a_call_that_is_looked_at(how: Any) -> None:
    """It stays one where no tensor requires a gradient, and every tensor is asked about."""
    region: Any = remat(lambda x, how: torch.sin(torch.sin(x)), static_argnums=1)
    region.cache_clear()  # the other case has the same code

    region.saved_residuals(seeded(3).requires_grad_(), how)
    region.saved_residuals(seeded(3), how)

    assert region.cache_info().misses == 1


def test_positions_do_not_run_into_keywords() -> None:
    """What `*args` takes is static by position; the parameter behind it is another one."""

    def summed(x: Tensor, *factors: int, scale: Tensor) -> Tensor:
        return torch.sin(torch.sin(x) * sum(factors)) * scale

    args, scale = (seeded(3), 2, 3), seeded(3)
    region = remat(summed, static_argnums=(1, 2))

    found = grads(lambda x: region(x, *args[1:], scale=scale), args[:1])
    assert_bitwise(found, grads(lambda x: summed(x, *args[1:], scale=scale), args[:1]))


@pytest.mark.parametrize("engine", ["trace", "rerun", "auto"])
def test_an_unhashable_static_argument_is_an_error(engine: Any) -> None:
    """The message names the argument, its type, and says what to do."""
    region = remat(powered, static_argnames="how", engine=engine)

    with pytest.raises(StaticArgumentError, match=r"(?s)how.*hash"):
        region(seeded(3).requires_grad_(), {"n": 2})


@pytest.mark.contract
@pytest.mark.parametrize("static", [(), ("factor",)], ids=["leaf", "static"])
def test_the_tenth_value_warns(static: Any) -> None:
    """Ten traces that differ in one Python number: pass a 0-d tensor, says the warning."""
    region = remat(lambda x, factor: double_sine(x, factor), static_argnames=static)
    texts = []
    for i in range(13):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            region(seeded(3).requires_grad_(), float(i))
        texts += [(i, str(warning.message)) for warning in caught]

    ((when, text),) = texts
    assert when == 9
    assert "factor" in text
    assert "0-d tensor" in text


@pytest.mark.contract
@pytest.mark.parametrize(
    "nest", [lambda a: a, lambda a: {"k": [a]}], ids=["bare", "nested"]
)
def test_a_numpy_array_is_an_error(nest: Any) -> None:
    """It says which argument, and how to convert it."""
    region = remat(lambda x, array: torch.sin(x))

    with pytest.raises(
        StaticArgumentError, match=r"`array.*Pass torch\.from_numpy\(array\)"
    ):
        region(seeded(3).requires_grad_(), nest(np.ones(3)))


class Narrow:
    """A class that is passed as a value."""

    factor = 2.0


class Wide(Narrow):
    """Another one."""

    factor = 3.0


VALUES: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "set": ({2}, {3}, min),
    "frozenset": (frozenset((2, 4)), frozenset((3, 4)), min),
    "nested_set": ({(1,): {2}}, {(1,): {3}}, lambda v: min(v[1,])),
    "date": (dt.date(2020, 1, 2), dt.date(2020, 1, 3), lambda v: v.day),
    "duration": (
        dt.timedelta(2),
        dt.timedelta(3),
        lambda v: v.days,
    ),
    "path": (pathlib.Path("a"), pathlib.Path("bb"), lambda v: len(v.name)),
    "pattern": (re.compile("a"), re.compile("bb"), lambda v: len(v.pattern)),
    "uuid": (uuid.UUID(int=2), uuid.UUID(int=3), lambda v: v.int),
    "fraction": (fractions.Fraction(1, 2), fractions.Fraction(1, 3), float),
    "decimal": (decimal.Decimal(2), decimal.Decimal(3), float),
    "finfo": (torch.finfo(torch.float32), torch.finfo(torch.float64), lambda v: v.bits),
    "class": (Narrow, Wide, lambda v: v.factor),
}


# The contents of sets that are captured are not watched.
CAPTURED = [name for name in VALUES if name not in {"set", "nested_set"}]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("name", "is_captured"),
    [(name, False) for name in VALUES] + [(name, True) for name in CAPTURED],
)
def test_values_of_the_standard_library_are_compared(
    name: str, is_captured: bool
) -> None:
    """By type and value, wherever the function finds them."""
    *values, number = VALUES[name]
    current: Any = None

    def plain(x: Tensor, value: Any) -> Tensor:
        return torch.sin(torch.sin(x) * float(number(value)))

    def captured(x: Tensor) -> Tensor:
        return plain(x, current)

    region: Any = remat(captured if is_captured else plain)
    region.cache_clear()  # traces belong to the code, which other tests share
    for value in (*values, values[0]):
        current = value
        given = () if is_captured else (value,)

        found = grads(lambda x: region(x, *given), [seeded(3)])  # noqa: B023

        assert_bitwise(found, grads(captured, [seeded(3)]))
    assert region.cache_info().misses == 2


@pytest.mark.contract
def test_an_attribute_of_a_class_that_is_an_argument_may_change() -> None:
    """As `cls` in a class method: what is read of it is checked at each call."""

    class Scaled:
        factor = 2.0

        @classmethod
        @remat
        def apply(cls, x: Tensor) -> Tensor:
            return torch.sin(torch.sin(x) * cls.factor)

    class Doubled(Scaled):
        factor = 4.0

    for kind, factor in ((Scaled, 2.0), (Doubled, 4.0), (Scaled, 3.0)):
        kind.factor = factor

        found = grads(kind.apply, [seeded(3)])

        assert_bitwise(found, grads(lambda x: double_sine(x, factor), [seeded(3)]))  # noqa: B023


@pytest.mark.contract
def test_a_bound_region_is_equal_to_another_of_its_object() -> None:
    """As bound methods are: one that is a static argument is traced once."""

    class Waves:
        @remat
        def sine(self, x: Tensor) -> Tensor:
            return x.sin()

    waves, calls = Waves(), remat(lambda fun, x: fun(x).exp(), static_argnums=0)

    assert {waves.sine} == {waves.sine}
    assert waves.sine != Waves().sine
    for _ in range(3):
        calls(waves.sine, seeded(3).requires_grad_())
    assert calls.cache_info().misses == 1


@pytest.mark.contract
def test_a_set_that_changes_after_the_call() -> None:
    """A backward that is traced later sees it as it was."""
    chosen = {"sine"}

    def chosen_waves(x: Tensor, names: set[str]) -> Tensor:
        return double_sine(x) if "sine" in names else x

    x = seeded(3).requires_grad_()
    y = remat(chosen_waves)(x, chosen)
    chosen.clear()
    (found,) = torch.autograd.grad(y, x, seeded(3), create_graph=True)
    (found,) = torch.autograd.grad(found.sum(), x)

    (first,) = torch.autograd.grad(double_sine(x), x, seeded(3), create_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(first.sum(), x)[0])


HIDDEN: dict[str, Callable[[Tensor], Any]] = {
    "generator": lambda x: (each for each in [x]),
    "map": lambda x: map(torch.sin, [x]),
    "iterator": lambda x: iter([x]),
    "set": lambda x: {x},
    "frozenset": lambda x: frozenset([x]),
    "dict_values": lambda x: {"a": x}.values(),
    "dict_items": lambda x: {"a": x}.items(),
    "bytearray": lambda _: bytearray(b"a"),
    "array": lambda _: array.array("d", [2.0]),
}


@pytest.mark.contract
@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("is_first", [True, False], ids=["alone", "beside_a_tensor"])
def test_what_hides_its_contents_is_refused(name: str, is_first: bool) -> None:
    """Before, such a call ran without a region, or with what the first call held."""
    x = seeded(3).requires_grad_()
    region: Any = remat(lambda *args: args[-1])
    args = (HIDDEN[name](x),) if is_first else (x, {"k": HIDDEN[name](x)})

    with pytest.raises(StaticArgumentError, match="hides its contents") as error:
        region(*args)

    assert (
        "`args.0`" in str(error.value) if is_first else "`args.1.k`" in str(error.value)
    )
    assert "Pass its contents as a tuple, a list or a dict" in str(error.value)


class Doubled(torch.autograd.Function):
    """Takes a size beside its tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size) -> Tensor:
        return x * shape.numel()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        return cotangents[0] * 2, None


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("dynamic_shapes", [False, True])
def test_a_size_stays_one(engine: Any, dynamic_shapes: bool) -> None:
    """As an argument, in a container, given to an `autograd.Function`, and returned."""
    options: Any = {} if engine == "rerun" else {"dynamic_shapes": dynamic_shapes}

    @remat(engine=engine, **options)
    def fun(x: Tensor, shape: torch.Size, more: dict[str, torch.Size]) -> Any:
        assert type(shape) is type(more["s"]) is torch.Size
        y: Any = Doubled.apply(x * more["s"].numel(), x.shape)
        return y.reshape(shape).sin(), x.shape, {"s": shape}

    for length in (2, 3):
        shape, x = torch.Size([2, length]), seeded(2 * length).requires_grad_()
        y, of_x, more = fun(x, shape, {"s": shape})

        assert (of_x, more) == (x.shape, {"s": shape})
        assert type(of_x) is type(more["s"]) is torch.Size
        assert_bitwise(y, (x * len(x) * len(x)).reshape(shape).sin())
