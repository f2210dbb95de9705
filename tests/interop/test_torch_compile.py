"""`interop.torch` under torch.compile, as torch's test_activation_checkpointing.py asks."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from remat.interop.torch import (
    checkpoint,
    checkpoint_wrapper,
    create_selective_checkpoint_contexts,
)
from tests.interop.layers import MM, nested, save_mm
from tests.support import assert_bitwise, graphs_of_torch_compile, run, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _afresh():
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("options", "num_mm"),
    [
        ({}, 3),
        ({"use_reentrant": True}, 3),
        ({"context_fn": functools.partial(create_selective_checkpoint_contexts, [MM])}, 2),
        ({"context_fn": functools.partial(create_selective_checkpoint_contexts, save_mm)}, 2),
    ],
    ids=["plain", "reentrant", "list", "policy"],
)  # fmt: skip
def test_a_graph_of_torch_compile_holds_a_call(options, num_mm):
    """test_tags_function, ..._via_global_checkpoint, ..._with_kwargs, and selectively.

    As it holds torch's own; the function is handed over inside of what is compiled.
    """
    backend, graphs = graphs_of_torch_compile()

    def loss(x, y):
        return checkpoint(lambda x: (x @ y).sin().exp(), x, **options).sum()

    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    args = [seeded(4, 4), seeded(4, 4, seed=1)]

    assert_bitwise(run(compiled, args), run(loss, args))
    # Two of those in the backward are the derivative's own.
    assert [each["aten.mm.default"] for each in graphs] == [1, num_mm]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_what_runs_again_ends_a_graph():
    """It runs between two graphs."""

    def loss(x):
        return checkpoint(torch.sin, x.exp(), use_reentrant=False, engine="rerun").sum()

    compiled = torch.compile(loss, backend="aot_eager")
    args = [seeded(4, 4)]

    assert_bitwise(run(compiled, args), run(loss, args))


def kept_and_counted(*ops):
    """Contexts that save what these operators make, and count the operators before."""
    seen: list[Any] = []

    def policy(ctx, op, *args, **kwargs):
        seen.append(op)
        return op in ops and seen.count(MM) != 2

    return create_selective_checkpoint_contexts(policy)


def chosen(*ops):
    return functools.partial(create_selective_checkpoint_contexts, [*ops])


ATEN = torch.ops.aten
SAVING = {
    "must_recompute": (lambda x, y: (x @ y @ y).sin().cos(), chosen(), 6),
    "must_not_recompute_gemm": (lambda x, y: (x @ y @ y).sigmoid() * y, chosen(MM), 4),
    "outplace_op": (lambda x, y: torch.selu(x @ y @ y).sigmoid().relu(), chosen(MM, ATEN.sigmoid.default), 4),
    "partial_ctx_fn": (lambda x, y: (x @ y @ y).sin(), functools.partial(kept_and_counted, MM), 5),
    "custom_rule": (lambda x, y: ((x @ y * y) @ y * y).sigmoid().sigmoid(), lambda: kept_and_counted(MM), 4),
    "list_ops": (lambda x, y: torch.cat([x, y]).sin(), chosen(), 0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.parametrize(
    ("function", "context_fn", "num_mm"), SAVING.values(), ids=SAVING
)
def test_selective(function, context_fn, num_mm):
    """test_compile_selective_checkpoint_*, by the products of the backward: two for each, and more."""
    backend, graphs = graphs_of_torch_compile()

    def loss(x, y):
        out = checkpoint(function, x, y, use_reentrant=False, context_fn=context_fn)
        return out.sum()

    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    args = [seeded(4, 4), seeded(4, 4, seed=1)]

    assert_bitwise(run(compiled, args), run(loss, args))
    assert graphs[1]["aten.mm.default"] == num_mm


def three_products(x):
    for _ in range(3):
        x = x @ x
    return x.cos()


def with_keyword(x, z=None):
    return x @ x if z is None else x @ x @ z


def from_a_list(x, both):
    return x, [each.cos() for each in both]


def noisy(x):
    return nn.functional.dropout(x.sigmoid(), 0.5).sigmoid()


def drawing(x):
    return torch.sigmoid(torch.rand_like(x) * x) * x


again = functools.partial(checkpoint, use_reentrant=False)
linear = nn.Linear(4, 4).double()
dropping = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)).double()
wrapped = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double())

CALLS = {
    "sequential_layers": lambda x: again(three_products, again(three_products, x)),
    "multiple_checkpoints": lambda x: again(torch.exp, again(torch.exp, x).sin()),
    "module": lambda x: again(linear, x.sin()).sigmoid(),
    "dropout": lambda x: again(dropping, x),
    "recomputed_rand": lambda x: again(drawing, again(drawing, x).sin()),
    "random_op": lambda x: again(noisy, x, context_fn=chosen(ATEN.sigmoid.default)),
    "kwargs": lambda x: again(with_keyword, x, z=x.sin()).cos(),
    "list_inputs": lambda x: again(from_a_list, x, [x.sin(), x.exp()])[1][1],
    "return_same_element_twice": lambda x: again(lambda x: (x.sin(),) * 2, x)[1],
    "distributed_utils_checkpoint_wrapper": lambda x: wrapped(x) * 2,
}


@pytest.mark.parametrize("function", CALLS.values(), ids=CALLS)
def test_calls(function):
    """test_tags_* of these names, and what has no tags.

    test_kwargs, test_list_inputs, test_return_same_element_twice,
    test_distributed_utils_checkpoint_wrapper.
    """
    backend, graphs = graphs_of_torch_compile()

    def loss(x):
        return function(x).sum()

    def from_a_seed(call):
        torch.manual_seed(0)
        return run(call, [seeded(4, 4)])

    compiled = torch.compile(loss, backend=backend, fullgraph=True)

    assert_bitwise(from_a_seed(compiled), from_a_seed(loss))
    assert len(graphs) == 2


def test_another_size():
    """test_symints_location: another size compiles another graph."""
    backend, graphs = graphs_of_torch_compile()
    compiled = torch.compile(nested(with_keyword), backend=backend)

    for args in ([seeded(4, 4)], [seeded(5, 5)]):
        assert_bitwise(run(compiled, args), run(with_keyword, args))
    assert len(graphs) == 4


@dataclasses.dataclass(frozen=True)
class Given:
    """A class that torch's pytree knows while a test runs."""

    x: torch.Tensor


