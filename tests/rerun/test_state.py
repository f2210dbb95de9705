"""`engine="rerun"`: a run of the backward finds state as the forward did, and leaves it as it was."""

import copy
import itertools
import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_module, nop
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module

from remat import (
    MutationError,
    RecomputationError,
    SavedTensorModifiedError,
    TraceError,
    modules,
    remat,
)
from tests.rerun.functions import branches
from tests.support import assert_bitwise, assert_close, grads, seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    # Dynamo reads `.grad` of what it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a"),
]


class Scaled(nn.Module):
    """A weight and a switch, read anew at each run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(4))
        self.total = torch.zeros(4, dtype=torch.float64)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.total = self.total + 1
        y = branches(x * self.weight) * self.total * self.runs
        return y * 3 if self.training else y


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_region_inside_functional_call_keeps_its_gradients(engine: Any) -> None:
    """In its backward the module has its own parameters again."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    plain = nn.Sequential(inner)
    wrapped: Any = remat(inner, engine=engine)
    region = nn.Sequential(wrapped)
    values = {name: each.detach().clone() for name, each in plain.named_parameters()}
    stacked = {name: torch.stack([each, each * 2]) for name, each in values.items()}
    x = seeded(2, 4)

    def gradients(model: nn.Module) -> Any:
        keys = [name for name, _ in model.named_parameters()]

        def loss(values: Any) -> Tensor:
            given = dict(zip(keys, values, strict=True))
            return torch.func.functional_call(model, given, (x,)).sin().sum()

        leaves = [each.clone().requires_grad_() for each in values.values()]
        return (
            torch.autograd.grad(loss(leaves), leaves),
            torch.func.grad(loss)([*values.values()]),
            torch.func.vmap(torch.func.grad(loss))([*stacked.values()]),
        )

    assert_close(gradients(region), gradients(plain))


@pytest.mark.contract
def test_a_run_of_the_backward_finds_the_module_of_the_forward() -> None:
    """Parameters, plain tensors and switches changed meanwhile; none changes by it."""

    def step(fun: Callable[[Tensor], Tensor], model: Scaled) -> Any:
        x = seeded(4, seed=1).requires_grad_()
        weight = model.weight
        y = fun(x)
        model.weight = nn.Parameter(weight.detach() * 2)
        model.total = model.total * 5
        model.eval()
        found = torch.autograd.grad(y.sum(), [x, weight])
        return y, found, model.weight, model.total, model.runs, model.training

    plain, model = Scaled(), Scaled()

    expected = step(plain, plain)
    found = step(remat(model, engine="rerun"), model)

    assert_bitwise(found[:4], expected[:4])
    assert found[4:] == expected[4:] == (1, False)


@pytest.mark.contract
def test_a_run_that_fails_in_the_backward_leaves_state_as_it_was() -> None:
    """The generator and buffers, which both stood elsewhere in the forward (law 11)."""
    runs = itertools.count()
    norm = nn.BatchNorm1d(4).double()

    def fun(x: Tensor) -> Tensor:
        if next(runs):
            raise ArithmeticError
        return nn.functional.dropout(norm(x.sin()), 0.5).cos()

    y = remat(fun, engine="rerun", rng="preserve")(seeded(3, 4).requires_grad_())
    torch.rand(3)
    before = [each.clone() for each in (torch.get_rng_state(), *norm.buffers())]

    with pytest.raises(RecomputationError, match="ArithmeticError") as told:
        y.sum().backward()

    assert isinstance(told.value.__cause__, ArithmeticError)

    assert_bitwise([torch.get_rng_state(), *norm.buffers()], before)


