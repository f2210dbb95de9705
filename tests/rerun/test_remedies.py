"""Refusals name the remedy that works, `engine="auto"` follows it, and it gives plain's numbers."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import (
    CapturedTensorError,
    MutationError,
    RematWarning,
    SideEffectError,
    TraceError,
    disabled,
    remat,
)
from remat.interop.torch import checkpoint, checkpoint_sequential
from tests.support import assert_bitwise, grads, seeded

pytestmark = pytest.mark.contract


@torch.library.custom_op("remat_remedies::shifted", mutates_args=())
def shifted(x: Tensor) -> Tensor:
    return x + 1


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * 1


shifted.register_autograd(_backward)
LIBRARY = torch.library.Library("remat_remedies", "FRAGMENT")
LIBRARY.define("doubled(Tensor x) -> Tensor")
LIBRARY.impl("doubled", lambda x: x * 2, "CPU")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops.remat_remedies.doubled(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.ops.remat_remedies.doubled(gradients[0])


WITHOUT_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "custom_op": lambda x: shifted(x.sin()).sin(),
    "a library's": lambda x: Doubled.apply(x.sin()).sin(),
    "in a no_grad block": lambda x: x.sin() * shifted(x.detach()),
}


@pytest.mark.parametrize("fun", WITHOUT_SHAPES.values(), ids=WITHOUT_SHAPES)
def test_an_operator_without_a_fake_implementation(fun: Any) -> None:
    """The error names its line, how to give it one, and the engine that needs none."""
    match = r"test_remedies\.py:\d+: .*torch\.library\.register_fake.*engine=\"rerun\""
    with pytest.raises(TraceError, match=match):
        grads(remat(fun), [seeded(4)])
    assert_bitwise(
        grads(remat(fun, engine="rerun"), [seeded(4)]), grads(fun, [seeded(4)])
    )

    with pytest.warns(RematWarning, match=r"from now on.*register_fake"):
        found = grads(remat(fun, engine="auto"), [seeded(4)])

    assert_bitwise(found, grads(fun, [seeded(4)]))


LIBRARY.define("thrice(Tensor x) -> Tensor")
LIBRARY.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")
LIBRARY.define("thrice_(Tensor(a!) x) -> Tensor(a!)")
LIBRARY.impl("thrice_", lambda x: x.mul_(3), "CompositeExplicitAutograd")
LIBRARY.define("thrice_quietly(Tensor(a!) x) -> ()")
LIBRARY.impl("thrice_quietly", lambda x: [x.mul_(3), None][1], "CPU")
LIBRARY.impl("thrice_quietly", lambda x: None, "Meta")
LIBRARY.define("largest(Tensor x) -> Tensor")
LIBRARY.impl("largest", lambda x: x.argmax(), "CompositeExplicitAutograd")
OPS: Any = torch.ops.remat_remedies


class Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return OPS.thrice(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return OPS.thrice(gradients[0])


def _quietly(x: Tensor) -> Tensor:
    y = x * 1
    OPS.thrice_quietly(y)
    return y.sin()


WITHOUT_A_DERIVATIVE: dict[str, Callable[[Tensor], Tensor]] = {
    "of its own": lambda x: x + OPS.thrice(x * 1).sin(),
    "an overload": lambda x: x + OPS.thrice.default(x * 1).sin(),
    "in place": lambda x: OPS.thrice_(x * 1).sin(),
    "without a result": _quietly,
}


@pytest.mark.filterwarnings("ignore:.*autograd kernel was not registered")
@pytest.mark.parametrize("fun", WITHOUT_A_DERIVATIVE.values(), ids=WITHOUT_A_DERIVATIVE)
def test_an_operator_without_a_kernel_for_autograd(fun: Any) -> None:
    """Plain torch differentiates what its kernel calls: a trace would lose that gradient."""
    match = r"thrice.* at test_remedies\.py:\d+: is an operator without a kernel for autog.*"
    with pytest.raises(TraceError, match=match + r"engine=\"rerun\""):
        grads(remat(fun), [seeded(4)])
    with pytest.warns(RematWarning, match=r"from now on"):
        found = grads(remat(fun, engine="auto"), [seeded(4)])

    assert_bitwise(found, grads(fun, [seeded(4)]))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x + OPS.thrice(x.detach()).sin(),
        lambda x: x[OPS.largest(x)].sin(),
        lambda x: Thrice.apply(x.sin()).sin(),
    ],
    ids=["detached", "integers", "in a function"],
)
def test_an_operator_that_hides_no_gradient_is_traced(fun: Any) -> None:
    """Nothing of it is differentiated, or by a formula of the user's."""
    assert_bitwise(grads(remat(fun), [seeded(4)]), grads(fun, [seeded(4)]))


