"""Functions under `torch.compile` that hold regions: a graph ends in front of each region."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

from remat import chain, policies, remat, scan, schedules
from tests.support import seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Dynamo's own, of what is between two graphs.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

weight = seeded(4, 4).requires_grad_()
settings = {"scale": 2.0}


@remat(policy=policies.save_matmul_outputs)
def layer(x: Tensor) -> Tensor:
    """A region that reaches a parameter and a number beyond its arguments."""
    return torch.sin(x @ weight).cos() * settings["scale"]


class Model(nn.Module):
    """Regions as a module and as a method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = remat(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double())
        self.last = nn.Linear(4, 4).double()

    @remat
    def head(self, x: Tensor) -> Tensor:
        return self.last(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x) + 1)


def loss(x: Tensor) -> Tensor:
    """Regions between operators."""
    return (layer(layer(x.exp())) + 1).sum()


def compiled(fun: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fun, backend="aot_eager")


def test_regions_run_between_the_graphs() -> None:
    """Captured tensors get their gradients; the policy is followed."""
    x = seeded(3, 4).requires_grad_()

    found = torch.autograd.grad(compiled(loss)(x), [x, weight])

    plain = torch.autograd.grad(loss(x), [x, weight])
    torch.testing.assert_close(found, plain)
    assert layer.saved_residuals(x) != []


def test_state_that_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 7: the region's own checks run at each call."""
    x, fun = seeded(3, 4).requires_grad_(), compiled(loss)
    before = fun(x)

    monkeypatch.setitem(settings, "scale", 3.0)
    after = fun(x)

    assert not torch.equal(before, after)
    torch.testing.assert_close(after, loss(x))


def test_modules_and_methods() -> None:
    """A model whose parts are regions."""
    model, x = Model(), seeded(3, 4)

    compiled(model)(x).sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()

    torch.testing.assert_close(found, [each.grad for each in model.parameters()])


def scanned(x: Tensor) -> Tensor:
    """A stack under a schedule."""

    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        carry = torch.tanh(carry @ weight + x)
        return carry, carry.sum()

    carry, ys = scan(step, x[0], x.exp(), schedule=schedules.Sqrt())
    return carry.sum() + ys.sum()


def chained(x: Tensor) -> Tensor:
    """Functions that differ, under a schedule."""
    return chain([torch.sin, layer, torch.cos], schedules.Every(2))(x.exp()).sum()


@pytest.mark.parametrize("fun", [scanned, chained])
def test_stacks(fun: Any) -> None:
    """They run apart, like regions."""
    x = seeded(5, 4).requires_grad_()

    found = torch.autograd.grad(compiled(fun)(x), [x, weight])

    torch.testing.assert_close(found, torch.autograd.grad(fun(x), [x, weight]))


def test_transforms_around_regions() -> None:
    """A transform cannot be split into graphs: torch runs it as it is."""
    x = seeded(3, 4)

    found = compiled(torch.func.grad(loss))(x)

    torch.testing.assert_close(found, torch.func.grad(loss)(x))


def test_one_graph_for_all_is_refused() -> None:
    """`fullgraph=True` says where the graph ends."""
    torch._dynamo.reset()
    fun: Any = torch.compile(loss, backend="aot_eager", fullgraph=True)

    with pytest.raises(Unsupported, match="_call_outside_of_dynamo"):
        fun(seeded(3, 4))