def _through_a_loop(call: Callable[[Any], Any], layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = call(lambda x: layer(x) + 1)(x)  # noqa: B023  the point
    return x


def _through_an_index(call: Callable[[Any], Any], layers: Any, x: Tensor) -> Tensor:
    for index in range(len(layers)):
        x = call(lambda x: layers[index](x) * (index + 1))(x)  # noqa: B023
    return x


def _through_a_list(call: Callable[[Any], Any], layers: Any, x: Tensor) -> Tensor:
    held: list[Any] = []
    function = call(lambda x: held[-1](x))
    for layer in layers:
        held.append(layer)
        x = function(x)
    return x


def _through_an_attribute(call: Callable[[Any], Any], layers: Any, x: Tensor) -> Tensor:
    holder = types.SimpleNamespace()
    function = call(lambda x: holder.layer(x))
    for layer in layers:
        holder.layer = layer
        x = function(x)
    return x


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize(
    "stack",
    [_through_a_loop, _through_an_index, _through_a_list, _through_an_attribute],
    ids=["closure", "index", "list", "attribute"],
)
def test_what_a_loop_changes_is_for_the_backward_as_it_was(
    stack: Callable[..., Tensor], engine: Any
) -> None:
    """Each layer's gradient is its own, not the last one's (law 7)."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(3))
    leaves = [seeded(2, 3).requires_grad_(), *layers.parameters()]

    def gradients(call: Callable[[Any], Any]) -> tuple[Tensor, ...]:
        out = stack(call, layers, leaves[0])
        return torch.autograd.grad(out.tanh().sum(), leaves)

    assert_bitwise(
        gradients(lambda function: remat(function, engine=engine)),
        gradients(lambda function: function),
    )


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_statistics_that_another_region_has_read(engine: Any) -> None:
    """A run of the backward puts them back and forth, which is no change."""
    x = seeded(3, 4).requires_grad_()

    def gradients(wrap: Callable[[Any], Any]) -> tuple[Tensor, ...]:
        norm = nn.BatchNorm1d(4).double()
        region = wrap(lambda x: norm(x).tanh())
        updated = region(x)
        norm.eval()
        read = region(x)
        return tuple(torch.autograd.grad(y.sum(), x)[0] for y in (updated, read))

    assert_bitwise(
        gradients(lambda function: remat(function, engine=engine)),
        gradients(lambda function: function),
    )


@pytest.mark.contract
def test_what_a_function_changes_itself_is_changed_once() -> None:
    """The backward starts from what the forward found, and leaves what it found itself."""
    runs: list[int] = []
    scales = [2.0]

    def fun(x: Tensor) -> Tensor:
        runs.append(len(runs))
        return x.sin() * scales[0]

    x = seeded(3).requires_grad_()
    y = remat(fun, engine="rerun")(x)
    scales[:] = [5.0, 6.0]
    y.sum().backward()

    assert runs == [0]
    assert scales == [5.0, 6.0]
    assert x.grad is not None
    assert_bitwise([x.grad], [2.0 * x.detach().cos()])


@pytest.mark.contract
@pytest.mark.parametrize("remove", [delattr, lambda owner, key: vars(owner).pop(key)])
def test_what_a_function_removes_is_there_for_the_backward(remove: Any) -> None:
    """And is gone after it, as after the forward."""
    once = types.SimpleNamespace(scale=2.0)

    def fun(x: Tensor) -> Tensor:
        y = x.sin() * getattr(once, "scale", 5.0)
        remove(once, "scale")
        return y

    x = seeded(3).requires_grad_()
    remat(fun, engine="rerun")(x).sum().backward()

    assert not vars(once)
    assert x.grad is not None
    assert_bitwise([x.grad], [2.0 * x.detach().cos()])


class Moving(nn.Module):
    """Reads one buffer, moves another, and leaves a third alone."""

    scale: Tensor
    mean: Tensor
    other: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0).double())
        self.register_buffer("mean", torch.tensor(0.0).double())
        self.register_buffer("other", torch.tensor(1.0).double())
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean())
        return torch.sin(self.norm(x) * self.scale)


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_tensor_without_a_gradient_that_was_changed_since_raises(engine: Any) -> None:
    """Its old numbers are nowhere (law 4); of a buffer as of a closure's tensor."""
    module, x = Moving(), seeded(3, 4).requires_grad_()
    factor = torch.tensor(2.0).double()
    for function, held in (
        (module, module.scale),
        (lambda x: (x * factor).sin(), factor),
    ):
        y = remat(function, engine=engine)(x)
        held.mul_(3)
        with pytest.raises(SavedTensorModifiedError, match=r"scale|factor|region"):
            y.sum().backward()


@pytest.mark.contract
def test_what_the_function_moves_or_does_not_read_may_change() -> None:
    """Micro-batches: each backward comes after the other's forward."""
    module, plain = Moving(), Moving()
    x, twin = (seeded(3, 4).requires_grad_() for _ in range(2))

    def step(call: Any, own: Moving, leaf: Tensor) -> Tensor:
        losses = [call(leaf * scale).sum() for scale in (1, 2, 3)]
        own.other.mul_(2)
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
        assert leaf.grad is not None
        return leaf.grad

    found = step(remat(module, engine="rerun"), module, x)
    assert_close(found, step(plain, plain, twin))
    assert_bitwise([*module.buffers()], [*plain.buffers()])


def test_what_cannot_be_put_back_raises() -> None:
    """An object that has become another's: its gradient would be another's as well."""

    class Scale:
        factor = 2.0

    class Other(Scale):
        pass

    held = Scale()
    x = seeded(4).requires_grad_()
    y = remat(lambda x: branches(x * held.factor), engine="rerun")(x)
    held.__class__ = Other

    with pytest.raises(RecomputationError, match=r"Other.*cannot be restored"):
        y.sum().backward()


def batch_normed(x: Tensor, held: Tensor) -> None:
    rows = x.detach().expand(2, 3) * torch.tensor([[1.0], [3.0]])
    torch.nn.functional.batch_norm(rows, held, torch.ones_like(held), training=True)


def set_data(held: Tensor) -> None:
    held.data = held * 2


#: How a function changes a tensor that it reaches, and which no module has as a buffer.
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "in place": lambda x, held: held.mul_(2),
    "a view": lambda x, held: held[1:].add_(x.detach()[1:]),
    "item": lambda x, held: held.__setitem__(0, 5.0),
    "out": lambda x, held: torch.add(held, 1, out=held),
    "data": lambda x, held: held.data.mul_(2),
    "statistics": batch_normed,
}


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_captured_tensor_is_changed_once(write: Any, engine: Any) -> None:
    """As state is, whether or not a module registers it (law 8)."""

    def step(call: Callable[[Any], Any]) -> list[Tensor | None]:
        held, x = torch.ones(3).double(), seeded(3).requires_grad_()

        def fun(x: Tensor) -> Tensor:
            write(x, held)
            return x * held.clone()

        y = call(fun)(x)
        y.sum().backward()
        return [y.detach(), x.grad, held]

    found = step(lambda fun: remat(fun, engine=engine))
    assert_bitwise(found, step(lambda fun: fun))


