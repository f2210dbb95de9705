"""Law 7, no stale state.

"Covered, and checked at every call: closure cells, named globals (through user-defined
helpers), defaults, partials, simple attributes *read in the trace* of reached modules
and objects, lists and dicts of these, `training`. A change retraces. Python side effects
run once, at trace time, as under jit; a function that changes covered state while it is
traced, or leaves a fake tensor in a user's object, raises `SideEffectError`."
"""

import math
import sysconfig
import threading
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

import remat as package
from remat import RecomputationError, TraceError, layers, remat, schedules
from tests.laws import changes
from tests.laws.changes import (
    CHANGES,
    FACTOR,
    Base,
    Context,
    Fun,
    Holder,
    State,
    scaled,
    variable_set,
)
from tests.support import assert_bitwise, seeded


@pytest.fixture(autouse=True)
def _restore_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FACTOR", "helper"):
        monkeypatch.setattr(changes, name, getattr(changes, name))
    monkeypatch.setitem(globals(), "FACTOR", FACTOR)
    monkeypatch.setitem(changes.TABLE, "scale", 2.0)
    monkeypatch.setattr(changes.Holder, "shared", 2.0)


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
def test_a_backward_finds_the_state_of_its_forward(engine: Any, name: str) -> None:
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
    # A training run of batch_norm would write into what waits, and what a weak reference leads to
    # lives until the backward.
    is_other = buffers or name == "weak_reference"
    after = None if is_other else fun(x).detach()
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


class Parcel:
    """A tensor, and what pytree is told beside it: the context."""

    def __init__(self, x: Tensor, context: Any) -> None:
        self.x = x
        self.context = context


register_pytree_node(
    Parcel,
    lambda each: ([each.x], each.context),
    lambda x, found: Parcel(next(iter(x)), found),
)

#: What a context may be, how a function reads it, and how the caller changes it.
CONTEXTS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": ([2.0], lambda held: held[0], lambda held: held.append(held.pop() + 1)),
    "dict": (
        {"scale": 2.0},
        lambda held: held["scale"],
        lambda held: held.update(scale=held["scale"] + 1),
    ),
    "object": (
        Holder(),
        lambda held: held.value,
        lambda held: setattr(held, "value", held.value + 1),
    ),
    "object without a hash in a tuple": (
        (SimpleNamespace(scale=2.0),),
        lambda held: held[0].scale,
        lambda held: setattr(held[0], "scale", held[0].scale + 1),
    ),
    "tensor": (seeded(3, seed=5), lambda held: held, lambda held: held.add_(1)),
}


@pytest.mark.contract
@pytest.mark.parametrize("kind", CONTEXTS)
def test_a_change_in_the_context_of_an_argument_is_noticed(kind: str) -> None:
    """Beside the parts of a class that was registered with pytree."""
    held, read, change = CONTEXTS[kind]

    def fun(x: Tensor) -> Tensor:
        return inner(Parcel(x, held))

    def plain(parcel: Parcel) -> Tensor:
        return torch.sin(parcel.x * read(parcel.context))

    region = remat(plain)
    for _ in range(3):
        inner = plain
        expected = value_and_gradient(fun)
        inner = region
        assert_bitwise(value_and_gradient(fun), expected)
        assert_bitwise(value_and_gradient(fun), expected)
        change(held)


@pytest.mark.contract
def test_a_tensor_in_the_context_of_an_argument_gets_its_gradient() -> None:
    """As one that is captured."""
    held = seeded(3, seed=5).requires_grad_()
    region = remat(lambda parcel: torch.sin(parcel.x * parcel.context).sum())

    (grad,) = torch.autograd.grad(region(Parcel(seeded(2, 3), held)), held)

    x = seeded(2, 3)
    (expected,) = torch.autograd.grad(torch.sin(x * held).sum(), held)
    assert_bitwise(grad, expected)


@pytest.mark.contract
@pytest.mark.parametrize("schedule", [None, schedules.Sqrt(), schedules.Revolve(2)])
def test_an_object_that_stages_pass_on_is_the_one_of_the_call(schedule: Any) -> None:
    """Of a stack, too, whatever its schedule."""
    stack = layers.chain([lambda pair: (pair[0].sin(), pair[1])] * 3, schedule=schedule)
    for _ in range(3):
        held = Holder()
        assert stack((seeded(3).requires_grad_(), held))[1] is held


@pytest.mark.contract
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_object_that_is_returned_is_the_one_of_the_call(dynamic: bool) -> None:
    """`return x, cache`; beside it what is no argument, and stays the same."""
    other = Holder()
    region: Any = remat(
        lambda x, held, held_too: (x.sin(), [held, held_too], other),
        dynamic_shapes=dynamic,
    )
    for size in (3, 3, 3, 4, 5):
        held = Holder(), Holder()
        _, returned, same = region(seeded(size).requires_grad_(), *held)
        assert all(one is another for one, another in zip(returned, held, strict=True))
        assert same is other


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
        globals()["FACTOR"] = value
        holder.value = value
        passed = {"argument": value, "whole_argument": value, "set": {value}}
        arguments = (passed.get(way),)
        plain = value_and_gradient(funs[way], *arguments)
        assert_bitwise(value_and_gradient(region, *arguments), plain)


_DEMO = """
SCALE = 2.0

def scale(x):
    return x * SCALE

def fun(x):
    return scale(x).sin()

def picked(x):
    return x[x > 0]
"""


@pytest.mark.parametrize(
    "folder",
    [*package.__path__, *torch.__path__, sysconfig.get_path("stdlib")],
    ids=["remat", "torch", "stdlib"],
)
def test_a_file_beside_a_library_is_not_the_librarys(folder: str) -> None:
    """As remat_demo.py in a clone of this package, or what torch_geometric holds."""
    space: dict[str, Any] = {}
    exec(compile(_DEMO, f"{folder}_demo.py", "exec"), space)
    fun: Callable[..., Tensor] = space["fun"]
    picked: Callable[..., Tensor] = space["picked"]
    region, x = remat(fun), seeded(3).requires_grad_()
    region(x)

    space["SCALE"] = 3.0

    if "site-packages" not in folder:  # what is installed is followed by other rules
        assert_bitwise(region(x), fun(x))
    with pytest.raises(TraceError, match=rf"^{Path(folder).name}_demo.py:11:"):
        remat(picked)(x)
