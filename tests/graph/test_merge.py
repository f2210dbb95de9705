"""Two programs in one: what both compute is computed once, and each hands out what it did."""

import operator
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from remat._graph.merging import merge
from remat._graph.meta import TensorMeta
from remat._graph.numbering import value_numbers
from remat._graph.values import Graph, Ref, Value
from remat._programs.program import Program
from remat._tracing.trace import record
from tests.support import assert_bitwise, seeded

pytestmark = pytest.mark.contract

SIZE = 4
META = TensorMeta.of(seeded(SIZE))


def traced(function: Callable[..., Sequence[Tensor]], num_inputs: int) -> Graph:
    """The program of a function of vectors."""
    return record(lambda tensors: function(*tensors), [META] * num_inputs)


def same_inputs(first: Graph, second: Graph) -> list[Ref | None]:
    """The second's inputs are the first's, as far as it has some, and then its own."""
    return [
        Ref(index) if index < first.num_inputs else None
        for index in range(second.num_inputs)
    ]


def merged(first: Graph, second: Graph, known: Graph | None = None) -> Graph:
    """Both, over the first's inputs and what the second has beyond."""
    return merge(first, second, same_inputs(first, second), known)


def repeated(times: int, last: object) -> Graph:
    """sin(%0) so many times, each read by an operator that nobody else runs."""
    values = [Value(None, meta=META)]
    outputs: list[Ref | None] = []
    for _ in range(times):
        values.append(Value(torch.ops.aten.sin.default, (Ref(0),), meta=META))
        values.append(Value(last, (Ref(len(values) - 1),), meta=META))  # type: ignore[arg-type]
        outputs.append(Ref(len(values) - 1))
    return Graph(tuple(values), 1, tuple(outputs))


def test_what_both_compute_is_computed_once() -> None:
    """And read by both, in the order of the second."""
    first = traced(lambda x: [x.sin().exp()], 1)
    second = traced(lambda x, t: [x.sin().cos() * t], 2)

    graph = merged(first, second)

    assert graph.num_inputs == 2
    assert graph.operators == ("aten.sin", "aten.cos", "aten.exp", "aten.mul")
    x, t = seeded(SIZE), seeded(SIZE, seed=1)
    assert_bitwise(Program(graph, "both")([x, t]), [x.sin().exp(), x.sin().cos() * t])


@pytest.mark.parametrize("times", [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_a_value_is_computed_as_often_as_by_the_one_who_does_so_more(
    times: tuple[int, int],
) -> None:
    """An inner region's recomputation must not be held from its forward on."""
    first = repeated(times[0], torch.ops.aten.exp.default)
    second = repeated(times[1], torch.ops.aten.cos.default)

    graph = merged(first, second)

    assert graph.operators.count("aten.sin") == max(times)
    assert len(graph.operators) == max(times) + sum(times)


def test_the_outputs_of_one_operator_are_taken_apart_where_it_runs() -> None:
    """Together they would all live until the last of them is read."""

    def parts(x: Tensor) -> list[Tensor]:
        spread, mean = torch.var_mean(x, 0)
        return [mean.exp() + x, spread * x.sin().cos()]

    second = traced(lambda x, t: [(x.exp() * t).sin(), x.sin().cos() * t], 2)

    values = merged(traced(parts, 1), second).values

    maker = next(k for k, value in enumerate(values) if isinstance(value.meta, tuple))
    found = [k for k, value in enumerate(values) if value.op is operator.getitem]
    assert found == [maker + 1, maker + 2]


def test_what_an_input_is_known_to_be_is_read() -> None:
    """With all that led to it."""
    first = traced(lambda saved, x: [saved.exp()], 2)
    known = traced(lambda saved, x: [x.cos().sin()], 2)
    second = traced(lambda x, t: [x.cos().sin() * t], 2)

    with_known = merge(first, second, [Ref(1), None], known)
    without = merge(first, second, [Ref(1), None])

    assert with_known.operators == ("aten.mul", "aten.exp")
    assert without.operators == ("aten.cos", "aten.sin", "aten.mul", "aten.exp")


def test_what_is_not_known_is_computed() -> None:
    """None in the place of a value that comes back rounded."""
    first = traced(lambda saved, x: [saved.exp()], 2)
    known = Graph(traced(lambda saved, x: [x.sin()], 2).values, 2, (None,))
    second = traced(lambda x, t: [x.sin() * t], 2)

    graph = merge(first, second, [Ref(1), None], known)

    assert graph.operators == ("aten.sin", "aten.mul", "aten.exp")


def test_no_tensor_is_handed_out_twice() -> None:
    """Who changes one of the outputs in place must not change another."""
    first = traced(lambda x: [x.sin()], 1)
    second = traced(lambda x, t: [x.sin(), x.sin().view(2, 2), t * x.sin()], 2)

    graph = merged(first, second)

    found = Program(graph, "both")([seeded(SIZE), seeded(SIZE)])
    assert found[0].data_ptr() not in {each.data_ptr() for each in found[1:]}


def test_draws_come_first_and_in_their_order() -> None:
    """A generator must end where it would, and give each draw its numbers."""
    first = traced(lambda x: [torch.bernoulli(x.sigmoid()), torch.rand_like(x)], 1)
    second = traced(lambda x, t: [x.sigmoid() * t], 2)

    graph = merged(first, second)

    own, rest = len(first.operators), len(second.operators)
    assert graph.operators[:own] == first.operators
    assert graph.operators[own:] == second.operators
    assert len(graph.operators) == own + rest


def test_what_the_first_alone_computes_waits_for_its_reader() -> None:
    """Nothing is held while the second runs that it does not need."""
    first = traced(lambda x: [x.exp() * x.sin()], 1)
    second = traced(lambda x, t: [(x.sin() * t).cos().tanh()], 2)

    graph = merged(first, second)

    assert graph.operators == (
        *("aten.sin", "aten.mul", "aten.exp", "aten.mul"),
        *("aten.cos", "aten.tanh"),
    )


@pytest.mark.parametrize("seed", range(30))
def test_each_hands_out_what_it_did(seed: int) -> None:
    """Random programs with parts in common, some of them computed twice."""
    first, second = random_graph(seed, 2), random_graph(seed + 100, 3)
    tensors = [seeded(SIZE, seed=k) for k in range(3)]

    graph = merged(first, second)

    assert_bitwise(
        Program(graph, "both")(tensors),
        [*Program(first, "first")(tensors[:2]), *Program(second, "second")(tensors)],
    )
    apart = len(first.operators) + len(second.operators)
    numbers = set(value_numbers(first)) & set(value_numbers(second))
    assert len(graph.operators) <= apart
    assert len(graph.operators) < apart or len(numbers) <= first.num_inputs


def random_graph(seed: int, num_inputs: int) -> Graph:
    """Sums and products of a few values, the first of which recur between seeds."""
    choice = random.Random(seed)
    unary = [torch.ops.aten.sin.default, torch.ops.aten.tanh.default]
    binary = [torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor]
    values = [Value(None, meta=META) for _ in range(num_inputs)]
    for _ in range(12):
        if choice.random() < 0.5:
            op, args = choice.choice(unary), (Ref(choice.randrange(len(values))),)
        else:
            op = choice.choice(binary)
            args = tuple(Ref(choice.randrange(len(values))) for _ in range(2))
        values.append(Value(op, args, meta=META))
    outputs = [Ref(choice.randrange(num_inputs, len(values))) for _ in range(2)]
    return Graph(tuple(values), num_inputs, tuple(outputs))