@pytest.mark.contract
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.detach().mul_(2),
        lambda x: x.data.mul_(2),
        lambda x: torch.no_grad()(torch.add)(x, 1, out=x),
        set_data,
        lambda x: operator.imul(x.detach(), 2),
        lambda x: torch.nn.functional.relu(x.detach(), inplace=True),
    ],
    ids=["detach", "data", "out", "set data", "assigned", "inplace"],
)
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_what_is_differentiated_is_not_changed(write: Any, engine: Any) -> None:
    """A run again would start from the changed numbers, and change them once more (law 4)."""

    def fun(x: Tensor) -> Tensor:
        write(x)
        return x.sin()

    with pytest.raises((MutationError, TraceError), match=r"test_state\.py:\d+"):
        remat(fun, engine=engine)(seeded(3).requires_grad_())


@pytest.mark.contract
@pytest.mark.parametrize(
    "read",
    [int, Tensor.requires_grad_, Tensor.share_memory_, Tensor.detach, operator.index],
    ids=["int", "requires_grad_", "share_memory_", "detach", "index"],
)
def test_a_call_that_is_only_named_like_a_write_is_none(read: Any) -> None:
    """Its numbers are what they were, and so is the gradient."""
    held = torch.tensor(3)

    def fun(x: Tensor) -> Tensor:
        read(held if read is operator.index else x)
        return (x * 2).sin()

    x, other = (torch.tensor(3.0, requires_grad=True) for _ in range(2))
    remat(fun, engine="rerun")(x).backward()
    fun(other).backward()
    assert_bitwise(x.grad, other.grad)


@pytest.mark.contract
def test_a_change_that_no_call_shows_raises() -> None:
    """What wrote to a tensor has not said so before: its numbers are nowhere."""
    held, row = torch.ones(1, 3).double(), torch.tensor([0])

    def fun(x: Tensor) -> Tensor:
        return x * torch.nn.functional.embedding(row, held, max_norm=1.0)

    with pytest.raises(MutationError, match=r"`held`.*Register it as a buffer"):
        remat(fun, engine="rerun")(seeded(3).requires_grad_())


def test_each_run_makes_tensors_on_the_default_device_of_the_first() -> None:
    """Each thread has a default of its own, and a backward may have its own thread."""

    def fun(x: Tensor) -> Tensor:
        assert torch.empty(1).device.type == "meta"
        return branches(x)

    x = torch.ones(3, requires_grad=True)
    with torch.device("meta"):
        y = remat(fun, engine="rerun")(x)
    with torch.device("cpu"):
        y.sum().backward()

    assert x.grad is not None


def test_what_has_no_numbers_is_not_compared() -> None:
    """A buffer or an argument on the meta device may stand by, for its shape."""
    module = nn.BatchNorm1d(4, affine=False, device="meta")
    like, x = torch.ones(4, device="meta"), seeded(4).requires_grad_()

    def function(x: Tensor, like: Tensor) -> Tensor:
        return x.sin() * (like.numel() + module.num_features)

    (found,) = torch.autograd.grad(remat(function, engine="rerun")(x, like).sum(), x)
    (plain,) = torch.autograd.grad(function(x, like).sum(), x)
    assert_bitwise(found, plain)


