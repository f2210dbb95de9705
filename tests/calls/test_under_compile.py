"""Functions under `torch.compile` that hold regions: one graph holds what it can."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

from remat import (
    CarryError,
    chain,
    checkpoint_name,
    modules,
    policies,
    random,
    remat,
    scan,
    schedules,
)
from tests.benchmarks.memory import allocated
from tests.calls.graphs import (
    OUTSIDE,
    compiled,
    gradients,
    layer,
    loss,
    named,
    settings,
    weight,
)
from tests.support import (
    assert_bitwise,
    assert_close,
    daily,
    default_generator,
    seeded,
    swept,
    tensors_in,
)

pytestmark = [
    pytest.mark.apart,
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Dynamo's own, of what is between two graphs.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


class Model(nn.Module):
    """Regions as a module and as a method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = remat(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
        )
        self.last = nn.Linear(4, 4).double()

    @remat
    def head(self, x: Tensor) -> Tensor:
        return self.last(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x) + 1)


@remat(policy=policies.save_only_these_names("hidden"))
def dense(
    params: dict[str, Any], x: Tensor, *, times: int, names: tuple[str, ...]
) -> Any:
    """A region of a pytree, keywords and static arguments, with a name."""
    hidden = checkpoint_name(torch.tanh(x @ params["w"]), "hidden")
    return {"out": hidden.sin().sin() * times, "rest": (hidden, names)}


def of_pytrees(x: Tensor) -> Tensor:
    """Each output of one region is an input of the next."""
    params = {"w": weight}
    first = dense(params, x, times=2, names=("a",))
    return dense(params, first["out"], times=3, names=())["out"].sum()


@remat
def inner(x: Tensor) -> Tensor:
    """What a region calls."""
    return x.sin().exp().sin()


@remat(policy=policies.save_only_these_names("middle"))
def outer(x: Tensor) -> Tensor:
    """A region of regions."""
    return inner(checkpoint_name(inner(x @ weight), "middle"))


@remat
def keyed(x: Tensor, key: Tensor) -> Tensor:
    """A region that draws by a key."""
    return random.dropout(random.fold_in(key, 1), x.sin(), 0.5).sin()


@remat
def in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    """A region that changes what it made, and returns a view of what it took."""
    made = x.sin().mul_(2.0)
    made[0] = 1.0
    return made.sin(), x.view(-1)


@remat(policy=policies.save_only_these_names("hidden"))
def mapping(x: Tensor) -> Tensor:
    """A region that maps what has a name, and differentiates."""

    def each(x: Tensor) -> Tensor:
        return checkpoint_name(torch.tanh(x @ weight), "hidden").sin().exp()

    return torch.func.vmap(each)(x) * torch.func.grad(lambda x: each(x).sum())(x)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "captures": loss,
    "pytrees": of_pytrees,
    "nested": lambda x: outer(outer(x)).sum(),
    "keys": lambda x: keyed(x, random.key(7)).sum(),
    "a map inside": lambda x: mapping(x).sum(),
    "in place": lambda x: sum(each.sum() for each in in_place(x)),  # type: ignore[return-value]
}
each_loss = pytest.mark.parametrize("fun", LOSSES.values(), ids=LOSSES)


@each_loss
def test_one_graph_holds_regions(fun: Any) -> None:
    """Numbers and gradients, of what a region captures too."""
    x = seeded(3, 4).requires_grad_()

    assert_close(gradients(compiled(fun), x), gradients(fun, x))


@pytest.mark.parametrize(
    "name", ["nested", "keys", *swept(["captures", "a map inside"])]
)
def test_one_graph_holds_a_gradient(name: str) -> None:
    """`torch.compile(torch.func.grad(loss))`."""
    fun = LOSSES[name]
    x = seeded(3, 4)
    gradient = torch.func.grad(fun)

    assert_close(compiled(gradient)(x), gradient(x))


