"""Composites: fewer calls, the same product of the same matrices, to the bit."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from remat import remat
from remat._graph.operators import short_name
from remat._programs.bindings import bindings_of, fold_products
from remat._torch.tensors import same_bits
from tests.functions import FUNCTIONS
from tests.inspection import inputs_of, programs
from tests.support import Heard, is_differentiable

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
]


def rand(*shape):
    """Numbers of a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(shape, generator=generator, device="cpu") - 0.5
    return drawn.to(torch.get_default_device())


def calls(graph):
    """The names of what a graph calls, in order."""
    return [short_name(value.op) for value in graph.values if value.op is not None]


STACKS = {
    "three dimensions": (lambda x, w: x @ w, (2, 3, 4), (4, 5)),
    "four dimensions": (lambda x, w: x @ w, (2, 2, 3, 4), (4, 5)),
    "a transposed weight": (F.linear, (2, 3, 4), (5, 4)),
    "a stack of one": (lambda x, w: x @ w, (1, 3, 4), (4, 5)),
    "nothing in it": (lambda x, w: x @ w, (0, 3, 4), (4, 5)),
}


@pytest.mark.parametrize(("fun", *"xw"), STACKS.values(), ids=STACKS)
def test_a_stack_times_a_matrix_is_one_call(fun, x, w):
    """View, mm and view become `matmul`; the bits and the strides stay."""
    (forward, backward) = programs(fun, rand(*x), rand(*w))

    folded = calls(fold_products(forward.graph))
    assert "aten.matmul" in folded
    assert len(folded) == len(forward.operators) - 2
    for program in (forward, backward):
        inputs = inputs_of(program)
        found, plain = program._short([*inputs]), program._run([*inputs])
        assert all(map(same_bits, found, plain))
        assert [each.stride() for each in found] == [each.stride() for each in plain]


def results(function, region):
    """The outputs of a region and the gradients of their sum, from fixed numbers."""
    args = tree_map_only(
        torch.Tensor,
        lambda t: t.detach().clone().requires_grad_(is_differentiable(t)),
        function.make_args(),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = [
            each for each in tree_leaves(region(*args)) if is_differentiable(each)
        ]
        torch.stack([each.abs().sum() for each in outputs]).sum().backward()
    leaves = [each for each in tree_leaves(args) if is_differentiable(each)]
    return outputs, [each.grad for each in leaves if each.grad is not None]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_the_short_program_gives_the_same_bits(function):
    """Outputs and gradients are those of the single operators that a listener hears."""
    region = remat(function.fun, rng="preserve")
    short = results(function, region)
    with Heard():
        single = results(function, region)

    for found, expected in zip(short, single, strict=True):
        assert [each.stride() for each in found] == [each.stride() for each in expected]
        assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("shape", [(4, 6), (24,), (6, 4)])
def test_a_view_into_other_shapes_stays(shape):
    """`matmul` would not multiply the same matrices."""
    fun = lambda x, w: (x.view(2, 12) @ w).view(2, 1, 5)  # noqa: E731
    (forward, _) = programs(fun, rand(*shape), rand(12, 5))

    assert calls(fold_products(forward.graph)) == calls(forward.graph)


def test_what_somebody_else_reads_stays():
    """A product that is itself an output is multiplied once, as it stands."""

    def both(x, w):
        flat = x.view(6, 4) @ w
        return flat, flat.view(2, 3, 5).sin()

    graph = programs(both, rand(2, 3, 4), rand(4, 5))[0].graph

    assert calls(fold_products(graph)).count("aten.mm") == 1
    assert "aten.matmul" not in calls(fold_products(graph))


def test_what_others_read_flat_is_multiplied_flat():
    """The backward reads x flat for the weight's gradient: two calls, not another view."""

    def twice(x, w, v):
        flat = x.view(6, 4)
        return (flat @ w).view(2, 3, 5).sin(), flat.t() @ v

    graph = programs(twice, rand(2, 3, 4), rand(4, 5), rand(6, 2))[0].graph

    found = calls(fold_products(graph))
    assert found == calls(graph)
    assert found.count("aten.view") == 2


def test_who_listens_hears_single_operators():
    """A dispatch mode, such as a counter of FLOPs, hears what the program prints."""
    program = programs(lambda x, w: x @ w, rand(2, 3, 4), rand(4, 5))[0]
    with Heard() as heard:
        program([rand(2, 3, 4), rand(4, 5)])

    assert "aten.mm" in heard.names
    assert "aten.matmul" not in heard.names


def test_such_a_call_is_bound_too():
    """It is `torch.matmul` itself: an overload would parse its arguments by the schema."""
    graph = fold_products(
        programs(lambda x, w: x @ w, rand(2, 3, 4), rand(4, 5))[0].graph
    )

    assert list(bindings_of(graph).values()) == [torch.matmul]