def test_a_region_under_a_fake_mode() -> None:
    """Of fakes no numbers can be compared: neither generators nor statistics have moved."""
    with FakeTensorMode():
        module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
        region: Any = remat(module, engine="rerun")
        x = torch.ones(2, 3, requires_grad=True)
        region(x).sum().backward()

    assert x.grad is not None
    assert isinstance(x.grad, FakeTensor)


def test_a_region_in_a_graph_of_functorch() -> None:
    """What AOTAutograd makes a graph of has no numbers either."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    plain, region = copy.deepcopy(inner), nn.Sequential(inner)
    modules.apply(region, "0", engine="rerun")

    x = seeded(4, 3)
    made = aot_module(region, nop)
    assert_bitwise(grads(made, [x]), grads(plain, [x]))


class Rounded(nn.Parameter):
    """A weight in whole numbers, with its scale beside it until the first call takes it."""


# As a library names it, whose code is not followed.
SCALE = "_".join(("scale", "of", "rows"))


class Dequantized(nn.Module):
    """Moves the scale of its weight to a place of its own, as bitsandbytes does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Rounded(torch.arange(-8, 8).view(4, 4), requires_grad=False)
        self.found: Any = None
        setattr(self.weight, SCALE, seeded(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.found is None:
            self.found = vars(self.weight).pop(SCALE, 1.0)
        return branches(x @ (self.weight * self.found))


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["auto", "rerun"])
@pytest.mark.filterwarnings("ignore:.*runs the function again in its backward")
def test_what_a_class_of_tensors_holds_is_moved_once(engine: Any) -> None:
    """Attributes of a tensor whose class is the user's, or a library's, are parts of it."""
    plain, region = Dequantized(), remat(Dequantized(), engine=engine)

    for _ in range(2):
        x, other = (seeded(4).requires_grad_() for _ in range(2))
        y = plain(x)
        y.sum().backward()
        z = region(other)
        z.sum().backward()
        assert_bitwise([z, other.grad], [y, x.grad])


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:.*a hook for all modules")
@pytest.mark.filterwarnings("ignore:.*verify")
@pytest.mark.parametrize(
    ("options", "order"), [({"engine": "rerun"}, 1), ({"verify": True}, 2)]
)
def test_hooks_for_all_modules_may_not_change_before_a_backward(
    options: dict[str, Any], order: int
) -> None:
    """A trace has its first backward already, and with `verify` is traced again for a second.

    What runs again would call other hooks.
    """
    linear, x = nn.Linear(4, 4, dtype=torch.float64), seeded(2, 4).requires_grad_()
    hook: Any = lambda _, __, y: y * 2  # noqa: E731
    handle = module.register_module_forward_hook(hook)
    found = remat(lambda x: linear(x).sin(), **options)(x)
    handle.remove()

    def derive() -> None:
        result = found
        for _ in range(order):
            (result,) = torch.autograd.grad(result.sum(), x, create_graph=True)

    with pytest.raises(
        RecomputationError, match=r"hooks for all modules.* after the f"
    ):
        derive()


def test_hooks_for_all_modules_may_change_where_there_is_no_module() -> None:
    """Nothing that runs again calls them."""
    x = seeded(4).requires_grad_()
    handle = module.register_module_forward_hook(lambda *_: None)
    found = remat(torch.sin, engine="rerun")(x)
    handle.remove()

    assert_bitwise(torch.autograd.grad(found.sum(), x)[0], x.cos())


class _Noisy(torch.autograd.Function):
    """A sine whose slope is scaled by draws, as surrogate gradients are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos() * torch.rand_like(x)


def _with_draws_between(fun: Any, order: int) -> list[Tensor]:
    """What a function of these gives, and what is drawn after it."""
    x = seeded(5).requires_grad_()
    torch.manual_seed(0)
    found = [fun(x)]
    for _ in range(order):
        torch.rand(3)
        found += torch.autograd.grad(found[-1].sum(), x, create_graph=True)
    return [*found, torch.rand(2)]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("engine", "order"), [("trace", 1), ("rerun", 1), ("rerun", 2)]
)
def test_a_backward_that_draws_draws_when_it_runs(engine: Any, order: int) -> None:
    """From where the generator is then, as in plain torch; when it runs again, the same."""

    def fun(x: Tensor) -> Tensor:
        return _Noisy.apply(F.dropout(x, 0.3)).exp()

    region = remat(fun, engine=engine, rng="preserve")

    assert_bitwise(_with_draws_between(region, order), _with_draws_between(fun, order))


def test_a_trace_refuses_a_second_derivative_of_a_backward_that_draws() -> None:
    """A program of it would draw other numbers."""
    region = remat(lambda x: _Noisy.apply(x).exp(), rng="preserve")

    with pytest.raises(TraceError, match=r"a backward of the user's.*engine=\"rerun\""):
        _with_draws_between(region, 2)
