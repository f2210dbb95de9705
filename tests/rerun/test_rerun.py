"""`engine="rerun"`: functions that cannot be traced.

"For functions that cannot be traced (branches on values, opaque kernels): the Python
function runs again in the backward, buffers restored around it; any policy but
`nothing_saveable` is an error; laws hold except 3, and 13 up to a constant."
"""

import concurrent.futures
import itertools
import operator
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad

from remat import (
    CapturedTensorError,
    MutationError,
    RecomputationError,
    SavedTensorModifiedError,
    TraceError,
    policies,
    remat,
    scan,
)
from remat._regions.protocol import Call
from remat._regions.rules import bind
from remat._rerun.region import rerun_of
from remat._switches.numerics import Numerics
from remat._tracing.trace import Flat
from tests.support import (
    LiveBytes,
    assert_bitwise,
    assert_close,
    backward_operators,
    grads,
    held_bytes,
    seeded,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    # Dynamo reads `.grad` of what it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a"),
]


def branches(x: Tensor) -> Tensor:
    """Branches on a value, and loops as often as a value says."""
    y = torch.sin(x)
    if y.detach().sum() > 0:
        y = torch.cos(y) * 2
    while y.detach().abs().max() > 0.5:
        y = torch.sin(y) * 0.5
    return torch.sin(y)


class Opaque(torch.autograd.Function):
    """A kernel in numpy, with a numpy backward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return cotangents[0] * torch.from_numpy(np.cos(x.detach().numpy()))


def opaque(x: Tensor) -> Tensor:
    return torch.sin(Opaque.apply(torch.sin(x)))


def data_dependent(x: Tensor) -> Tensor:
    """Shapes that depend on values."""
    return (
        torch.sin(torch.sin(x)[x > 0]).sum() + torch.unique(x.detach().round()).numel()
    )


def item(x: Tensor) -> Tensor:
    return torch.sin(x * float(x.detach().max()))


def traceable(x: Tensor) -> Tensor:
    """What the trace engine could do as well."""
    return torch.sin(torch.sin(torch.sin(x)))


UNTRACEABLE = [branches, opaque, data_dependent, item]
FUNS = [*UNTRACEABLE, traceable]


@pytest.mark.contract
@pytest.mark.parametrize("policy", [None, policies.nothing_saveable], ids=repr)
@pytest.mark.parametrize("fun", FUNS)
def test_gradients_are_bitwise_plains(fun: Any, policy: Any) -> None:
    """Whatever the branch that the values take."""
    region = remat(fun, engine="rerun", policy=policy)
    for x in (seeded(4), -seeded(4), seeded(4) * 9):
        assert_bitwise(grads(region, [x]), grads(fun, [x]))


@pytest.mark.parametrize("fun", UNTRACEABLE)
def test_the_trace_engine_says_to_rerun(fun: Callable[[Tensor], Tensor]) -> None:
    """The trace engine refuses them, and names this one."""
    with pytest.raises(TraceError, match="rerun") as error:
        remat(fun)(seeded(4).requires_grad_())

    assert "test_rerun.py:" in str(error.value)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "grad_grad": lambda f, x: torch.func.grad(
        lambda x: torch.func.grad(lambda x: f(x).sum())(x).square().sum()
    )(x),
    "vjp": lambda f, x: torch.func.vjp(lambda x: f(x).sum(), x)[1](x.new_ones(())),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jvp_grad": lambda f, x: torch.func.jvp(
        torch.func.grad(lambda x: f(x).sum()), (x,), (x,)
    ),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x.expand(3, *x.shape)),
    "vmap_grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(
        x.expand(3, *x.shape)
    ),
    "grad_vmap": lambda f, x: torch.func.grad(
        lambda x: torch.func.vmap(f)(x.expand(3, *x.shape)).sum()
    )(x),
}


@pytest.mark.contract
@pytest.mark.parametrize("fun", [traceable, branches, item])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_each_transform_that_plain_supports(transform: Any, fun: Any) -> None:
    """Where plain PyTorch gives numbers they agree; where it raises, so does this."""
    region = remat(fun, engine="rerun")
    try:
        expected = transform(fun, seeded(4))
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:20].replace("(", ".")):
            transform(region, seeded(4))
        return

    assert_close(transform(region, seeded(4)), expected)


@pytest.mark.contract
def test_nothing_but_inputs_is_held() -> None:
    """Nothing but a generator's state waits for the backward, and work runs again."""
    region = remat(traceable, engine="rerun")
    state = torch.get_rng_state().numel()

    assert held_bytes(traceable, seeded(4096)) > 2 * state
    assert held_bytes(region, seeded(4096)) <= state + 1024
    assert backward_operators(region, seeded(64))["aten.sin"] >= 2


