"""The short way of a call: taken where nothing tells two calls apart, and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from remat import remat
from remat._regions import rules
from tests.calls.derivatives import cosine, counts, gradient, leaf
from tests.support import seeded

pytestmark = pytest.mark.contract


class Scale:
    """Something that a function is told to multiply by."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scale) and self.by == other.by

    def __hash__(self) -> int:
        return hash(self.by)

    @remat
    def method(self, x: Tensor) -> Tensor:
        """Of (n,)."""
        return (x * self.by).sin()


def by_scale(x: Tensor, scale: Scale) -> Tensor:
    """A function of an object."""
    return (x * scale.by).sin()


class Layer(nn.Module):
    """A layer whose input wants no gradient, as a first one's does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(3, 3, seed=seed))

    def forward(self, x: Tensor) -> Tensor:
        """Of (n, 3)."""
        return (x @ self.weight).sin()


def test_a_method_takes_it_for_any_object_of_its_class(looked_up: list[int]) -> None:
    """What is read of `self` is checked at each call."""
    Scale.method.cache_clear()
    one, other = Scale(2.0), Scale(3.0)

    for _ in range(4):
        assert torch.allclose(gradient(one.method, leaf()), cosine(2.0))
        assert torch.allclose(gradient(other.method, leaf()), cosine(3.0))
    # The two of the first round, and nothing after: one trace for each number.
    assert len(looked_up) == 2
    assert Scale.method.cache_info().currsize == 2

    other.by = 2.0
    assert torch.allclose(gradient(other.method, leaf()), cosine(2.0))
    assert len(looked_up) == 2


def test_another_class_is_another_call(looked_up: list[int]) -> None:
    """Although it reads the same of both."""

    class Twice(Scale):
        """A class of its own."""

    region = remat(by_scale)
    region.cache_clear()
    for scale in (Scale(2.0), Twice(2.0), Scale(2.0), Twice(2.0)):
        assert torch.allclose(gradient(region, leaf(), scale), cosine(2.0))

    assert len(looked_up) == 2


def test_static_objects_are_compared_and_not_told_apart_by_their_class() -> None:
    """`static_argnames` promises a comparison of the whole."""
    region = remat(by_scale, static_argnames="scale")
    region.cache_clear()

    for by in (2.0, 2.0, 3.0, 3.0, 2.0):
        assert torch.allclose(gradient(region, leaf(), Scale(by)), cosine(by))

    assert region.cache_info().currsize == 2


def test_layers_of_one_class_share_it(looked_up: list[int]) -> None:
    """Their parameters, which alone want a gradient, are found anew for each."""
    layers: list[Any] = [remat(Layer(seed)) for seed in range(3)]
    layers[0].cache_clear()
    x = seeded(2, 3)

    for _ in range(3):
        for layer in layers:
            (found,) = torch.autograd.grad(layer(x).sum(), layer.weight)
            (wanted,) = torch.autograd.grad(
                (x @ layer.weight).sin().sum(), layer.weight
            )
            assert torch.equal(found, wanted)

    # Each region is looked up once, to learn where its function's traces are.
    assert len(looked_up) == 3
    assert counts(layers[0]) == (8, 1, 1)


@pytest.mark.filterwarnings("ignore:.*was traced for a tenth time")
def test_routes_that_nothing_takes_any_more_make_room(looked_up: list[int]) -> None:
    """Not at once: more kinds of calls in turn than there are routes keep those that they have."""
    region = remat(by_scale)
    region.cache_clear()
    sizes = range(1, 13)

    def call(size: int) -> None:
        gradient(region, seeded(size).requires_grad_(), Scale(2.0))

    for _ in range(3):
        for size in sizes:
            call(size)

    looked_up.clear()
    for size in sizes:
        call(size)
    assert len(looked_up) < len(sizes)

    for _ in range(20):
        call(sizes[-1])
    looked_up.clear()
    call(sizes[-1])
    assert not looked_up


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda x: [x.sin()] * 2, id="twice"),
        pytest.param(lambda x: x.sin().view(3, 1), id="a view"),
        pytest.param(lambda x: (lambda y: (y, y[1:]))(x.sin()), id="a part besides"),
        pytest.param(lambda x: (x.sin(), x), id="an argument"),
        pytest.param(lambda x: (x.sin(), x[1:]), id="a part of an argument"),
        pytest.param(lambda x: (lambda y: (y, y.detach()))(x.sin()), id="cut off"),
    ],
)
def test_what_is_made_of_outputs_is_made_on_it(
    form: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a plain call makes it: the same storages, and the same gradients."""
    region = remat(form)
    region(leaf())
    # No other way can be taken.
    monkeypatch.setattr(rules, "_run_quietly", None)

    def looked_at(run: Callable[[Tensor], Any]) -> tuple[list[Any], Tensor]:
        x = leaf()
        found = pytree.tree_leaves(run(x))
        wanted = [each.cos().sum() for each in found if each.requires_grad]
        (grad,) = torch.autograd.grad(wanted, x)
        ptrs = [each.untyped_storage().data_ptr() for each in [x, *found]]
        shared = [ptrs.index(each) for each in ptrs]
        kinds = [(each.requires_grad, each.shape, each.stride()) for each in found]
        return [kinds, shared], grad

    (kinds, grad), (expected, expected_grad) = looked_at(region), looked_at(form)
    assert kinds == expected
    assert torch.equal(grad, expected_grad)


