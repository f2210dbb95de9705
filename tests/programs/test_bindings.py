"""Programs run through bindings: exactly the operators that they print, and cheaper."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from remat import remat
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph, Ref, Value
from remat._programs.bindings import bindings_of
from remat._programs.program import Program
from tests.functions import FUNCTIONS
from tests.support import Heard, is_differentiable

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
]

ATEN = torch.ops.aten


def wanting(tensor):
    """The tensor, to be differentiated if it can be."""
    return tensor.requires_grad_() if is_differentiable(tensor) else tensor


def run(program):
    """The operators that a program runs on numbers of the shapes that it knows."""
    metas = [value.meta for value in program.graph.values[: program.graph.num_inputs]]
    inputs = [
        torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype).fill_(1)
        for meta in metas
    ]
    with Heard() as heard:
        program(inputs)
    return heard.names


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_a_program_runs_what_it_prints(function):
    """Whatever is bound, the operators that arrive are those of the graph."""
    args = tree_map_only(Tensor, wanting, function.make_args())
    region: Any = remat(function.fun, rng="preserve")

    forward = region.programs(*args)[0]

    expected = [name.replace("_unsafe_view", "view") for name in forward.operators]
    assert run(forward) == expected


META = TensorMeta((2, 3), (3, 1), torch.float32, torch.device("cpu"))


def graph_of(op, *args, outputs=(1,), **kwargs):
    """A graph of one operator over one matrix."""
    step = Value(op, args=args, kwargs=tuple(kwargs.items()), meta=META)
    return Graph((Value(None, meta=META), step), 1, tuple(map(Ref, outputs)))


def test_a_binding_is_taken_where_it_runs_the_same_operator():
    """`torch.sin` is `aten.sin`, and `torch.add` of two tensors `aten.add.Tensor`."""
    assert bindings_of(graph_of(ATEN.sin.default, Ref(0))) == {1: torch.sin}
    assert bindings_of(graph_of(ATEN.add.Tensor, Ref(0), Ref(0))) == {1: torch.add}


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(graph_of(ATEN.add.Scalar, Ref(0), 2), id="another overload"),
        pytest.param(graph_of(ATEN.sym_size.int, Ref(0), 0), id="no binding"),
        pytest.param(graph_of(ATEN.rand.default, [2]), id="reads no tensor"),
    ],
)
def test_no_binding_is_taken_that_would_run_another(graph):
    """`torch.add(x, 2)` is another overload than `aten.add.Scalar`, and so is refused."""
    assert bindings_of(graph) == {}


def test_an_operator_without_a_binding_runs_by_its_overload():
    """What has no binding is called as `torch.ops` has it."""
    x = torch.ones(2, 3)

    (found,) = Program(graph_of(ATEN.add.Scalar, Ref(0), 2), "program")([x])

    assert torch.equal(found, x + 2)


def test_a_rehearsal_is_not_heard_outside():
    """A mode of the caller's hears the run, not the rehearsal before it."""
    program = Program(graph_of(ATEN.sin.default, Ref(0)), "program")
    x = torch.ones(2, 3)
    with Heard() as heard:
        program([x])

    assert heard.names == ["aten.sin"]


@pytest.mark.parametrize(
    ("outputs", "shares"),
    [((1,), True), ((0,), False)],
    ids=["a view of an input", "an input"],
)
def test_what_shares_memory_shares_its_version_counter(outputs, shares):
    """An in-place change of a view must be seen by whoever saved what it views."""
    x = torch.ones(2, 3)
    program = Program(graph_of(ATEN.view.default, Ref(0), [2, 3], outputs=outputs), "p")

    (found,) = program([x])
    found.add_(1)

    assert x._version == 1
    assert found._is_view() is shares
