"""A copy of a module's attributes: its regions run the copy, with the copy's parameters.

`module.__new__(type(module))` with a copied `__dict__` is how meta-learning libraries clone modules
(learn2learn's `clone_module`), how `copy.copy` does it, and `nn.DataParallel`.
"""

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import CapturedTensorError, modules, policies, remat
from remat.interop.torch import apply_activation_checkpointing
from tests.support import assert_bitwise, daily, seeded

pytestmark = pytest.mark.contract


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.scale = nn.Parameter(seeded(4))

    count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return (self.linear(x) * self.scale).tanh()


class Decorated(Block):
    @remat
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


def cloned(module: nn.Module) -> Any:
    """The module with parameters that are computed from its own, as learn2learn clones it."""
    clone: Any = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {
        k: v * 1.5 for k, v in module._parameters.items() if v is not None
    }
    clone._buffers = {k: v.clone() for k, v in module._buffers.items() if v is not None}
    clone._modules = {k: cloned(v) for k, v in module._modules.items() if v is not None}
    return clone


def assigned(module: nn.Module) -> nn.Module:
    for each in module.children():
        each.forward = remat(each.forward)
    return module


def assigned_method(module: nn.Module) -> nn.Module:
    for each in module.children():
        each.forward = types.MethodType(remat(type(each).forward), each)
    return module


def decorated(module: nn.Module) -> nn.Module:
    for each in module.children():
        each.__class__ = Decorated
    return module


def kept(module: nn.Module) -> nn.Module:
    """The bound region of a class that is decorated, as an attribute."""
    for each in decorated(module).children():
        each.forward = each.forward
    return module


def checkpointed(module: nn.Module) -> nn.Module:
    apply_activation_checkpointing(
        module, check_fn=lambda each: isinstance(each, Block)
    )
    return module


def wrapped(module: nn.Module) -> nn.Module:
    regions: Any = map(remat, module.children())
    return nn.Sequential(*regions)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "apply": lambda module: modules.apply(module, Block),
    "apply nested": lambda module: modules.apply(module, lambda _, __: True),
    "apply rerun": lambda module: modules.apply(module, Block, engine="rerun"),
    "apply auto": lambda module: modules.apply(module, Block, engine="auto"),
    "policy": lambda m: modules.apply(m, Block, policy=policies.save_matmul_outputs),
    "drop-in": checkpointed,
    "assigned": assigned,
    "assigned method": assigned_method,
    "kept": kept,
    "decorated": lambda module: modules.apply(decorated(module), Block),
    "wrapped": wrapped,
}


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def meta_step(module: Any, x: Tensor) -> list[Tensor]:
    """A loss of a clone after a step of its own, and the gradients of the module beneath."""
    clone = cloned(module)
    inner = torch.autograd.grad(
        clone(x).square().sum(), clone[0].scale, create_graph=True
    )[0]
    clone[0]._parameters["scale"] = clone[0].scale - 0.1 * inner
    loss = clone(x).square().sum()
    buffers = [clone[0].count, module[0].count]
    return [loss, *torch.autograd.grad(loss, [*module.parameters()]), *buffers]


# A policy changes what the regions of `apply` save, not which module they run.
@pytest.mark.parametrize("way", daily(WAYS, WAYS.keys() - {"policy"}))
def test_a_meta_gradient_is_that_of_the_clone(way: Any) -> None:
    """Loss, gradients of the module's own parameters, and buffers are those of plain torch."""
    x = seeded(3, 4)
    expected, found = meta_step(model(), x), meta_step(way(model()), x)

    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_shallow_copy_with_other_parts(way: Any) -> None:
    """The original's region is as before, and the copy's runs the copy."""
    plain, x = model(), seeded(3, 4)
    module: Any = way(model())
    twin: Any = copy.copy(module[0])
    twin._modules = {"linear": nn.Linear(4, 4, dtype=torch.float64)}
    bare: Any = copy.copy(plain[0])
    bare._modules = twin._modules

    assert_bitwise(module[0](x), plain[0](x))
    if way is not wrapped:  # which `copy.copy` makes anew, around the same module
        assert_bitwise(twin(x), bare(x))


def made_functional(module: nn.Module) -> Any:
    """A module of a class made of its own, with other parameters, as higher makes it."""

    class Functional(type(module)):
        def __init__(self) -> None:
            nn.Module.__init__(self)

        def forward(self, *args: Any) -> Any:
            return super().forward(*args) * 2

    made: Any = Functional()
    own = vars(made).keys()
    made.__dict__.update((k, v) for k, v in vars(module).items() if k not in own)
    named = module.named_parameters(recurse=False)
    made._parameters = {name: each * 1.5 for name, each in named}
    made._buffers = {k: v.clone() for k, v in module._buffers.items() if v is not None}
    children = module.named_children()
    made._modules = {name: made_functional(child) for name, child in children}
    return made


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_with_a_class_of_its_own(way: Any) -> None:
    """It runs the forward of that class, as the copy of a module without regions does."""

    def gradients(module: nn.Module) -> Any:
        loss = made_functional(module)(seeded(3, 4)).square().sum()
        return loss, torch.autograd.grad(loss, [*module.parameters()])

    torch.testing.assert_close(gradients(WAYS[way](model())), gradients(model()))


def test_hooks_of_the_copy_run_around_it() -> None:
    """With hooks torch calls the forward from another frame."""
    module = modules.apply(model(), Block)
    clone, seen = cloned(module), []
    clone[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    clone[0].register_forward_hook(lambda module, _, out: seen.append(module))
    x = seeded(3, 4)

    assert_bitwise(clone[0](x), cloned(model())[0](x * 2))
    assert seen == [clone[0]]


def test_a_direct_call_that_may_mean_two_modules_raises() -> None:
    """Nothing tells through which of them the attribute was found."""
    module: Any = modules.apply(model(), Block)
    x = seeded(3, 4)
    assert_bitwise(module[0].forward(x), model()[0](x))
    clone = cloned(module)

    for each in (clone, module):
        with pytest.raises(
            CapturedTensorError, match=r"is called directly.*module\(x\)"
        ):
            each[0].forward(x)

    modules.apply(clone, Block)
    assert_bitwise(clone[0].forward(x), cloned(model())[0](x))


def test_a_region_that_another_class_borrows_runs_its_own_module() -> None:
    """As any bound method does that is an attribute of another object."""

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.forward = inner.forward

    inner: Any = modules.apply(model(), Block)[0]
    x = seeded(3, 4)

    assert_bitwise(Around(inner)(x), model()[0](x))
    assert_bitwise(inner.forward(x), model()[0](x))


@pytest.mark.contract
@pytest.mark.parametrize("change", ["its forward", "the class"])
@pytest.mark.parametrize("way", ["a call", "a copy", "remove", "apply"])
def test_a_region_follows_the_class(change: str, way: str) -> None:
    """To another `forward` of it, as libraries of kernels set, or to another class."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * 2

    class Other(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * 3

    module, x = modules.apply(Scaled(), ""), seeded(3).requires_grad_()
    module(x)
    if change == "its forward":
        Scaled.forward = Other.forward  # type: ignore[method-assign]
    else:
        module.__class__ = Other

    if way == "a copy":
        module = copy.deepcopy(module)
    elif way == "remove":
        assert "forward" not in vars(modules.remove(module))
    elif way == "apply":
        modules.apply(module, "")
    assert_bitwise(module(x), x.sin() * 3)