def swept(x: Tensor, w: Tensor) -> Tensor:
    """Of (3,) and (3,), with a second derivative by each."""
    return (x * w).sin() * w


#: What is differentiated by reverse mode, innermost.
UNDER_REVERSE_MODE: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda f: grad(lambda x, w: f(x, w).sum(), argnums=(0, 1)),
    "grad by one": lambda f: grad(lambda x, w: f(x, w).sum()),
    "grad of grad": lambda f: grad(
        lambda x, w: grad(lambda x: f(x, w).sum())(x).cos().sum(), argnums=(0, 1)
    ),
    "vmap of grad": lambda f: (
        lambda x, w: vmap(grad(lambda x, w: f(x, w).sum(), argnums=(0, 1)), (0, None))(
            x.expand(2, 3), w
        )
    ),
    "vjp": lambda f: lambda x, w: torch.func.vjp(f, x, w)[1](x),
}


@pytest.mark.parametrize("name", UNDER_REVERSE_MODE)
def test_it_is_taken_under_reverse_mode_too(name: str, looked_up: list[int]) -> None:
    """From the second time on, with the same numbers."""
    region = remat(swept)
    region.cache_clear()
    transform = UNDER_REVERSE_MODE[name]
    x, w = seeded(3), seeded(3, seed=1)
    expected = pytree.tree_leaves(transform(swept)(x, w))
    first = pytree.tree_leaves(transform(region)(x, w))
    looked_up.clear()

    again = pytree.tree_leaves(transform(region)(x, w))

    assert not looked_up
    for each, other, right in zip(first, again, expected, strict=True):
        assert torch.equal(each, other)
        assert torch.allclose(each, right)


def test_every_reverse_mode_keeps_its_own_numbers() -> None:
    """After each other, twice, and with plain autograd in between."""
    region = remat(swept)
    region.cache_clear()
    x, w = seeded(3), seeded(3, seed=1)

    for _ in range(2):
        for transform in UNDER_REVERSE_MODE.values():
            found = pytree.tree_leaves(transform(region)(x, w))
            right = pytree.tree_leaves(transform(swept)(x, w))
            assert all(map(torch.allclose, found, right))
            assert torch.equal(gradient(region, leaf(), w), gradient(swept, leaf(), w))


def test_reverse_mode_and_plain_autograd_are_both_known(looked_up: list[int]) -> None:
    """Neither takes the place of the other."""
    region = remat(swept)
    region.cache_clear()
    x, w = leaf(), seeded(3, seed=1)
    transformed = UNDER_REVERSE_MODE["grad"](region)

    for _ in range(3):
        gradient(region, x, w)
        transformed(x.detach(), w)

    assert len(looked_up) == 2


def test_what_a_level_below_wants_is_another_call() -> None:
    """Of a tensor that the transform has wrapped, and does not differentiate."""
    region = remat(swept)
    region.cache_clear()
    x, w = seeded(3), seeded(3, seed=1)

    def slope(fun: Callable[..., Tensor]) -> Tensor:
        return grad(lambda x: fun(x, w.exp()).sum())(x)

    for _ in range(2):
        slope(region)
    w.requires_grad_()

    (found,) = torch.autograd.grad(slope(region).sum(), w)

    assert torch.allclose(found, torch.autograd.grad(slope(swept).sum(), w)[0])


class Own(Tensor):
    """A tensor of a class that leaves torch's functions as they are."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def test_another_class_below_a_wrapper_is_another_call(looked_up: list[int]) -> None:
    """The wrapper has torch's own class, whatever it wraps."""
    region = remat(swept)
    region.cache_clear()
    x, w = seeded(3), seeded(3, seed=1)
    transformed = UNDER_REVERSE_MODE["grad"](region)
    for _ in range(2):
        transformed(x, w)
    looked_up.clear()

    transformed(x.as_subclass(Own), w)

    assert len(looked_up) == 1


def test_what_is_captured_alone_wants_a_gradient_under_reverse_mode() -> None:
    """By no argument, at the first call and at those like it."""
    layer = Layer(0)
    region: Any = remat(layer)
    region.cache_clear()
    x, given = seeded(2, 3), dict(layer.named_parameters())

    def slope(fun: Any) -> Tensor:
        return grad(lambda given: functional_call(fun, given, (x,)).sum())(given)[
            "weight"
        ]

    for _ in range(3):
        assert torch.equal(slope(region), slope(layer))


def test_without_gradients_to_compute_nothing_is_recorded() -> None:
    """After the same layer with them."""
    layer: Any = remat(Layer(0))
    x = seeded(2, 3)
    for _ in range(2):
        assert layer(x).requires_grad
    layer.weight.requires_grad_(False)

    assert not layer(x).requires_grad