def test_the_peak_falls_under_func_grad() -> None:
    """16 layers under `torch.func.grad` peak at less than half of plain."""

    def layer(x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.sin(x)
        return x

    def peak(layer: Any) -> int:
        def loss(x: Tensor) -> Tensor:
            for _ in range(16):
                x = layer(x)
            return x.sum()

        x = seeded(4096)
        torch.func.grad(loss)(x)
        with LiveBytes() as memory:
            torch.func.grad(loss)(x)
            return memory.peak

    assert peak(remat(layer, engine="rerun")) <= 0.5 * peak(layer)


def test_double_backward_without_transforms() -> None:
    """`create_graph=True`, third order."""

    def third(fun: Any) -> list[Tensor]:
        x = seeded(4).requires_grad_()
        y, found = fun(x).sum(), []
        for _ in range(3):
            (y,) = torch.autograd.grad(y, x, create_graph=True)
            found.append(y.detach())
            y = y.sum()
        return found

    for fun in (branches, traceable):
        assert_close(third(remat(fun, engine="rerun")), third(fun))


def test_parameters_of_a_branching_module() -> None:
    """A module that skips a layer by value: only the layers used get gradients."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(3))

    def fun(x: Tensor) -> Tensor:
        for i, layer in enumerate(layers):
            if i != 1 or x.detach().sum() > 1e6:
                x = torch.tanh(layer(x))
        return x

    def gradients(fun: Any) -> list[Tensor | None]:
        layers.zero_grad()
        fun(seeded(2, 3)).sum().backward()
        return [parameter.grad for parameter in layers.parameters()]

    expected = gradients(fun)
    assert expected[2] is None
    found = gradients(remat(fun, engine="rerun"))
    assert_bitwise([g for g in found if g is not None], expected[:2] + expected[4:])


def test_a_module_as_region() -> None:
    """The module's parameters train through the region."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    x = seeded(2, 3)

    found = torch.autograd.grad(
        remat(model, engine="rerun")(x).sum(), list(model.parameters())
    )
    assert_bitwise(found, torch.autograd.grad(model(x).sum(), list(model.parameters())))


def test_inside_a_traced_region_it_is_refused_or_right() -> None:
    """A rerun region inside a traced one gives plain's numbers, or says why not."""
    inner = remat(branches, engine="rerun")

    def outer(x: Tensor) -> Tensor:
        return torch.sin(inner(torch.sin(x)))

    try:
        found = grads(remat(outer), [seeded(4)])
    except TraceError:
        return
    assert_bitwise(found, grads(lambda x: branches(x.sin()).sin(), [seeded(4)]))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_a_gradient_is_linearized_beside_data() -> None:
    """`linearize` traces real tensors, whose numbers it does not tell."""
    region, data = remat(lambda x, w: (x @ w).tanh(), engine="rerun"), seeded(5, 3)
    w = seeded(3, 3, seed=1)

    def mapped(fun: Any) -> Any:
        gradient = grad(lambda w: fun(data, w).sum())
        return torch.func.linearize(gradient, w)[1](w.cos())

    assert_close(mapped(region), mapped(region.__wrapped__))


@pytest.mark.parametrize("tracks", [True, False], ids=["training", "at rest"])
@pytest.mark.parametrize("norm", [torch.batch_norm, torch.instance_norm])
def test_torchs_own_normalizations(norm: Any, tracks: bool) -> None:
    """They take weight and bias in front of the statistics: these were taken for them."""

    def normed(mean: Tensor, variance: Tensor) -> Callable[..., Tensor]:
        settings = (tracks, 0.1, 1e-5, False)
        return lambda x, w, b: norm(x, w, b, mean, variance, *settings).sin()

    def statistics() -> list[Tensor]:
        return [torch.zeros(3).double(), torch.ones(3).double()]

    args = [seeded(2, 3, 5), seeded(3, seed=1), seeded(3, seed=2)]
    own, others = statistics(), statistics()
    found = grads(remat(normed(*own), engine="rerun"), args)
    assert_bitwise([*found, *own], [*grads(normed(*others), args), *others])


GRADIENTS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "func.grad": lambda fun, w: grad(lambda w: fun(w).sum())(w),
    "func.vjp": lambda fun, w: torch.func.vjp(fun, w)[1](w.cos())[0],
    "autograd.grad": lambda fun, w: torch.autograd.grad(
        fun(w).sum(), w, create_graph=True
    )[0],
    "a view": lambda fun, w: grad(lambda w: fun(w).sum())(w).t(),
}


