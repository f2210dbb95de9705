"""What a function stores in objects that it reaches is a result too: it keeps its gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from remat import CapturedTensorError, RematWarning, modules, remat
from tests.support import assert_bitwise, assert_close, grads, seeded, swept

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
def test_a_stored_tensor_keeps_its_gradient(store: Any, engine: Any) -> None:
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


class Passing(nn.Module):
    """Stores and returns what it was given, and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(3))
        self.kept: dict[str, Any] = {}

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.kept.update(given=x, own=self.weight)
        return (x * self.weight).sin(), x, self.weight, x[1:]


@pytest.mark.filterwarnings("ignore:.*from now on:remat.RematWarning")
@pytest.mark.parametrize("engine", ["rerun", "auto"])
def test_an_operand_comes_back_itself(engine: Any) -> None:
    """So the caller may ask for gradients there, as models of forces do; in each of two steps."""
    plain = Passing()
    region = remat(model := Passing(), engine=engine)

    def step(call: Any, module: Passing) -> tuple[Tensor, ...]:
        x = seeded(3, seed=1).requires_grad_().exp()
        y, given, own, tail = call(x)
        assert given is module.kept["given"] is tail._base is x
        assert own is module.kept["own"] is module.weight
        kept = module.kept["given"].square() + module.kept["own"].cos()
        total = y.sum() + kept.sum()
        return torch.autograd.grad(total + tail.exp().sum(), [given, own])

    for _ in range(2):
        assert_close(step(region, model), step(plain, plain))


def test_what_was_stored_under_a_transform_that_has_ended() -> None:
    """The next call reaches it, and does not read it."""
    plain, model = (_expert(STORES["attribute"]) for _ in range(2))
    modules.apply(model, Expert, engine="rerun")
    x = seeded(2, 3)

    for _ in range(2):
        torch.func.grad(lambda x: model(x).sum())(x)
    model.table["kept"] = model.aux
    assert_bitwise(grads(model, [x]), grads(plain, [x]))


class Recurrent(nn.Module):
    """A layer that keeps its state from call to call, in an attribute, a buffer or a list."""

    state: Any
    rate: Tensor
    seen: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("rate", torch.tensor(0.9, dtype=torch.float64))
        self.kind, self.calls = kind, 0
        if kind == "buffer":
            self.register_buffer("state", None)
        self.keep(torch.zeros(2, 3, dtype=torch.float64))

    def keep(self, state: Tensor) -> None:
        self.state = [state] if self.kind == "list" else state

    def kept(self) -> Tensor:
        return self.state[0] if self.kind == "list" else self.state

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.add_(1)
        state = F.dropout(
            self.kept() * self.rate + self.layer(x) * self.seen.clone(), 0.2
        )
        self.keep(state)
        return state.sin() if state.sum() > -100 else state


class Twice(nn.Module):
    """Calls a layer two times."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(x.sin()).cos()


@pytest.mark.filterwarnings("ignore:.*from now on:remat.RematWarning")
@pytest.mark.parametrize("where", [Recurrent, (Recurrent, Twice), *swept([Twice])])
@pytest.mark.parametrize("kind", ["attribute", "buffer", *swept(["list"])])
@pytest.mark.parametrize("engine", ["rerun", *swept(["auto"])])
def test_a_stored_tensor_that_later_calls_differentiate(
    engine: Any, kind: str, where: Any
) -> None:
    """Their gradients flow through all calls before, of which each counts and draws once."""

    def trained(model: Any) -> Any:
        torch.manual_seed(1)
        x, own = seeded(2, 3).requires_grad_(), model[0].layer
        for _ in range(2):
            own.keep(own.kept().detach())
            total = sum((model(x * each).sum() for each in range(3)), torch.zeros(()))
            yield total, *torch.autograd.grad(total, [x, *model.parameters()])
            yield own.kept(), own.seen.clone(), torch.rand(3)
        assert own.calls == 12

    plain, model = (nn.Sequential(Twice(Recurrent(kind))) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    modules.apply(model, lambda _, each: isinstance(each, where), engine=engine)

    assert_close([*trained(model)], [*trained(plain)])


def test_a_stored_tensor_whose_graph_is_freed() -> None:
    """Torch's own error comes out where a later call differentiates it, as without a region."""
    model = remat(Recurrent("attribute"), engine="rerun")
    x = seeded(2, 3).requires_grad_()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        model(x).sum().backward()


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