def test_a_result_without_a_derivative_is_told_with_remedies() -> None:
    """Plain torch raises in a backward from it alone, and a trace makes the backward at once."""

    def fun(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().sum(), torch.special.zeta(x.exp() + 1, x.exp())

    x = seeded(4).requires_grad_()
    with pytest.raises(NotImplementedError, match="'zeta' is not implemented") as told:
        remat(fun)(x)
    (note,) = told.value.__notes__
    assert "Detach what nobody differentiates, or use engine=" in note

    for remedied in (
        remat(fun, engine="rerun"),
        remat(lambda x: (fun(x)[0], fun(x.detach())[1])),
    ):
        found: Any = remedied(x)
        assert_bitwise(torch.autograd.grad(found[0], x)[0], x.cos())


class Masked(nn.Module):
    """Keeps a mask from its first call on."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(len(x), len(x), dtype=x.dtype).tril()
        return self.mask @ x.sin()


class Tabled(nn.Module):
    """Keeps a table for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x), dtype=x.dtype)
        return x.sin() * self.tables[len(x)][:, None]


class Missing(nn.Module):
    """Makes an attribute in its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "steps"):
            self.steps = torch.linspace(0, 1, len(x), dtype=x.dtype)
        return x.sin() * self.steps[:, None]


@pytest.mark.parametrize("kind", [Masked, Tabled, Missing])
def test_a_cache_that_the_first_call_fills(kind: type[nn.Module]) -> None:
    """Both remedies work: a call without regions first, and the other engine."""
    x = seeded(3, 4)
    module = kind()
    region = remat(module)
    with pytest.raises(SideEffectError, match=r"with remat\.disabled\(\):"):
        grads(region, [x])

    with disabled():
        region(x)
    assert_bitwise(grads(region, [x]), grads(kind(), [x]))

    with pytest.warns(RematWarning, match=r"from now on"):
        found = grads(remat(kind(), engine="auto"), [x])
    assert_bitwise(found, grads(kind(), [x]))


def test_a_constant_that_hides_in_a_cache() -> None:
    """Without a gradient nothing is lost where the function reads it anew."""

    @functools.cache
    def table() -> Tensor:
        return seeded(4, seed=1)

    def fun(x: Tensor) -> Tensor:
        return (x.sin() * table()).sin()

    x = seeded(4)
    expected = grads(fun, [x])
    match = r"not be seen\. .* Or use engine=\"rerun\", .* with what it reads then"
    with pytest.raises(CapturedTensorError, match=match):
        grads(remat(fun), [x])

    with pytest.warns(RematWarning, match=r"from now on"):
        found = grads(remat(fun, engine="auto"), [x])
    assert_bitwise(found, expected)

    table().requires_grad_()
    with pytest.raises(CapturedTensorError, match=r"[Ii]ts gradient would be lost"):
        grads(remat(fun, engine="auto"), [x.clone()])


def test_functions_in_a_row_take_one_input() -> None:
    """A second one stands in the place of an option, and the error says so."""
    model = nn.Sequential(nn.Tanh(), nn.Tanh())
    x: Any = seeded(4)

    for call in (
        lambda: checkpoint_sequential(model, 1, x, x),
        lambda: checkpoint_sequential(model, 2, x, x),
        lambda: checkpoint(model, x, use_reentrant=x),
    ):
        with pytest.raises(
            TypeError, match=r"is a Tensor\. Functions in a row take one"
        ):
            call()


NESTED: dict[str, Callable[[Tensor], Tensor]] = {
    "of rows": lambda x: torch.nested.nested_tensor([x[:1], x], layout=torch.jagged),
    "as rows": lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged),
    "of values": lambda x: torch.nested.nested_tensor_from_jagged(
        x, torch.tensor([0, 1, 3])
    ),
}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_a_nested_tensor_that_is_made_inside(
    make: Callable[[Tensor], Any], is_first: bool
) -> None:
    """Torch makes an instance of its own for the first one, which a trace must not take."""

    def fun(x: Tensor) -> Tensor:
        return (make(x.sin()) * 2).values().sin()

    x = seeded(3, 2)
    if not is_first:
        make(x)
    with pytest.raises(
        TraceError, match=r"nested tensor.*padded tensor, or use engine"
    ):
        grads(remat(fun), [x])
    assert_bitwise(grads(remat(fun, engine="rerun"), [x]), grads(fun, [x]))


class Started(nn.Module):
    """Its first call sets its parameter, as an activation norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.is_started = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_started:
            self.scale.data.copy_(x.detach().std(0))
            self.is_started = True
        return (x * self.scale).sin()


@pytest.mark.parametrize("engine", ["trace", "auto", "rerun"])
def test_a_first_call_that_sets_a_parameter(engine: Any) -> None:
    """The error says how to make it, and later calls have the numbers of the plain module."""
    plain, module, x = Started(), Started(), seeded(4, 3).float()
    region = remat(module, engine=engine)
    first = r"the first call .*`with remat\.disabled\(\):`"
    with pytest.raises((MutationError, SideEffectError), match=first):
        region(x)

    with disabled():
        region(x)
    plain(x)
    module.zero_grad()

    own, theirs = [*module.parameters()], [*plain.parameters()]
    found = torch.autograd.grad(region(x).sum(), own)
    assert_bitwise(found, torch.autograd.grad(plain(x).sum(), theirs))