TRANSFORMED: dict[str, Callable[[Tensor], Any]] = {
    "jvp of grad": lambda x: torch.func.jvp(torch.func.grad(loss), (x,), (x.cos(),)),
    "vmap of grad": torch.func.vmap(torch.func.grad(loss)),
    "vmap of grad, names": torch.func.vmap(torch.func.grad(of_pytrees)),
    "grad of vmap, names": torch.func.grad(
        lambda x: torch.func.vmap(of_pytrees)(x).sin().sum()
    ),
    "a map inside": lambda x: torch.func.vmap(mapping)(torch.stack([x, x.cos()])),
}


@pytest.mark.parametrize("fun", daily(TRANSFORMED, ["vmap of grad", "a map inside"]))
def test_one_graph_holds_transforms(fun: Any) -> None:
    """Each rule of a region, in a graph."""
    x = seeded(3, 4)

    assert_close(compiled(fun)(x), fun(x))


@pytest.mark.sweep
def test_inductor() -> None:
    """The backend that torch.compile takes by default; draws keep their order there too."""
    x, found = seeded(3, 4), list[Any]()
    torch._dynamo.reset()
    gradient = torch.func.grad(lambda x: of_pytrees(noisy(noisy(x))))

    for run in (gradient, torch.compile(gradient, fullgraph=True)):
        torch.manual_seed(3)
        found.append((run(x), torch.get_rng_state()))

    assert_close(found[1], found[0])


def test_modules_and_methods() -> None:
    """A model whose parts are regions: parameters, and statistics that change once."""
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())

    for each in (compiled(model), twin):
        each(seeded(3, 4)).sum().backward()

    assert_close(_state(model), _state(twin))


def _state(model: nn.Module) -> Any:
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return dict(model.state_dict()), gradients


def test_a_model_with_regions_put_in() -> None:
    """`modules.apply`, and parameters that `functional_call` replaces."""
    one = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(one.double(), 2, enable_nested_tensor=False)
    modules.apply(model, nn.TransformerEncoderLayer)
    x, params = seeded(2, 3, 4), {k: v.detach() for k, v in model.named_parameters()}

    def of_params(params: Any) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).sum()

    compiled(model)(x).sum().backward()
    found = [each.grad for each in model.parameters()]

    assert_close(found, list(torch.func.grad(of_params)(params).values()))


WIDTH = 16
STATE = 64 * WIDTH * 8


def block(w: Tensor, x: Tensor) -> Tensor:
    """x, and three values of its size of which a backward needs each."""
    hidden = checkpoint_name(torch.tanh(x @ w), "hidden")
    return x + hidden.sin().exp().sin()


def stack(ws: list[Tensor], x: Tensor, over: Any) -> Tensor:
    """Blocks one after the other."""
    for w in ws:
        x = over(w, x)
    return x.sum()


def weights() -> list[Tensor]:
    return [seeded(WIDTH, WIDTH, seed=k).mul_(0.1) for k in range(4)]


NAMED = remat(block, policy=policies.save_only_these_names("hidden"))
STACKS: dict[str, tuple[Any, int]] = {
    # The input of each of four blocks, less the first, which is the caller's.
    "nothing": (functools.partial(stack, over=remat(block)), 3),
    "a name": (functools.partial(stack, over=NAMED), 3 + 4),
    "nested": (remat(functools.partial(stack, over=remat(block))), 0),
}
each_stack = pytest.mark.parametrize(("fun", "held"), STACKS.values(), ids=STACKS)


@each_stack
def test_a_compiled_forward_saves_what_the_policy_permits(fun: Any, held: int) -> None:
    """Exact bytes, beside the arguments."""
    ws, x = [each.requires_grad_() for each in weights()], seeded(64, WIDTH)

    out = compiled(fun)(ws, x)

    saved = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in out.grad_fn.saved_tensors
    }
    for given in [*ws, x]:
        saved.pop(given.untyped_storage().data_ptr(), None)
    assert sum(saved.values()) == held * STATE