class Reversible(torch.autograd.Function):
    """Its backward runs a layer again, and calls `backward` there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.x, ctx.layer = x.detach(), layer
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, None]:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            torch.autograd.backward(ctx.layer(x), cotangents[0])
        return x.grad, None


def test_a_backward_that_calls_backward() -> None:
    """It raises around the layer, says where the region belongs, and works there."""

    def trained(layer: Any, call: Any) -> list[Any]:
        x = seeded(3).requires_grad_()
        call(x).sum().backward()
        return [x.grad, *(each.grad for each in layer.parameters())]

    plain, inside = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))
    inside.load_state_dict(plain.state_dict())
    around = remat(lambda x: Reversible.apply(x.exp(), plain), engine="rerun")
    layer = remat(inside, engine="rerun")

    with pytest.raises(CapturedTensorError, match="put regions on what it calls"):
        trained(plain, around)
    found = trained(inside, lambda x: Reversible.apply(x.exp(), layer))
    plain.zero_grad()
    expected = trained(plain, lambda x: Reversible.apply(x.exp(), plain))
    assert_bitwise(found, expected)


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


class Through(torch.autograd.Function):
    """Its backward reads a layer that it is not given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        return ctx.layer(cotangents[0]).sin(), None


def hooked(x: Tensor, layer: nn.Module) -> Tensor:
    """A hook reads the layer."""
    y = x.sin()
    y.register_hook(lambda gradient: layer(gradient).sin())
    return y


SECOND = {
    "hook": hooked,
    "function": lambda x, layer: Through.apply(x, layer),
}


@pytest.mark.contract
@pytest.mark.parametrize("reads", [False, True], ids=["backward alone", "both"])
@pytest.mark.parametrize("inner", SECOND.values(), ids=SECOND)
def test_what_a_backward_reads_has_a_gradient_in_a_second_derivative(
    inner: Any, reads: bool
) -> None:
    """Where an output depends on it, too; else it would be lost, and is refused.

    A trace refuses both, and so `engine="auto"` runs again.
    """
    layer = nn.Linear(4, 4, bias=False).double()

    def fun(x: Tensor) -> Tensor:
        y = inner(x * layer.weight.sum() if reads else x, layer)
        return y.square().sum()

    def second(loss: Any) -> Any:
        x = seeded(4).requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, layer.weight])

    region = remat(fun, engine="rerun")
    auto = remat(fun, engine="auto")
    auto.cache_clear()
    with pytest.warns(RematWarning, match="uses a tensor that its forward did not"):
        assert_bitwise(grads(auto, [seeded(4)]), grads(fun, [seeded(4)]))
    if reads:
        assert_close(second(region), second(fun))
        return
    with pytest.raises(
        CapturedTensorError, match="by nothing that the function returns"
    ):
        second(region)


class Spiking(nn.Module):
    """A neuron that leaves its state in a buffer, and starts anew: as those of snntorch do."""

    mem: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.register_buffer("mem", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.mem = torch.zeros_like(x)
        for _ in range(2):
            self.mem = self.mem * 0.9 + self.layer(x)
            self.mem = self.mem - (self.mem > 1).double()
        return self.mem.sin()


@pytest.mark.parametrize("engine", ["rerun", "auto"])
@pytest.mark.filterwarnings("ignore::remat.RematWarning")
def test_a_buffer_that_has_a_gradient_since_the_last_call(engine: Any) -> None:
    """The next call replaces it, and so writes nothing to it."""
    torch.manual_seed(0)
    plain, x = Spiking(), seeded(4, 3).requires_grad_()
    model = Spiking()
    model.load_state_dict(plain.state_dict())
    modules.apply(model, lambda name, _: not name, engine=engine)

    for _ in range(3):
        found, expected = (
            (y, each.mem, *torch.autograd.grad(y.sum(), [x, *each.parameters()]))
            for each in (model, plain)
            for y in [each(x)]
        )
        assert_bitwise(found, expected)
