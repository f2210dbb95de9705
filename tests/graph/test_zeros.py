"""Zeros that forward mode made: no sum reads them, and what a user asked for is still read."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jacfwd, jvp

from remat import policies, remat
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph, Ref, Value, prune
from remat._graph.zeros import without_zeros
from remat._programs.program import Program
from remat._torch import fakes
from remat._tracing.trace import record
from tests.support import (
    assert_bitwise,
    assert_close,
    daily,
    in_turn,
    seeded,
    swept,
    tensors_in,
)

pytestmark = [
    pytest.mark.contract,
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

aten = torch.ops.aten
SIZE = 4
META = TensorMeta.of(seeded(SIZE, SIZE))
POINT = TensorMeta.of(seeded())
WIDE = TensorMeta.of(torch.zeros((), dtype=torch.float64).expand(SIZE, SIZE))
#: %0 and %1 are given; %2 is the zero, %3 has it in each place of a matrix.
X, Y, POINT_ZERO, ZERO = map(Ref, range(4))
START = (
    Value(None, meta=META),
    Value(None, meta=META),
    Value(aten.zeros.default, ([],), (("dtype", torch.float64),), meta=POINT),
    Value(aten.expand.default, (POINT_ZERO, [SIZE, SIZE]), meta=WIDE),
)


def step(op: Any, *args: Any, meta: TensorMeta = META, **fields: Any) -> Value:
    """One step of a graph; its result is a square matrix unless `meta` says otherwise."""
    return Value(op, args, meta=meta, **fields)


def after(*steps: Value, outputs: Sequence[int] | None = None) -> Graph:
    """What the pass leaves of these steps; the last one is returned, or those named."""
    values = (*START, *steps)
    returned = [Ref(k) for k in outputs or [len(values) - 1]]
    return prune(Graph(without_zeros(values, returned), 2, tuple(returned)))


def operators_after(*steps: Value, outputs: Sequence[int] | None = None) -> list[str]:
    """The operators that run."""
    return list(after(*steps, outputs=outputs).operators)


SUMS = {
    "a sum with a zero": step(aten.add.Tensor, X, ZERO),
    "a zero and a summand": step(aten.add.Tensor, ZERO, X),
    "a sum with a scaled zero": step(aten.add.Tensor, X, ZERO, kwargs=(("alpha", 2),)),
    "a sum with one number": step(aten.add.Tensor, X, POINT_ZERO),
    "a difference": step(aten.sub.Tensor, X, ZERO),
}


@pytest.mark.parametrize("added", SUMS.values(), ids=SUMS)
def test_what_a_zero_is_added_to_is_the_sum(added: Value) -> None:
    """Its readers read the summand."""
    assert operators_after(added, step(aten.sin.default, Ref(4))) == ["aten.sin"]


#: The other arguments of a convolution.
CONVOLUTION = ([1], [0], [1], False, [0], 1)
MADE_OF_ZEROS = {
    "product": [step(aten.mm.default, X, ZERO)],
    "product, zero first": [step(aten.mm.default, ZERO, X)],
    "elementwise product": [step(aten.mul.Tensor, X, ZERO)],
    "convolution": [step(aten.convolution.default, X, ZERO, None, *CONVOLUTION)],
    "convolution of it": [step(aten.convolution.default, ZERO, X, None, *CONVOLUTION)],
    "view": [step(aten.t.default, ZERO)],
    "negative": [step(aten.neg.default, ZERO)],
    "quotient": [step(aten.div.Tensor, ZERO, X)],
    "sum of two": [step(aten.add.Tensor, ZERO, ZERO)],
    "chain": [
        step(aten.mm.default, ZERO, X),
        step(aten.t.default, Ref(4)),
        step(aten.mul.Tensor, Y, Ref(5)),
    ],
}


@pytest.mark.parametrize("steps", MADE_OF_ZEROS.values(), ids=MADE_OF_ZEROS)
def test_what_is_made_of_a_zero_is_one(steps: list[Value]) -> None:
    """Nothing computes it, where it is only added."""
    made = Ref(3 + len(steps))
    added = step(aten.add.Tensor, X, made)

    found = operators_after(*steps, added, step(aten.sin.default, Ref(made.index + 1)))

    assert found == ["aten.sin"]


READ = {
    "quotient by it": step(aten.div.Tensor, X, ZERO),
    "difference from it": step(aten.sub.Tensor, ZERO, X),
    "its exponential": step(aten.exp.default, ZERO),
    "convolution with a bias": step(
        aten.convolution.default, ZERO, X, POINT_ZERO, *CONVOLUTION
    ),
    "scaled summand": step(aten.add.Tensor, ZERO, X, kwargs=(("alpha", 2),)),
}


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_other_results_of_a_zero_are_computed(read: Value) -> None:
    """They are not zero, and not the other operand."""
    found = operators_after(
        read, step(aten.add.Tensor, Y, Ref(4)), step(aten.sin.default, Ref(5))
    )

    op: Any = read.op
    assert found[-3:] == [str(op.overloadpacket), "aten.add", "aten.sin"]


def test_a_sum_of_another_layout_is_computed() -> None:
    """Who reads it is told another dtype, other strides or another shape."""
    for meta in (
        TensorMeta.of(seeded(SIZE, SIZE).float()),
        TensorMeta.of(seeded(SIZE, SIZE).t()),
        TensorMeta.of(seeded(2, SIZE, SIZE)),
    ):
        added = step(aten.add.Tensor, X, ZERO, meta=meta)

        assert "aten.add" in operators_after(added, step(aten.sin.default, Ref(4)))


def test_a_returned_sum_is_a_tensor_of_its_own() -> None:
    """Who changes one output in place must not change an operand, or another output."""
    graph = after(
        step(aten.sin.default, X), step(aten.add.Tensor, Ref(4), ZERO), outputs=[4, 5]
    )

    assert graph.operators == ("aten.sin", "aten.clone")
    x = seeded(SIZE, SIZE)
    found = Program(graph, "both")([x, x.cos()])
    assert_bitwise(found, [x.sin(), x.sin()])
    assert found[0].data_ptr() != found[1].data_ptr()


def test_a_named_sum_keeps_its_name() -> None:
    """A policy may ask for it, and for what it was made of."""
    summand = step(aten.sin.default, X, names=("summand",))
    named = step(aten.add.Tensor, Ref(4), ZERO, names=("sum",))

    graph = after(summand, named, step(aten.exp.default, Ref(5)))

    assert graph.operators == ("aten.sin", "aten.clone", "aten.exp")
    assert [each.names for each in graph.values[-3:]] == [("summand",), ("sum",), ()]


def test_a_sum_of_sums_reads_the_first_summand() -> None:
    """Through as many zeros as there are, on either side."""
    found = after(
        step(aten.add.Tensor, X, ZERO),
        step(aten.add.Tensor, ZERO, Ref(4)),
        step(aten.mul.Tensor, Ref(5), Ref(4)),
    )

    assert found.operators == ("aten.mul",)
    assert found.values[-1].args == (X, X)


@pytest.mark.parametrize("function", ["torch.zeros", "torch.Tensor.new_zeros"])
def test_a_users_zeros_are_read(function: str) -> None:
    """The torch function that made them is known."""
    values = [*START, step(aten.add.Tensor, X, ZERO)]
    values[2] = dataclasses.replace(values[2], function=function)

    assert without_zeros(values, [Ref(4)]) == tuple(values)


#: A weight, and a batch with an infinity.
WEIGHT = seeded(SIZE, SIZE)
BATCH = seeded(SIZE, SIZE, seed=1).clone()
BATCH[0, 0] = float("inf")
USERS: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: torch.zeros((), dtype=torch.float64),
    "zeros_like": lambda: torch.zeros_like(WEIGHT.sum()),
    "new_zeros": lambda: WEIGHT.new_zeros(()),
    "filled": lambda: torch.empty((), dtype=torch.float64).zero_(),
}
Operands = tuple[Tensor, ...]
#: Regions are traced where reverse mode is one of the transforms.
NESTS: dict[str, Callable[[Callable[..., Any], Operands], Any]] = {
    "jvp": lambda f, args: pushed(f)(*args),
    "jvp(grad)": lambda f, args: pushed(gradients(f, len(args)))(*args),
    "grad(jvp)": lambda f, args: gradients(pushed(f), len(args))(*args),
    "grad(jvp(jvp))": lambda f, args: gradients(pushed(pushed(f)), len(args))(*args),
    "jacfwd(grad)": lambda f, args: jacfwd(
        gradients(f, len(args)), tuple(range(len(args)))
    )(*args),
}
POLICIES = {
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
}


def pushed(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function and its derivative along the cosines of its operands."""
    return lambda *args: jvp(f, args, tuple(each.detach().cos() for each in args))