@pytest.mark.parametrize("name", ["nested", *swept(["a name"])])
def test_the_peak_is_no_higher_than_outside(name: str) -> None:
    """What is merged again would be kept: a step, and a gradient by torch.func."""
    fun, _ = STACKS[name]
    ws, x = [each.requires_grad_() for each in weights()], seeded(64, WIDTH)
    plain = [each.detach() for each in ws]

    def peaks(one: Any, other: Any) -> list[int]:
        steps: list[Any] = [
            lambda: torch.autograd.grad(one(ws, x), ws),
            lambda: other(plain, x),
        ]
        for step in steps:
            step()  # traces
        return [allocated(step).peak for step in steps]

    gradient = torch.func.grad(fun)
    outside = peaks(fun, gradient)
    one, other = (
        compiled(fun),
        torch.compile(gradient, backend="aot_eager", fullgraph=True),
    )
    inside = peaks(one, other)

    assert all(a <= b for a, b in zip(inside, outside, strict=True)), (inside, outside)


def _with_gradient(fun: Any, x: Tensor) -> list[Tensor]:
    out = fun(x)
    return [out, *torch.autograd.grad(out, x)]


def narrow(w: Tensor, x: Tensor) -> Tensor:
    """What autocast takes apart: casts, matmuls in bfloat16, and roundings between."""
    return torch.tanh(x @ w).sin() @ w


