"""What a function stores in objects that it reaches is a result too: it keeps its gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from remat import CapturedTensorError, modules, remat
from tests.support import assert_bitwise, seeded

pytestmark = pytest.mark.contract


class Expert(nn.Module):
    """A layer that leaves an auxiliary loss somewhere, as mixtures of experts do."""

    def __init__(self, store: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.aux: Any = None
        self.losses: list[Any] = []
        self.table: dict[Any, Any] = {}
        self.store = store

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.store(self, h.square().sum())
        return h.sin() if h.sum() > 0 else h.cos()

    def stored(self) -> Tensor:
        """All that it has left."""
        found = tree_leaves((self.aux, self.losses, self.table))
        return sum((each for each in found if each is not None), torch.zeros(()))


STORES: dict[str, Callable[[Any, Tensor], Any]] = {
    "attribute": lambda self, loss: setattr(self, "aux", loss),
    "tuple": lambda self, loss: setattr(self, "aux", (loss, loss.exp())),
    "new list": lambda self, loss: setattr(self, "losses", [loss]),
    "append": lambda self, loss: self.losses.append(loss),
    "dict": lambda self, loss: self.table.update(loss=loss),
    "key that is no number": lambda self, loss: self.table.update({self.layer: loss}),
}


def _expert(store: Callable[[Any, Tensor], Any]) -> Expert:
    torch.manual_seed(0)
    return Expert(store)


def _step(model: Expert, x: Tensor) -> tuple[Tensor, ...]:
    """Gradients by `autograd.grad`, which goes no other way than to what it is asked for."""
    total = model(x.sin()).sum() + model.stored()
    found = torch.autograd.grad(total, [x, *model.parameters()])
    model.losses.clear()
    return total, *found


@pytest.mark.filterwarnings("ignore:.*from now on:remat.RematWarning")
@pytest.mark.parametrize("engine", ["rerun", "auto"])
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_a_stored_tensor_keeps_its_gradient(store: Any, engine: str) -> None:
    """In each of several steps, of which each frees its graph."""
    plain, model = _expert(store), _expert(store)
    modules.apply(model, Expert, engine=engine)
    for seed in range(3):
        x = seeded(2, 3, seed=seed).requires_grad_()
        assert_bitwise(_step(model, x), _step(plain, x))


def test_under_a_transform() -> None:
    """It has the levels of the results."""
    plain, model = (_expert(STORES["attribute"]) for _ in range(2))
    modules.apply(model, Expert, engine="rerun")

    def loss(model: Expert) -> Any:
        return torch.func.grad(lambda x: model(x).sum() + model.aux)

    x = seeded(2, 3)
    assert_bitwise(loss(model)(x), loss(plain)(x))


def test_a_stored_tensor_that_the_next_call_differentiates() -> None:
    """It is refused, and the error says to pass it."""

    class Recurrent(nn.Module):
        state: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.state = x.sin() if self.state is None else self.state * x.sin()
            return self.state.cos()

    model = remat(Recurrent(), engine="rerun")
    x = seeded(3).requires_grad_()
    model(x)

    with pytest.raises(CapturedTensorError, match="Pass it as an argument"):
        model(x)


def test_a_hook_that_calls_backward_on_a_part_of_the_region() -> None:
    """That gradient would end in the region: it raises."""

    def fun(x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = x.sin(), x.cos()
        y.register_hook(lambda _: z.backward(torch.ones_like(z), retain_graph=True))
        return y, z

    x = seeded(3).requires_grad_()
    y, _ = remat(fun, engine="rerun")(x)

    with pytest.raises(CapturedTensorError, match="`backward` in a hook"):
        y.sum().backward()


def test_a_hook_that_calls_backward_on_something_else() -> None:
    """It runs once for each backward, as without a region."""
    weight, calls = seeded(3).requires_grad_(), [0]

    def hook(_: Tensor) -> None:
        calls[0] += 1
        with torch.enable_grad():
            weight.exp().sum().backward()

    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(hook)
        return y.cos()

    remat(fun, engine="rerun")(seeded(3).requires_grad_()).sum().backward()

    assert calls == [1]
    assert_bitwise(weight.grad, weight.exp())