def gradients(f: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The gradients of a smooth number made of all that a function returns."""

    def number(*args: Tensor) -> Tensor:
        return torch.stack([each.sin().sum() for each in tensors_in(f(*args))]).sum()

    return grad(number, tuple(range(count)))


@pytest.mark.parametrize(("nest", "user"), in_turn(NESTS, USERS))
def test_a_users_zero_times_infinity_is_not_a_number(user: str, nest: str) -> None:
    """In the value and in its tangent, as it is in plain torch."""

    def f(w: Tensor) -> Tensor:
        zeros = USERS[user]().expand(SIZE, SIZE)
        return w.sin() + BATCH @ (zeros * w.sin()) + w * (BATCH @ zeros)

    found, expected = (NESTS[nest](each, (WEIGHT,)) for each in (remat(f), f))

    assert_close(found, expected)
    assert all(each.isnan().any() for each in tensors_in(found))


def convolved(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """A small image through two channels."""
    return F.conv2d(x.view(1, 1, SIZE, SIZE), kernel, bias, padding=1)


ROW = seeded(SIZE, seed=2)
STACK = seeded(2, SIZE, SIZE, seed=3)
OPERATORS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "matmul": (torch.matmul, (WEIGHT, WEIGHT.sin())),
    "bmm": (torch.bmm, (STACK, STACK.sin())),
    "mv": (torch.mv, (WEIGHT, ROW)),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->ik", x, y), (STACK, STACK.sin())),
    "addmm": (
        lambda b, x, y: torch.addmm(b, x, y, alpha=2, beta=0.5),
        (ROW, WEIGHT, WEIGHT.sin()),
    ),
    "linear": (F.linear, (WEIGHT, WEIGHT.sin(), ROW)),
    "conv": (convolved, (WEIGHT, seeded(2, 1, 3, 3), seeded(2))),
    "layer_norm": (
        lambda x, scale, bias: F.layer_norm(x, (SIZE,), scale, bias),
        (WEIGHT, ROW, ROW.sin()),
    ),
}


@pytest.mark.parametrize("policy", ["everything", *swept(["nothing"])])
@pytest.mark.parametrize("nest", daily({each: each for each in NESTS}, ["jvp(grad)"]))
@pytest.mark.parametrize("name", OPERATORS)
def test_numbers_are_plains_whichever_operands_have_tangents(
    name: str, nest: str, policy: str
) -> None:
    """Each alone, and all together."""
    f, args = OPERATORS[name]
    region = remat(f, policy=POLICIES[policy])

    for places in (*((k,) for k in range(len(args))), tuple(range(len(args)))):
        given = tuple(args[k] for k in places)

        def run(f: Callable[..., Any], places: Any = places, given: Any = given) -> Any:
            def of_some(*some: Tensor) -> Any:
                at = dict(zip(places, some, strict=True))
                return f(*(at.get(k, each) for k, each in enumerate(args)))

            return NESTS[nest](of_some, given)

        assert_close(run(region), run(f))


def test_no_trace_depends_on_what_torch_remembers_of_views() -> None:
    """Of zeros without memory a view is such zeros, also where a like view of numbers came before."""
    x, w = seeded(3, 3, 4), seeded(1, 4, 4)

    def by_view(x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x, w.expand(3, 1, 4, 4).view(3, 4, 4))

    def by_zeros(x: Tensor) -> Tensor:
        return by_view(x, torch.ops.aten._efficientzerotensor(w.shape, dtype=w.dtype))

    def recorded(f: Callable[..., Tensor], *operands: Tensor) -> tuple[str, ...]:
        made = [TensorMeta.of_whole(each, requires_grad=False) for each in operands]
        return record(lambda given: [f(*given)], made).operators

    fakes.forget_operators()
    first = recorded(by_zeros, x)
    fakes.forget_operators()
    recorded(by_view, x, w)

    assert recorded(by_zeros, x) == first