def test_a_frozen_dataclass_comes_back():
    """test_frozen_dataclass_pytree_output."""
    pytree.register_dataclass(Given)

    def loss(x):
        return again(lambda given: Given(linear(given.x).sin()), Given(x)).x.sum()

    try:
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        args = [seeded(4, 4)]
        assert_bitwise(run(compiled, args), run(loss, args))
    finally:
        pytree.SUPPORTED_NODES.pop(Given, None)
        pytree.SUPPORTED_SERIALIZED_TYPES.pop(Given, None)


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_subclass_of_two_tensors():
    """test_compile_selective_checkpoint_tensor_subclass."""

    def loss(x):
        context_fn = functools.partial(create_selective_checkpoint_contexts, save_mm)
        out = again(lambda x: (x @ x).sin(), x, context_fn=context_fn)
        return out.sum()

    found = []
    for call in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x = seeded(4, 4).requires_grad_()
        call(TwoTensor(x, x.clone())).backward()
        found.append(x.grad)
    assert_bitwise(*found)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_graph_that_ends_inside():
    """test_fallback, and test_error_msg with fullgraph=True."""

    def breaking(x):
        torch._dynamo.graph_break()
        return x.exp()

    def loss(x):
        return again(breaking, x.sin()).cos().sum()

    args = [seeded(4, 4)]
    assert_bitwise(run(torch.compile(loss, backend="aot_eager"), args), run(loss, args))
    torch.compiler.reset()
    with pytest.raises(Unsupported, match="User-inserted graph break"):
        run(torch.compile(loss, backend="aot_eager", fullgraph=True), args)