def step_of(over: Any, *, inside: bool) -> Any:
    """Two calls under autocast, entered inside of what is compiled or around it."""

    def steps(first: Tensor, second: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if inside else nullcontext():
            return over(second, over(first, x)).float().sum()

    return steps


@pytest.mark.parametrize("inside", [True, *swept([False])])
def test_recomputation_runs_under_the_autocast_of_the_forward(inside: bool) -> None:
    """The bits of the compiled plain function; a compiler that fuses rounds otherwise."""
    given = [seeded(8, 8, seed=k).float().requires_grad_() for k in range(3)]
    found = list[Any]()

    for over in (narrow, remat(narrow)):
        run = compiled(step_of(over, inside=inside))
        with nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
            out = run(*given)
        found.append([out, *torch.autograd.grad(out, given)])
        if not inside:
            out = run(*given)  # without autocast now: it is guarded
            found[-1] += [out, *torch.autograd.grad(out, given)]

    assert_bitwise(*found)


def test_the_inner_bound_holds_for_a_mapped_gradient() -> None:
    """What the outer backward repeats for the regions inside is still known there."""
    fun, _ = STACKS["nested"]
    ws, x = weights(), torch.stack([seeded(64, WIDTH, seed=k) for k in range(2)])
    outside = torch.func.vmap(torch.func.grad(fun), in_dims=(None, 0))
    inside = compiled(outside)

    assert_close(inside(ws, x), outside(ws, x))
    peaks = [allocated(lambda run=run: run(ws, x)).peak for run in (inside, outside)]

    assert peaks[0] <= peaks[1]


class Holder:
    """An object with state that a function reads."""

    factor = 2.0

    def __init__(self) -> None:
        self.counts = [1, 2]


holder = Holder()


def _with_state() -> tuple[Any, list[Callable[[], None]]]:
    """A function of regions over every kind of covered state, and what changes it."""
    cell, net = 2.0, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    region = remat(net)

    @remat
    def function(x: Tensor) -> Tensor:
        times = sum(holder.counts)
        return region(x).sin() * settings["scale"] * cell * holder.factor * times

    def set_cell() -> None:
        nonlocal cell
        cell = 3.0

    def set_weight() -> None:
        net[0].weight = nn.Parameter(seeded(4, 4, seed=9))

    changes = [
        lambda: settings.update(scale=5.0),
        set_cell,
        set_weight,
        lambda: setattr(holder, "factor", 7.0),
        lambda: holder.counts.append(3),
        lambda: setattr(net[1], "training", False),
    ]
    return (lambda x: function(x).sum()), changes


def test_state_that_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 7, one change after the other."""
    monkeypatch.setitem(settings, "scale", 2.0)
    monkeypatch.setattr(holder, "factor", 2.0, raising=False)
    monkeypatch.setattr(holder, "counts", [1, 2])
    fun, changes = _with_state()
    x = seeded(3, 4).requires_grad_()
    inside = compiled(fun)
    found = [inside(x)]

    for change in changes:
        change()
        out = inside(x)
        found.append(out)
        assert_close([out, *torch.autograd.grad(out, x)], _with_gradient(fun, x))

    assert len({each.item() for each in found}) == len(found)


def test_sizes_that_change() -> None:
    """A graph holds for the sizes that it met."""
    inside = compiled(of_pytrees)

    for size in (2, 3, 4):
        x = seeded(size, 4).requires_grad_()
        assert_close(gradients(inside, x), gradients(of_pytrees, x))


dropping = remat(
    nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2)).double()
)


@remat(rng="preserve")
def noisy(x: Tensor) -> Tensor:
    """A region that draws in many ways, one of them twice from the same values."""
    hidden = x @ weight
    apart = F.dropout(hidden).sin() - F.dropout(hidden).cos()
    heads = hidden[None, None]
    mixed = F.scaled_dot_product_attention(heads, heads.sin(), heads, dropout_p=0.3)
    return apart * torch.rand_like(x) + mixed[0, 0] * torch.randn(4, dtype=x.dtype)


@remat(rng="preserve", policy=policies.everything_saveable)
def noisy_twice(x: Tensor) -> Tensor:
    """A region around regions that draw."""
    return noisy(F.dropout(noisy(x), 0.1).sin()).sin()


def mapped_gradient(fun: Any) -> Any:
    """Gradients of single examples, of which each draws its own numbers."""
    return torch.func.vmap(torch.func.grad(fun), randomness="different")


DRAWING: dict[str, tuple[Any, Any]] = {
    "a module": (lambda x: dropping(dropping(x.sin())).sum(), None),
    "a function": (lambda x: noisy(x).sum(), None),
    "nested, grad": (lambda x: noisy_twice(x).sum(), torch.func.grad),
    "vmap(grad)": (lambda x: noisy(x).sum(), mapped_gradient),
}


@pytest.mark.parametrize("drawing", daily(DRAWING, ["a module", "a function"]))
def test_draws_in_a_graph_are_those_outside(drawing: tuple[Any, Any]) -> None:
    """To the bit: forward and recomputation draw the same, generators end where they did."""
    x, found, (fun, transform) = seeded(2, 3, 4), list[Any](), drawing
    over = fun if transform is None else transform(fun)
    given = x if transform is mapped_gradient else x[0].requires_grad_(not transform)

    for run in (over, compiled(over)):
        torch.manual_seed(3)
        out = run(given) if transform else _with_gradient(run, given)
        found.append(tensors_in((out, torch.get_rng_state())))

    assert_bitwise(*found)


def test_a_graph_keeps_states_of_generators_and_no_masks() -> None:
    """One for each draw, of 5,056 bytes on a CPU, beside the weight."""
    region = remat(lambda x: F.dropout(torch.exp(x).sin(), 0.5).sin(), rng="preserve")
    x = seeded(64, 64).requires_grad_()

    out = compiled(region)(x)

    saved = [each for each in out.grad_fn.saved_tensors if each is not x]
    state = default_generator().get_state()
    assert sum(each.nbytes for each in saved) == state.nbytes


def test_another_policy_compiles_again() -> None:
    """The one that is in force decides what waits."""
    settings["policy"] = OUTSIDE  # type: ignore[assignment]
    x = seeded(16, 4).requires_grad_()
    fun = compiled(lambda x: remat(named, policy=settings["policy"])(x))  # type: ignore[call-overload]
    held = []

    for policy in (OUTSIDE, policies.nothing_saveable):
        settings["policy"] = policy  # type: ignore[assignment]
        held.append(sum(each.numel() for each in fun(x).grad_fn.saved_tensors))

    del settings["policy"]
    assert held[1] < held[0]


@pytest.mark.parametrize(
    "options", [{"static_argnums": 0}, {"static_argnames": "n"}], ids=str
)
def test_static_arguments_in_a_graph(options: Any) -> None:
    """Dynamo guards them, and the tensors are counted by themselves."""
    region = remat(lambda n, x, y: (x * n).sin() * y.sin(), **options)
    x = seeded(3, 4).requires_grad_()

    def fun(x: Tensor) -> Tensor:
        return region(2, x.exp(), x).sum()

    assert_close(gradients(compiled(fun), x), gradients(fun, x))


def step(carry: Tensor, x: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """One of a stack's, with and without something to be stacked."""
    carry = torch.tanh(carry @ weight + x["x"])
    return carry, {"sum": carry.sum(), "none": None}


def scanned(x: Tensor, **options: Any) -> Tensor:
    """A stack of like steps."""
    carry, ys = scan(step, x[0], {"x": x.exp()}, **options)
    return carry.sum() + (ys["sum"] * x[:, 0]).sum()


def chained(x: Tensor, *schedule: Any) -> Tensor:
    """A stack of functions and modules that differ, of which one draws."""
    return chain([torch.sin, layer, dropping, lambda x: x @ weight], *schedule)(x).sum()


STACKED: dict[str, tuple[Callable[..., Any], bool]] = {
    "scan": (scanned, True),
    "scan, reverse": (functools.partial(scanned, reverse=True), True),
    "chain": (chained, True),
    "scan, schedule": (
        functools.partial(scanned, schedule=schedules.Sqrt()),
        False,
    ),
    "chain, schedule": (
        lambda x: chain([torch.sin, layer, torch.cos], schedules.Every(2))(x).sum(),
        False,
    ),
}


@pytest.mark.parametrize("case", daily(STACKED, ["scan", "chain", "scan, schedule"]))
def test_stacks(case: tuple[Any, bool]) -> None:
    """In the graph they are loops of regions; under a schedule they run apart."""
    fun, is_whole = case
    x, found = seeded(5, 4).requires_grad_(), list[Any]()

    for run in (fun, compiled(fun, fullgraph=is_whole)):
        torch.manual_seed(3)
        found.append(torch.autograd.grad(run(x), [x, weight]))

    assert_close(found[1], found[0])


def test_a_schedule_is_refused_in_one_graph() -> None:
    """The error says what to do instead."""
    fun = STACKED["scan, schedule"][0]

    with pytest.raises(Unsupported, match=r"remat.scan: has a policy or a schedule"):
        compiled(fun)(seeded(5, 4).requires_grad_())


def test_a_scan_that_is_wrong_says_so_outside() -> None:
    """A graph ends in front of it."""
    fun = compiled(
        lambda x: scan(lambda c, x: (c.sum(), x), x[0], x)[0], fullgraph=False
    )

    with pytest.raises(CarryError, match="before as float64"):
        fun(seeded(5, 4).requires_grad_())


def test_a_region_traces_through_a_compiled_function() -> None:
    """It is one of the region's steps, whether a graph holds the region or not."""
    within = torch.compile(lambda x: x.sin().exp(), backend="aot_eager")
    region = remat(lambda x: within(x @ weight).sin())
    x = seeded(3, 4).requires_grad_()

    found = gradients(lambda x: region(x).sum(), x)

    assert_close(found, gradients(lambda x: (x @ weight).sin().exp().sin().sum(), x))
    torch._dynamo.reset()
