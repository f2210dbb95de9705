"""Law 8, state once.

"Buffers (BatchNorm's running statistics) change once per forward, not again in the
recomputation."
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from remat import MutationError, policies, remat
from tests.support import (
    assert_bitwise,
    assert_close,
    in_turn,
    seeded,
    swept,
    tensors_in,
)

Model = nn.Module
Wrap = Callable[..., Any]


class Ema(nn.Module):
    """A user's buffers: one changed in place and used, one counted, one rebound."""

    mean: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.steps.add_(1)
        return torch.sin(x - self.mean) * self.steps


def batch_norm() -> Model:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))


def spectral_norm() -> Model:
    linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    return nn.Sequential(linear, nn.Tanh())


def cumulative() -> Model:
    return nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Tanh())


MODELS: dict[str, Callable[[], Model]] = {
    "batch_norm": batch_norm,
    "spectral_norm": spectral_norm,
    "ema": lambda: nn.Sequential(nn.Linear(4, 4), Ema()),
}


def build(make: Callable[[], Model]) -> Model:
    """A model in float64, from a fixed seed, in training mode."""
    torch.manual_seed(0)
    return make().double().train()


def buffers(model: Model) -> list[Tensor]:
    """Copies of a model's buffers."""
    return [buffer.clone() for buffer in model.buffers()]