@pytest.mark.contract
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_traced_region_that_returns_the_gradient_of_one_that_runs_again(
    name: str,
) -> None:
    """What its backward detaches is no `detach` of the user's: the gradient goes on."""
    gradient, again = GRADIENTS[name], remat(torch.tanh, engine="rerun")
    region = remat(lambda w: gradient(again, w))

    w = seeded(3, 3)
    assert_bitwise(grads(region, [w]), grads(lambda w: gradient(torch.tanh, w), [w]))


@pytest.mark.contract
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_traced_region_that_hands_out_what_it_gives(transform: Any) -> None:
    """What a rerun region returns is no detached value for the trace around it."""
    inner = remat(traceable, engine="rerun")
    outer = remat(lambda x: inner(x))
    assert outer(seeded(4).requires_grad_()).requires_grad
    assert_bitwise(grads(outer, [seeded(4)]), grads(traceable, [seeded(4)]))
    assert_close(transform(outer, seeded(4)), transform(traceable, seeded(4)))


@pytest.mark.contract
def test_a_stack_inside() -> None:
    """A `scan`, which runs its steps on fakes first, is no draw from a generator."""
    steps = seeded(3, 4)

    def fun(x: Tensor) -> Tensor:
        carry, rows = scan(lambda c, a: ((c * a).tanh(), c), x, steps)
        return carry * rows.sum(0)

    def plain(x: Tensor) -> Tensor:
        carry, rows = x, []
        for a in steps:
            rows.append(carry)
            carry = (carry * a).tanh()
        return carry * torch.stack(rows).sum(0)

    found = grads(remat(fun, engine="rerun"), [seeded(4)])
    assert_close(found, grads(plain, [seeded(4)]))


