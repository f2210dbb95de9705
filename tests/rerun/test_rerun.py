"""`engine="rerun"`: functions that cannot be traced.

"For functions that cannot be traced (branches on values, opaque kernels): the Python
function runs again in the backward, buffers restored around it; any policy but
`nothing_saveable` is an error; laws hold except 3, and 13 up to a constant."
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from remat import (
    SavedTensorModifiedError,
    StaticArgumentError,
    TraceError,
    policies,
    remat,
)
from tests.rerun.functions import (
    TRANSFORMS,
    branches,
    data_dependent,
    item,
    opaque,
    traceable,
)
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

    assert "functions.py:" in str(error.value)


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
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_ragged_argument_without_a_gradient() -> None:
    """It is compared after the first run, as all is that the function may change."""
    w = seeded(3, 3).requires_grad_()
    parts = [seeded(2, 3), seeded(4, 3)]
    ragged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    region = remat(lambda x, w: (x @ w).sin().values(), engine="rerun")

    (found,) = torch.autograd.grad(region(ragged, w).sum(), w)
    plain = (ragged @ w).sin().values()
    assert_bitwise(found, torch.autograd.grad(plain.sum(), w)[0])


class Averaged(Tensor):
    """A name for tensors whose sums are means."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        func = Tensor.mean if func is Tensor.sum else func
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:.*runs the function again in its backward")
@pytest.mark.parametrize("engine", ["rerun", "auto"])
@pytest.mark.parametrize("is_given", [True, False], ids=["given", "made inside"])
def test_results_keep_their_class(is_given: bool, engine: Any) -> None:
    """What is computed of them next depends on it."""
    w, x = seeded(3, 3).requires_grad_(), seeded(2, 3)
    if is_given:
        x = x.as_subclass(Averaged)

    def fun(x: Tensor) -> dict[str, Tensor]:
        product = (x @ w).as_subclass(Averaged)
        own = {
            "of it": product.sin() * product.sum(),
            "once": product,
            "twice": product,
        }
        return {**own, "plain": w.sin(), "same": x}

    found, expected = remat(fun, engine=engine)(x), fun(x)
    assert {k: type(each) for k, each in found.items()} == {
        k: type(each) for k, each in expected.items()
    }
    assert found["same"] is x
    assert found["once"] is found["twice"]
    assert_bitwise(
        torch.autograd.grad(found["of it"].sum(), w),
        torch.autograd.grad(expected["of it"].sum(), w),
    )


@pytest.mark.contract
def test_a_lazy_module_says_what_to_do() -> None:
    """As in a trace: a run has no tensors to make its parameters of."""
    model = nn.Sequential(nn.LazyLinear(4))

    with pytest.raises(TraceError, match=r", self\.0\.weight: .*remat\.disabled"):
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


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["rerun", "auto"])
@pytest.mark.parametrize("name", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.filterwarnings("ignore::remat.RematWarning")
def test_a_sparse_argument_without_a_gradient(name: str, engine: Any) -> None:
    """As an adjacency matrix; whether it was changed is seen by its parts."""
    matrix, x = getattr(seeded(3, 4).relu(), name)(), seeded(4, 2).requires_grad_()
    expected = torch.autograd.grad((matrix @ x).sin().sum(), x)
    region = remat(lambda matrix, x: (matrix @ x).sin(), engine=engine)
    assert_bitwise(torch.autograd.grad(region(matrix, x).sum(), x), expected)


@pytest.mark.contract
@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.filterwarnings("ignore::remat.RematWarning")
def test_a_quantized_tensor(is_captured: bool) -> None:
    """torch has no stand-in for one, and cannot view it as bytes: it ended the process."""
    x = seeded(3, 4).float().requires_grad_()
    weight = torch.quantize_per_tensor(seeded(3, 4).float(), 0.1, 0, torch.qint8)
    if is_captured:
        fun, args = lambda x: (weight.dequantize() * x).sin(), (x,)
    else:
        fun, args = lambda x, q: (q.dequantize() * x).sin(), (x, weight)
    expected = torch.autograd.grad(fun(*args).sum(), x)

    with pytest.raises(TraceError, match=r"is a torch.qint8 tensor .*x.dequantize"):
        remat(fun)(*args)
    for engine in ("rerun", "auto"):
        region = remat(fun, engine=engine)
        assert_bitwise(torch.autograd.grad(region(*args).sum(), x), expected)


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "auto", "rerun"])
@pytest.mark.filterwarnings("ignore:.*runs the function again in its backward")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_tensor_that_is_made_of_values(engine: Any) -> None:
    """torch cannot trace its backward; without a trace it has one."""
    places = torch.tensor([[0, 1, 2], [2, 0, 1]])

    def fun(values: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(places, values, (3, 3)).to_dense().sin()

    region, values = remat(fun, engine=engine), seeded(3).requires_grad_()
    if engine == "trace":
        with pytest.raises(TraceError, match=r'torch fails in it: .*engine="rerun"'):
            region(values)
    else:
        assert_bitwise(grads(region, [values]), grads(fun, [values]))


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["rerun", "auto"])
@pytest.mark.filterwarnings("ignore::remat.RematWarning")
def test_torchs_checkpoint_inside(engine: Any) -> None:
    """A trace refuses it where it reaches a parameter."""
    w, x = seeded(4, 4).requires_grad_(), seeded(2, 4)

    def fun(x: Tensor) -> Tensor:
        return checkpoint(lambda x: (x @ w).sin(), x, use_reentrant=False)

    with pytest.raises(TraceError, match=r'checkpoint.*engine="rerun"'):
        remat(fun)(x)
    found = torch.autograd.grad(remat(fun, engine=engine)(x).sum(), w)
    assert_bitwise(found, torch.autograd.grad(fun(x).sum(), w))


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


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_batched_gradients_of_autograd(engine: Any) -> None:
    """`is_grads_batched=True`, and what rests on it."""
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


def test_an_iterator_that_the_first_run_uses_up_is_refused():
    """The backward would get what comes after; without a gradient nothing runs again."""
    w = seeded(3, 3).requires_grad_()
    region = remat(lambda x, numbers: (x @ w * next(numbers)).sin(), engine="rerun")

    with pytest.raises(
        StaticArgumentError, match=r"list_iterator: is used up by .*tuple"
    ):
        region(w, iter([2.0, 3.0]))
    with torch.no_grad():
        assert_bitwise(region(w, iter([2.0, 3.0])), (w @ w * 2).sin())