WAYS: dict[str, Callable[[Model, dict[str, Any]], Wrap]] = {
    "module": lambda model, options: remat(model, **options),
    "captured": lambda model, options: remat(lambda x: model(x) * 1, **options),
    "argument": lambda model, options: (
        lambda x: remat(lambda m, x: m(x), **options)(model, x)
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "everything": {"policy": policies.everything_saveable},
    "addmm": {"policy": policies.by_op("addmm")},
    "rerun": {"engine": "rerun"},
}


def train(fun: Wrap, model: Model, steps: int = 3) -> tuple[list[Tensor], list[Any]]:
    """Gradients and buffers after each of some steps that change the weights."""
    history = []
    for step in range(steps):
        x = seeded(5, 4, seed=step)
        gradients = torch.autograd.grad(fun(x).sin().sum(), list(model.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight -= 0.1 * gradient
        history.append((list(gradients), buffers(model)))
    return [g for gradients, _ in history for g in gradients], [b for _, b in history]


@pytest.mark.contract
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_buffers_change_once_a_step(make: Any, options: dict[str, Any]) -> None:
    """Over three steps, gradients and every buffer are bitwise plain's."""
    plain, model = build(make), build(make)

    expected = train(plain, plain)

    assert_bitwise(train(remat(model, **options), model), expected)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_however_the_module_is_reached(way: Any, engine: Any) -> None:
    """The region is the module, or captures it, or gets it as an argument."""
    plain, model = build(batch_norm), build(batch_norm)

    expected = train(plain, plain)

    assert_bitwise(train(way(model, {"engine": engine}), model), expected)


class Observed(nn.Module):
    """Rounds its weight by ranges of its rows, which are buffers without a size at first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(3, 4).float())
        for name, value in {
            "is_on": torch.ones(1, dtype=torch.int64),
            "least": torch.zeros(0),
            "most": torch.zeros(0),
            "scale": torch.ones(1),
            "zero": torch.zeros(1, dtype=torch.int32),
        }.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        on, *ranges = (each for _, each in self.named_buffers())
        round_rows: Any = torch.fused_moving_avg_obs_fake_quant
        weight = round_rows(
            self.weight, on, on, *ranges, 0.01, 0, 127, 0, per_row_fake_quant=True
        )
        return F.linear(x.float(), weight, self.weight[:, 0]).tanh()


@pytest.mark.contract
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_buffers_that_an_operator_resizes(options: dict[str, Any]) -> None:
    """As in the first call of an observer of torch.ao, which no trace foresees."""
    plain, model = Observed(), Observed()

    expected = train(plain, plain)

    assert_bitwise(train(remat(model, **options), model), expected)
    assert model.get_buffer("least").shape == (3,)


def test_statistics_that_read_a_counter_need_rerun() -> None:
    """`momentum=None` turns the counter to a float: `engine="rerun"` is right."""
    plain, model = build(cumulative), build(cumulative)

    expected = train(plain, plain)

    assert_bitwise(train(remat(model, engine="rerun"), model), expected)


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_functional_batch_norm(engine: Any) -> None:
    """Buffers passed as arguments are written back once."""

    def fun(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, training=True).sin()

    def run(wrapped: Wrap) -> list[Tensor]:
        x = seeded(5, 4).requires_grad_()
        mean, var = seeded(4, seed=1), seeded(4, seed=2).square()
        (grad,) = torch.autograd.grad(wrapped(x, mean, var).sum(), x)
        return [grad, mean, var]

    assert_bitwise(run(remat(fun, engine=engine)), run(fun))


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_functional_call_with_a_dict_of_buffers(engine: Any) -> None:
    """`functional_call` with buffers: the given ones change once, the model's never."""
    model = build(batch_norm)
    own = buffers(model)

    def run(wrap: Wrap) -> list[Tensor]:
        params = {k: v.detach().requires_grad_() for k, v in model.named_parameters()}
        given = {k: v.clone() for k, v in model.named_buffers()}
        call = wrap(lambda p, b, x: torch.func.functional_call(model, (p, b), (x,)))
        loss = call(params, given, seeded(5, 4)).sin().sum()
        return [*torch.autograd.grad(loss, list(params.values())), *given.values()]

    assert_bitwise(run(lambda fun: remat(fun, engine=engine)), run(lambda fun: fun))
    assert_bitwise(buffers(model), own)


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_buffers_under_func_grad(engine: Any) -> None:
    """Buffers that are arguments of a `torch.func.grad` change once there too."""
    model = build(batch_norm)
    params = {k: v.detach() for k, v in model.named_parameters()}

    def run(wrap: Wrap) -> list[Any]:
        given = {k: v.clone() for k, v in model.named_buffers()}

        def loss(p: Any, b: Any, x: Tensor) -> Tensor:
            call = wrap(lambda p, b, x: torch.func.functional_call(model, (p, b), (x,)))
            return call(p, b, x).sin().sum()

        gradients = torch.func.grad(loss)(params, given, seeded(5, 4))
        return [*gradients.values(), *given.values()]

    assert_close(run(lambda fun: remat(fun, engine=engine)), run(lambda fun: fun))


def _recorded(loss: Wrap) -> Wrap:
    return lambda x: make_fx(torch.func.functionalize(torch.func.grad(loss)))(x)(x)


FUNCTIONALIZED: dict[str, Wrap] = {
    "alone": lambda loss: torch.func.functionalize(loss),
    "around": lambda loss: torch.func.functionalize(torch.func.grad(loss)),
    "inside": lambda loss: torch.func.grad(torch.func.functionalize(loss)),
    "recorded": _recorded,
}


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun", "auto"])
@pytest.mark.parametrize("way", FUNCTIONALIZED)
def test_buffers_under_functionalize(way: str, engine: Any) -> None:
    """They change once, also where plain torch.func refuses to write to captured ones."""
    plain, model = build(batch_norm), build(batch_norm)
    region = remat(model, engine=engine)

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(plain(x).sin().sum(), x)[0]

    def loss(x: Tensor) -> Tensor:
        return region(x).sin().sum()

    x = seeded(5, 4)
    if way == "recorded":
        gradient(x)  # the recording writes to them, too
    expected = plain(x).sin().sum() if way == "alone" else gradient(x)

    assert_close(FUNCTIONALIZED[way](loss)(x), expected)
    assert_close(buffers(model), buffers(plain))


@pytest.mark.contract
@pytest.mark.parametrize(("name", "engine"), in_turn(MODELS, ["trace", "rerun"]))
def test_backwards_leave_buffers_alone(name: str, engine: Any) -> None:
    """Two backwards, and a second derivative, change no buffer; the forward did once."""
    plain, model = build(MODELS[name]), build(MODELS[name])
    x, y = seeded(5, 4).requires_grad_(), seeded(5, 4).requires_grad_()

    def second(fun: Wrap, x: Tensor) -> list[Tensor]:
        loss = fun(x).sin().sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (double,) = torch.autograd.grad(grad.square().sum(), x)
        return [first, grad.detach(), double]

    expected = second(plain, x)
    found = second(remat(model, engine=engine), y)

    assert_bitwise(found[0], expected[0])
    assert_close(found, expected)
    assert_bitwise(buffers(model), buffers(plain))


def test_without_grad_they_change_once_too() -> None:
    """Under `no_grad` the function runs as it is."""
    plain, model = build(batch_norm), build(batch_norm)
    with torch.no_grad():
        plain(seeded(5, 4))
        remat(model)(seeded(5, 4))

    assert_bitwise(buffers(model), buffers(plain))


def test_eval_mode_changes_nothing() -> None:
    """A model in evaluation reads its buffers only."""
    model = build(batch_norm).eval()
    before = copy.deepcopy(model.state_dict())
    remat(model)(seeded(5, 4)).sum().backward()

    assert_bitwise(dict(model.state_dict()), dict(before))


def test_a_nested_region_changes_them_once() -> None:
    """The inner region's forward runs again in the outer's backward, its state does not."""
    plain, model = build(batch_norm), build(batch_norm)
    inner = remat(model)

    expected = train(lambda x: plain(x).sin(), plain)

    assert_bitwise(train(remat(lambda x: inner(x).sin()), model), expected)


class Counting(nn.Module):
    """Writes to its buffer by an operator that says so."""

    count: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        self.count.add_(1.0)
        return x.sin() * 2


class CountedBackward(torch.autograd.Function):
    """Counts its backwards in a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: Tensor) -> Tensor:
        ctx.number = number
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.number.add_(1)
        return grads[0] * 2, None


class LargestGradient(CountedBackward):
    """Leaves the largest gradient in a buffer, as recipes for small floats do."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.number.copy_(grads[0].abs().amax())
        return grads[0] * 2, None


def counted_by_a_hook(x: Tensor, number: Tensor) -> Tensor:
    y = x * 2

    def count(_: Tensor) -> None:
        number.add_(1)

    y.register_hook(count)
    return y


WRITES_IN_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "count": CountedBackward.apply,
    "amax": LargestGradient.apply,
    "hook": counted_by_a_hook,
}


@pytest.mark.contract
@pytest.mark.parametrize("is_captured", [False, True], ids=["argument", "captured"])
@pytest.mark.parametrize("name", WRITES_IN_BACKWARD)
@pytest.mark.parametrize("engine", [None, "trace", "rerun", "auto"])
@pytest.mark.filterwarnings("ignore::remat.RematWarning")
def test_what_a_backward_writes(engine: Any, name: str, is_captured: bool) -> None:
    """It is there after the backward, once; a trace refuses it, and has written nothing."""
    number = torch.zeros((), dtype=torch.float64)

    def fun(x: Tensor, n: Tensor = number) -> Tensor:
        return WRITES_IN_BACKWARD[name](x.sin(), n).cos().sum()

    region: Any = fun if engine is None else remat(fun, engine=engine)
    x = seeded(3).requires_grad_()
    given = () if is_captured else (number,)
    if engine == "trace":
        with pytest.raises(MutationError, match=r"test_law_08.*in the backward.*rerun"):
            region(x, *given)
        assert number == 0
        return

    for step in range(3):
        before = number.clone()
        loss = region(x, *given)
        assert torch.equal(number, before)
        (grad,) = torch.autograd.grad(loss, x)
        assert number == (grad_that_came(x) if name == "amax" else step + 1)
        assert_bitwise(grad, torch.autograd.grad(fun(x, before.clone()), x)[0])


def grad_that_came(x: Tensor) -> Tensor:
    """The largest gradient of the cosine in the functions above."""
    return (x.sin() * 2).sin().abs().amax()


@pytest.mark.contract
def test_who_saved_a_buffer_before_it_was_written_is_told():
    """As by plain code: the gradient would be made of the new numbers."""
    for wrap in (lambda model: model, remat):
        model = Counting()
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        y = (w * model.count).sum()
        wrap(model)(w)

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


QUEUE_VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "what was written": lambda q: q[0].add_(1),
    "another part": lambda q: (q.add_(1), q[1])[1],
    "transposed": lambda q: q.mul_(2).add_(1).T,
    "flat": lambda q: q.view(-1).add_(1),
    "several": lambda q: (q[:1].add_(1), q[1:], q),
}


@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("of", ["buffer", "argument"])
@pytest.mark.parametrize("views", QUEUE_VIEWS)
def test_a_view_of_what_was_written_has_the_new_numbers(
    views: str, of: str, engine: Any
) -> None:
    """As the part of a cache or a queue does that a module returns."""
    queue, w = torch.zeros(2, 3, dtype=torch.float64), seeded(3, 3).requires_grad_()

    def fun(x: Tensor, given: Tensor) -> Any:
        written = queue if of == "buffer" else given
        return QUEUE_VIEWS[views](written), (x @ w + written).sin()

    def twice(run: Any) -> list[Tensor]:
        given, x = queue.zero_().clone(), seeded(2, 3, seed=1)
        returned = [tensors_in(run(x, given)) for _ in range(2)]
        (queue if of == "buffer" else given).add_(5)  # a view sees it
        return [*returned[0], *returned[1]]

    assert_bitwise(twice(remat(fun, engine=engine)), twice(fun))


def _hessian_vector(loss: Any, p: Any) -> Any:
    return torch.func.jvp(torch.func.grad(loss), (p,), (p,))[1]


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize(
    "derive",
    [
        lambda loss, p: torch.func.grad(loss)(p),
        _hessian_vector,
        *swept(
            [
                lambda loss, p: torch.func.hessian(loss)(p),
                lambda loss, p: torch.func.jacrev(torch.func.jacrev(loss))(p),
            ]
        ),
    ],
    ids=["grad", "jvp(grad)", "hessian", "jacrev(jacrev)"],
)
def test_buffers_made_inside_of_a_transform_are_written_to(
    derive: Callable[[Any, Any], Any],
) -> None:
    """As torch.func asks for a model with batch normalization: each loss has its own."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    x = seeded(5, 3)
    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def loss_of(fun: Any) -> Any:
        def loss(p: Any) -> Tensor:
            buffers = {name: each.clone() for name, each in model.named_buffers()}
            y = torch.func.functional_call(fun, {**p, **buffers}, (x,))
            return y.sin().sum() + buffers["1.running_mean"].sum()

        return loss

    found, expected = (
        derive(loss_of(fun), parameters) for fun in (remat(model), model)
    )
    assert_close(found, expected)
