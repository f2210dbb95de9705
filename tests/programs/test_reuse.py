"""Pointwise operators write over what they are the last to read: fewer bytes, the same bits."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from remat import policies, remat
from remat._graph.values import Graph, Ref, Value
from remat._programs import interpreted, overwriting
from remat._programs.bindings import bindings_of
from remat._programs.overwriting import with_overwriting
from remat._torch import schemas, tensors, trees
from tests.benchmarks.memory import allocated
from tests.functions import FUNCTIONS
from tests.inspection import inputs_of, programs
from tests.support import (
    Heard,
    assert_bitwise,
    assert_close,
    grads,
    in_turn,
    is_differentiable,
    seeded,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of any size are written over, and no program is interpreted."""
    monkeypatch.setattr(overwriting, "_FEWEST_BYTES", 0)
    monkeypatch.setattr(interpreted, "_MOST_BYTES", -1)


def written(program: Any) -> list[str]:
    """The operators of a program that write over an argument, in order."""
    graph = program.graph
    return [
        str(new.op)
        for old, new in zip(graph.values, with_overwriting(graph).values, strict=True)
        if new is not old
    ]


# Operators: both forms are one kernel.


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)


# What operators raise that do not take a dtype, or other arguments.
NOT_FOR_THESE = (RuntimeError, NotImplementedError, TypeError, ValueError)


def pointwise() -> Iterator[Any]:
    """The operators of torch that are tagged so."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):  # pyright: ignore[reportPrivateUsage]
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space != "aten":
            continue
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if torch.Tag.pointwise in op.tags:
            yield op


STRUCTURED = [op for op in pointwise() if schemas.out_variant(op)]


def given_to(op: Any, dtype: torch.dtype) -> list[Any]:
    """Arguments for an operator: numbers below one, and halves where numbers are no tensors."""
    found: list[Any] = []
    for index, argument in enumerate(op._schema.arguments):
        if "Tensor" in str(argument.type):
            found.append(seeded(37, 19, seed=index).sigmoid().to(dtype).t())
        elif argument.has_default_value():
            found.append(argument.default_value)
        else:
            found.append(0.5 if str(argument.type) in ("number", "float") else 1)
    return found


def takes(op: Any, dtype: torch.dtype) -> bool:
    """Whether an operator takes these arguments."""
    try:
        op(*given_to(op, dtype))
    except NOT_FOR_THESE:
        return False
    return True


@pytest.mark.parametrize("op", STRUCTURED, ids=str)
def test_an_operator_may_write_over_each_argument(op: Any) -> None:
    """What it writes is to the bit what it returns, in each dtype that it takes."""
    variant = schemas.out_variant(op)
    assert variant is not None
    for dtype in (each for each in DTYPES if takes(op, each)):
        expected = op(*given_to(op, dtype))
        for index, argument in enumerate(given_to(op, dtype)):
            args = given_to(op, dtype)
            same = isinstance(argument, Tensor) and expected.dtype is argument.dtype
            if same and expected.stride() == argument.stride():
                variant[0](*args, **{variant[1]: args[index]})
                assert torch.equal(args[index].isnan(), expected.isnan())
                assert_bitwise(args[index].nan_to_num(), expected.nan_to_num())


def test_the_operators_of_networks_have_a_form_that_writes() -> None:
    """Not one of few: a rule that finds nothing would pass the test above."""
    found = set(map(str, STRUCTURED))

    assert {"aten.add.Tensor", "aten.gelu_backward.default"} <= found
    assert {"aten.silu.default", "aten.tanh_backward.default"} <= found


def test_pointwise_operators_make_memory_of_their_own() -> None:
    """What they return may be written over without changing what they were given."""
    count = 0
    for op, dtype in itertools.product(pointwise(), DTYPES):
        made = Value(op, args=(Ref(0),))
        if not overwriting._is_alone(made, Graph((Value(None), made), 1, (Ref(1),))):
            continue
        given = given_to(op, dtype)
        try:
            found = op(*given)
        except NOT_FOR_THESE:
            continue
        if isinstance(found, Tensor):
            own = tensors.storage_key(found)
            read = [tensors.storage_key(each) for each in trees.tensor_leaves(given)]
            assert own not in read, op
            count += 1
    assert count > 300


# Programs: what may be written over.


def chained(x: Tensor) -> Tensor:
    return x.sin().cos().tanh()


def seen_by_view(x: Tensor) -> Tensor:
    """A transposition of what would be written over is read in the same step."""
    y = x @ x
    return (y + y.t()).exp()


def read_later(x: Tensor) -> Tensor:
    """A row of what would be written over is read later, and another one returned."""
    y = x.sin()
    row = y[1]
    return (y.cos() + 1.0) * row


def widened(x: Tensor) -> Tensor:
    """The result is larger, or of another dtype."""
    y = x.sin()[:1] * x.cos()
    return (y > 0.0) * y.double().exp()


def returned(x: Tensor) -> tuple[Tensor, ...]:
    """What would be written over is an output, or a view of one."""
    y = x.sin()
    z = x.cos()
    return y.t(), y.exp(), z[0], (z + 1.0).exp()


def in_parts(x: Tensor) -> Tensor:
    """Parts of one tensor, each of which has an own part of the memory."""
    first, second = (x @ x).chunk(2)
    return torch.cat([second.exp(), first.sin(), first + second])


@torch.library.custom_op("remat_tests::reads_on", mutates_args=())
def reads_on(x: Tensor) -> Tensor:
    """An operator of a user's own; a collective reads on until somebody waits for it."""
    return x.clone()