def three(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Outputs that rest on some of the arguments."""
    with torch.no_grad():
        unfelt = c.exp()
    return a.sin(), b.sin() * unfelt, a * b


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)])
def test_what_no_used_output_rests_on_has_no_gradient(
    used: tuple[int, ...], engine: str
) -> None:
    """`.grad` stays None where plain leaves it so: an optimizer then lets it be."""

    def grads_of(fun: Callable[..., Any]) -> list[Tensor | None]:
        args = [seeded(4, seed=k).requires_grad_() for k in range(3)]
        outputs = fun(*args)
        torch.stack([outputs[k] for k in used]).sin().sum().backward()
        return [each.grad for each in args]

    plain = grads_of(three)
    found = grads_of(remat(three, engine=engine))

    assert plain[2] is None
    for ours, theirs in zip(found, plain, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
        else:
            assert_bitwise(ours, theirs)


def test_a_node_waits_for_nothing_but_what_its_outputs_rest_on() -> None:
    """Hooks that wait for a gradient are not held up by who sees the parameter."""
    used, seen = nn.Linear(3, 3), nn.Linear(3, 3)
    everything = [used, seen]

    def block(x: Tensor) -> Tensor:
        assert len(everything) == 2
        return used(x).sin() * everything[1].weight.detach().sum()

    y = remat(block, engine="rerun")(torch.ones(2, 3))

    assert y.grad_fn is not None
    edges = [getattr(node, "variable", None) for node, _ in y.grad_fn.next_functions]
    leaves = [each for each in edges if each is not None]
    assert {id(each) for each in leaves} == {id(each) for each in used.parameters()}


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_second_derivatives_of_mapped_gradients(engine: str) -> None:
    """Which output rests on what is no matter of the gradients, whose region is mapped."""

    def two(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return a.sin() * 2, (b * c).cos() * b

    def second(fun: Any) -> Any:
        def loss(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
            first, other = fun(x, w, v)
            return (first * w).square().sum() + other.pow(3).sum()

        def of_all(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
            each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, None, 0))
            return each(w, v, x).square().sum()

        args = seeded(3), seeded(3, seed=1), seeded(4, 3, seed=2)
        return torch.func.grad(of_all, argnums=(0, 1, 2))(*args)

    assert_close(second(remat(two, engine=engine)), second(two))


def test_a_traced_region_inside() -> None:
    """The other way round there is nothing in the way."""
    inner = remat(traceable)

    def outer(x: Tensor) -> Tensor:
        return inner(branches(x))

    plain = grads(lambda x: traceable(branches(x)), [seeded(4)])
    assert_bitwise(grads(remat(outer, engine="rerun"), [seeded(4)]), plain)


class Product(torch.autograd.Function):
    """x * w, of which no torch function sees `w`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return cotangents[0] * w, cotangents[0] * x

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return tangents[0] * w + x * tangents[1]


def reaches(w: Tensor, region: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions that hand on a tensor that they reach, without an operator."""
    by_itself = region(lambda x: (x * w).sin())
    given = region(lambda x, w: (x * w).sin())
    level = region(lambda x: by_itself(x) * w)
    return {
        "a region that reaches it": lambda x: by_itself(x) + by_itself(x * 2),
        "a region that is given it": lambda x: given(x, w),
        "two levels": lambda x: level(x.cos()),
        "autograd.Function": lambda x: Product.apply(x, w).sin(),
        "a stack": lambda x: scan(lambda c, _: ((c * w).sin(), None), x, length=2)[0],
    }


REACHES = [*reaches(torch.ones(()), lambda fun: fun)]


@pytest.mark.contract
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize(
    ("outer", "inner"), [("rerun", "trace"), ("rerun", "rerun"), ("trace", "rerun")]
)
def test_what_regions_inside_reach(outer: Any, inner: Any, reach: str) -> None:
    """Each run of the function around gives them its own stand-in; it raised, always."""

    def region(x: Tensor, w: Tensor) -> Tensor:
        return remat(reaches(w, remat(engine=inner))[reach], engine=outer)(x)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return reaches(w, lambda fun: fun)[reach](x)

    def pushed(fun: Any) -> Any:
        gradient = torch.func.grad(lambda x, w: fun(x, w).sum(), argnums=(0, 1))
        mapped = torch.func.vmap(gradient, in_dims=(0, None))(x, w)
        return mapped, torch.func.jvp(gradient, (x, w), (x.cos(), w.sin()))

    x, w = seeded(2, 3), seeded(3, seed=1)
    assert_bitwise(grads(region, [x, w]), grads(plain, [x, w]))
    assert_close(pushed(region), pushed(plain))


def test_functions_that_run_again_on_two_threads() -> None:
    """Each thread's stand-ins are its own, and `Function.apply` is torch's in the end."""
    original = torch.autograd.Function.__dict__["apply"]
    barrier = threading.Barrier(2)

    def step(w: Tensor) -> Tensor:
        def fun(x: Tensor) -> Tensor:
            barrier.wait(timeout=60)
            return Product.apply(x, w)

        remat(fun, engine="rerun")(seeded(3)).sum().backward()
        assert w.grad is not None
        return w.grad

    weights = [seeded(3, seed=seed).requires_grad_() for seed in (1, 2)]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = [*threads.map(step, weights)]

    assert_bitwise(found, [seeded(3), seeded(3)])
    assert torch.autograd.Function.__dict__["apply"] is original


@pytest.mark.contract
def test_a_captured_tensor_as_output() -> None:
    """It is returned without having met an operator, and gets its gradient."""
    w, x = seeded(3).requires_grad_(), seeded(3, seed=1)
    region: Any = remat(lambda x: ((x * w).sin(), w), engine="rerun")

    first, second = region(x)
    (found,) = torch.autograd.grad((first * second).sum(), w)

    assert_bitwise(found, torch.autograd.grad(((x * w).sin() * w).sum(), w)[0])


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_ragged_argument() -> None:
    """So is one of many lengths."""
    parts = [seeded(2), seeded(3)]
    ragged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)

    with pytest.raises(
        TraceError, match=r"torch.jagged, .* Pass its values and offsets"
    ):
        remat(torch.sin)(ragged)
    remat(torch.sin, engine="rerun")(ragged).values().sum().backward()
    assert ragged.grad is not None
    assert_bitwise(ragged.grad.values(), torch.cat(parts).cos())


@pytest.mark.contract
def test_a_lazy_module_says_what_to_do() -> None:
    """As in a trace: a run has no tensors to make its parameters of."""
    model = nn.Sequential(nn.LazyLinear(4))

    with pytest.raises(TraceError, match=r"`self\.0\.weight`: .*remat\.disabled"):
        remat(model, engine="rerun")(seeded(2, 3))


@pytest.mark.contract
@pytest.mark.parametrize("make", [Tensor.to_sparse, Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_argument(make: Callable[[Tensor], Tensor]) -> None:
    """A trace refuses it and says how to go on; a function that runs again takes it."""
    matrix = make(seeded(3, 4).relu()).requires_grad_()
    args = (matrix, seeded(4, 2).requires_grad_())

    with pytest.raises(TraceError, match=r"`args.0`: is a .* of layout torch.sp"):
        remat(torch.mm)(*args)
    with pytest.raises(TraceError, match=r"used at .*: is a .* of layout torch.sp"):
        remat(lambda x: torch.mm(matrix, x))(args[1])
    again = remat(torch.mm, engine="rerun")
    for found, expected in zip(grads(again, args), grads(torch.mm, args), strict=True):
        assert found is not None
        assert expected is not None
        assert_bitwise(found.to_dense(), expected.to_dense())


def unnested(values: Tensor, offsets: Tensor) -> Tensor:
    """Makes a nested tensor inside, and gives its values back."""
    nested = torch.nested.nested_tensor_from_jagged(values.sin(), offsets)
    return nested.cos().values()


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor() -> None:
    """A trace refuses it, as an argument and made inside; a function that runs again takes it."""
    rows = [seeded(2, 3), seeded(4, 3)]
    given, offsets = seeded(6, 3), torch.tensor([0, 2, 6])

    for layout in (torch.jagged, torch.strided):
        nested = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
        with pytest.raises(TraceError, match=rf"`args.0`: is a nested .* {layout},"):
            remat(torch.sin)(nested)
    older = torch.nested.nested_tensor(rows)
    with pytest.raises(TraceError, match=r"used at .*: is a nested .* torch.strided,"):
        remat(lambda x: x * older.to_padded_tensor(0.0).sum())(given.requires_grad_())
    with pytest.raises(TraceError, match="cannot be traced"):
        remat(unnested)(given, offsets)
    again = remat(unnested, engine="rerun")
    plain = grads(lambda x: unnested(x, offsets), [given])
    assert_bitwise(grads(lambda x: again(x, offsets), [given]), plain)


def nested_of(numbers: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(numbers, torch.tensor([0, 1, 6]))


@pytest.mark.contract
@pytest.mark.parametrize("made_of", [nested_of, Tensor.to_sparse, Tensor.to_sparse_csr])
@pytest.mark.parametrize("is_hidden", [False, True], ids=["leaf", "hidden"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_is_not_strided_under_autocast(
    made_of: Callable[[Tensor], Tensor], is_hidden: bool
) -> None:
    """A leaf is cast once, hidden states each time, as without a region."""
    numbers, weight = seeded(6, 5).float(), seeded(5, 5).float().requires_grad_()

    def used_twice(x: Tensor) -> Tensor:
        if not x.is_nested:  # autocast casts no sparse tensors on CPUs
            return (x * 1.5 + x * 2.5).to_dense()
        return ((x @ weight).cos() + (x @ weight.t()).sin()).values()

    def gradients(fun: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = numbers.clone().requires_grad_()
        given = made_of(leaf if is_hidden else numbers)
        leaf = leaf if is_hidden else given.requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = fun(given)
        found = torch.autograd.grad(y.float().square().sum(), leaf)[0]
        return [y.detach(), found.values() if found.is_nested else found.to_dense()]

    again = remat(used_twice, engine="rerun")
    assert_bitwise(gradients(again), gradients(used_twice))


CAPTURING: dict[str, Callable[..., Any]] = {
    "jvp": lambda d, x, w: torch.func.jvp(
        lambda w: grad(lambda x: d(lambda y: (y * w).sin())(x).sum())(x), (w,), (w.cos(),)
    ),
    "jacfwd": lambda d, x, w: torch.func.jacfwd(
        lambda w: grad(lambda x: d(lambda: (x * w).sin())().sum())(x)
    )(w),
    "vmap": lambda d, x, w: torch.func.vmap(
        lambda w: grad(lambda x: d(lambda y: (y * w).sin())(x).sum())(x)
    )(torch.stack([w, w.cos()])),
    "grad": lambda d, x, w: grad(
        lambda w: grad(lambda x: d(lambda y: (y * w).sin())(x * w).sum())(x).sum()
    )(w),
}  # fmt: skip


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("derived", CAPTURING.values(), ids=CAPTURING)
def test_a_captured_tensor_that_a_transform_follows(derived: Any, engine: str) -> None:
    """Forward mode and vmap follow it through the region, whether or not reverse mode does."""
    x, w = seeded(3), seeded(3, seed=1)

    plain = derived(lambda fun: fun, x, w)

    assert_close(derived(lambda fun: remat(fun, engine=engine), x, w), plain)


class Doubling(Tensor):
    """A class of tensors whose sine is twice the sine."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is torch.sin else out


@pytest.mark.contract
@pytest.mark.parametrize("is_captured", [False, True], ids=["argument", "captured"])
def test_a_class_with_functions_of_its_own(is_captured: bool) -> None:
    """A trace would not see what they do to the numbers; they are on in a run again.

    torch turns them off during a backward from a tensor of the class.
    """
    x = seeded(4).as_subclass(Doubling).requires_grad_()

    def f(y: Tensor) -> Tensor:
        return torch.sin(x if is_captured else y).exp() * y

    again = remat(f, engine="rerun")
    assert_bitwise(
        torch.autograd.grad(again(x).sum(), x), torch.autograd.grad(f(x).sum(), x)
    )
    with pytest.raises(TraceError, match="class Doubling: has a `__torch_function__`"):
        remat(f)(seeded(4).requires_grad_() if is_captured else x)


def test_a_tensor_left_elsewhere_loses_no_gradient() -> None:
    """What the function hands out past its return value has a gradient, or raises."""
    kept: list[Tensor] = []

    def leaving(x: Tensor) -> Tensor:
        y = branches(x)
        kept.append(y.exp())
        return y

    x = seeded(4).requires_grad_()
    y = remat(leaving, engine="rerun")(x)

    with pytest.raises(
        CapturedTensorError, match=r"stored somewhere.*Return the tensor"
    ):
        (y.sum() + kept[0].sum()).backward()
    # Its numbers may be read.
    assert_close(kept[0], branches(x).exp())


def test_what_a_stack_derives_from_is_checked_for_other_tensors() -> None:
    """A function of operands alone: one that rests on more, or leaves more, raises."""
    w, x = seeded(4).requires_grad_(), seeded(4, seed=1).requires_grad_()
    kept: list[Tensor] = []

    def leaving(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        kept.append(tensors[0].exp())
        return [tensors[0].sin()]

    def run(function: Flat) -> Tensor:
        region = rerun_of(function, (True,), (True,))
        (found,) = bind(Call(region, (), Numerics.current()), [x])
        assert found is not None
        return found

    with pytest.raises(CapturedTensorError, match="cannot be followed"):
        run(lambda tensors: [torch.sin(tensors[0] * w)])
    y = run(leaving)
    with pytest.raises(CapturedTensorError, match="stored somewhere"):
        (y + kept[0]).sum().backward()


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
def test_a_region_inside_functional_call_keeps_its_gradients(engine: str) -> None:
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

    with pytest.raises(ArithmeticError):
        y.sum().backward()

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
    stack: Callable[..., Tensor], engine: str
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
def test_a_tensor_without_a_gradient_that_was_changed_since_raises(engine: str) -> None:
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


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_batched_gradients_of_autograd(engine: str) -> None:
    """`is_grads_batched=True`, and what rests on it; a graph of them is refused, not lost."""
    x = seeded(3).requires_grad_()
    region = remat(traceable, engine=engine)
    functional: Any = torch.autograd.functional

    def rows(fun: Any, **options: Any) -> Any:
        return torch.autograd.grad(fun(x), x, torch.eye(3).double(), **options)

    assert_close(
        rows(region, is_grads_batched=True), rows(traceable, is_grads_batched=True)
    )
    for vectorize in (False, True):
        assert_close(
            functional.hessian(lambda x: region(x).sum(), x, vectorize=vectorize),
            functional.hessian(lambda x: traceable(x).sum(), x, vectorize=vectorize),
        )
    with pytest.raises(NotImplementedError, match=r"Use torch\.func\.jacrev"):
        rows(region, is_grads_batched=True, create_graph=True)


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
def test_a_captured_tensor_is_changed_once(write: Any, engine: str) -> None:
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
def test_what_is_differentiated_is_not_changed(write: Any, engine: str) -> None:
    """A run again would start from the changed numbers, and change them once more (law 4)."""

    def fun(x: Tensor) -> Tensor:
        write(x)
        return x.sin()

    with pytest.raises((MutationError, TraceError), match=r"test_rerun\.py:\d+"):
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


def _compiled(fun: Callable[..., Any], *, fullgraph: bool) -> Callable[..., Any]:
    return torch.compile(fun, backend="aot_eager", fullgraph=fullgraph)


def _calls_compiled(within: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, weight: torch.sin(within(torch.tanh(x @ weight)))


def _decides(x: Tensor, weight: Tensor) -> Tensor:
    """A branch that torch takes by a value; both sides close over an argument."""
    y = torch.tanh(x @ weight)
    return torch.cond(
        y.sum() > 0, lambda y: torch.sin(y) * weight, lambda y: y + weight, (y,)
    )


@pytest.mark.parametrize(
    "fun",
    [
        _calls_compiled(_compiled(lambda y: y.sin().exp(), fullgraph=True)),
        _calls_compiled(_compiled(lambda y: y.sin().exp(), fullgraph=False)),
        _decides,
    ],
    ids=["whole", "in_parts", "cond"],
)
def test_what_torch_compile_made_runs_in_a_run(fun: Any) -> None:
    """As it would without a region, and `torch.cond`, which compiles for itself."""
    region = remat(fun, engine="rerun")
    for sign in (1, -1):
        args = [sign * seeded(4, 4), seeded(4, 4, seed=1)]
        assert_bitwise(grads(region, args), grads(fun, args))
    torch._dynamo.reset()


def test_what_a_compiled_function_reads_and_writes() -> None:
    """An argument that it changes is changed once; one that changes since raises."""

    def scale(y: Tensor, c: Tensor) -> Tensor:
        return torch.sin(y * c.add_(1))

    def fun(x: Tensor, c: Tensor) -> Tensor:
        return _compiled(scale, fullgraph=True)(torch.sin(x), c).sum()

    region = remat(fun, engine="rerun")
    x, c, plain_c = seeded(4).requires_grad_(), torch.ones(4), torch.ones(4)

    found = torch.autograd.grad(region(x, c), x)

    assert_bitwise(found, torch.autograd.grad(fun(x, plain_c), x))
    assert_bitwise(c, plain_c)
    within = _compiled(lambda y: y.sin().exp(), fullgraph=True)
    x, weight = seeded(4, 4).requires_grad_(), seeded(4, 4)
    out = remat(_calls_compiled(within), engine="rerun")(x, weight)
    weight.add_(1)
    with pytest.raises(SavedTensorModifiedError, match="changed in place since"):
        out.sum().backward()
    torch._dynamo.reset()


def test_a_graph_is_not_whole_where_captured_tensors_are_replaced() -> None:
    """Of a function that reaches more than its arguments torch runs the parts, or says so."""
    weight = seeded(4, seed=2).requires_grad_()

    def fun(x: Tensor, *, fullgraph: bool) -> Tensor:
        return torch.sin(_compiled(lambda y: y * weight, fullgraph=fullgraph)(x)).sum()

    x = seeded(4).requires_grad_()
    region = remat(fun, engine="rerun")

    found = torch.autograd.grad(region(x, fullgraph=False), (x, weight))

    plain = torch.autograd.grad(fun(x, fullgraph=False), (x, weight))
    assert_bitwise(found, plain)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="reaches tensors beyond its arguments"):
        region(x, fullgraph=True)
    torch._dynamo.reset()