reads_on.register_fake(torch.empty_like)
reads_on.register_autograd(lambda ctx, g: g)


def read_by_others(x: Tensor) -> Tensor:
    y = x.sin()
    return reads_on(y) + y.cos().exp()


def twice(x: Tensor) -> Tensor:
    y = x.exp()
    return (y * y).sin() + F.gelu(y @ y)


def of_weights(x: Tensor) -> Tensor:
    h = F.layer_norm(x, (8,))
    return x + F.silu(h @ x) * F.linear(h, x).softmax(-1)


def of_images(x: Tensor) -> Tensor:
    h = F.conv2d(x.view(1, 2, 4, 8), x[:, :2].reshape(4, 2, 2, 1))
    return F.gelu(F.group_norm(h, 2).transpose(1, 3)) * h.transpose(1, 3)


def masked(x: Tensor) -> Tensor:
    y = (x * 2).masked_fill(x > 0.5, -1.0).clamp(-0.5, 0.5)
    return torch.where(y > 0, y.exp(), y.neg())


def expanded(x: Tensor) -> Tensor:
    y = x.sum(0).sin().expand(8, 8)
    return (y + 1.0).exp() + y.t().cos()


WORKS = (
    *(chained, seen_by_view, read_later, widened, returned, in_parts),
    *(twice, of_weights, of_images, masked, expanded),
)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize(
    ("fun", "policy"),
    in_turn(WORKS, [policies.nothing_saveable, policies.save_matmul_outputs]),
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_results_and_gradients_keep_their_bits(
    fun: Callable[[Tensor], Any], policy: Any
) -> None:
    """In both layouts, the input too; programs mapped by vmap keep them to rounding."""
    for x in (seeded(8, 8), seeded(8, 8).t()):
        before = x.clone()
        region = remat(fun, policy=policy)

        assert_bitwise(grads(region, [x]), grads(fun, [x]))
        assert_close(of_each(region, x), of_each(fun, x))
        assert_bitwise(x, before)


def of_each(fun: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The gradients of the outputs' sum, at two points at once."""

    def total(x: Tensor) -> Tensor:
        outputs = fun(x)
        given = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.cat([each.flatten() for each in given]).sum()

    return torch.func.vmap(torch.func.grad(total))(torch.stack([x, x.cos()]))


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize(
    ("fun", "forward"),
    [
        (chained, ["aten.cos.out", "aten.tanh.out"]),
        (seen_by_view, ["aten.exp.out"]),
        (read_later, ["aten.add.out", "aten.mul.out"]),
        (returned, ["aten.exp.out"]),
        (read_by_others, ["aten.exp.out", "aten.add.out"]),
        (in_parts, []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_forward_writes_over(
    fun: Callable[[Tensor], Any], forward: list[str]
) -> None:
    """All that is dead, whole and of the result's layout, and nothing else."""
    assert written(programs(fun, seeded(8, 8))[0]) == forward


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_programs_keep_their_bits(function: Any) -> None:
    """On the inputs of every function of `tests.functions`, which are not written to."""
    args = tree_map_only(
        Tensor,
        lambda t: t.detach().clone().requires_grad_(is_differentiable(t)),
        function.make_args(),
    )
    for program in programs(function.fun, *args):
        inputs = inputs_of(program)
        before = [each.clone() for each in inputs]

        found, plain = program._short([*inputs]), program._run([*inputs])

        assert all(map(tensors.same_bits, found, plain))
        assert all(map(tensors.same_bits, inputs, before))


def test_a_second_backward_reads_what_the_first_did() -> None:
    """Saved values and cotangents are inputs: none is written over."""
    x = seeded(128, 128).requires_grad_()
    y = remat(twice, policy=policies.everything_saveable)(x)
    cotangent = seeded(128, 128, seed=1)
    before = cotangent.clone()

    first = torch.autograd.grad(y, x, cotangent, retain_graph=True)

    assert_bitwise(torch.autograd.grad(y, x, cotangent), first)
    assert_bitwise(cotangent, before)


# Bytes.


def test_a_chain_takes_the_memory_of_one_value() -> None:
    """A forward of nothing but pointwise operators, and its backward."""
    x = seeded(256, 256).requires_grad_()
    size = x.numel() * x.itemsize
    region = remat(chained)
    region(x).sum().backward()

    assert allocated(lambda: region(x)).peak == size
    assert allocated(lambda: chained(x.detach())).peak == 2 * size


def test_the_backward_of_an_mlp_holds_one_hidden_state_less() -> None:
    """GELU's derivative is written over the cotangent of its result."""
    up, down = seeded(64, 256).requires_grad_(), seeded(256, 64).requires_grad_()
    x = seeded(512, 64).requires_grad_()
    hidden = 512 * 256 * x.itemsize
    gradients = sum(each.numel() * each.itemsize for each in (x, up, down))

    def peak(fun: Callable[..., Tensor]) -> int:
        y = fun(x, up, down)
        cotangent = torch.ones_like(y)
        step = lambda: torch.autograd.grad(  # noqa: E731
            y, (x, up, down), cotangent, retain_graph=True
        )
        step()
        return allocated(step).peak

    everything = remat(mlp, policy=policies.everything_saveable)
    assert peak(mlp) == 2 * hidden + down.numel() * down.itemsize
    assert peak(everything) == hidden + gradients


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up) @ down


# Who sees it.


def test_a_dispatch_mode_sees_the_operators_as_written() -> None:
    """Where a mode listens, nothing is written over."""
    x = seeded(128, 128)
    with Heard() as heard, torch.no_grad():
        remat(chained)(x)

    assert heard.names == ["aten.sin", "aten.cos", "aten.tanh"]


class Own(Tensor):
    """A user's subclass."""


def test_a_subclass_is_not_written_over() -> None:
    """What its operators return may have no memory of its own: each makes a new tensor."""
    x = seeded(256, 256)
    size = x.numel() * x.itemsize
    program = programs(chained, x)[0]

    for given, peak in ((x, size), (x.as_subclass(Own), 2 * size)):
        program._short([given])
        assert allocated(lambda given=given: program._short([given])).peak == peak


def test_small_tensors_are_left_alone() -> None:
    """Their memory costs nothing; the calls would."""
    assert written(programs(chained, seeded(64, 64))[0]) == []
    assert written(programs(chained, seeded(128, 128))[0]) != []


@pytest.mark.usefixtures("any_size")
def test_what_is_written_over_is_bound_too() -> None:
    """The call is the same function in C, with one more argument."""
    graph = with_overwriting(programs(chained, seeded(8, 8))[0].graph)

    assert list(bindings_of(graph).values()) == [torch.sin, torch.cos, torch.tanh]
