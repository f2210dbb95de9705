"""Law 4. Hands off.

"No argument is mutated or truncated (except buffers that `fun` itself mutates, written
back once); a caller may use `x` again (`x + block(x)`), change an output in place where
plain code may, call twice, keep the graph, differentiate twice. A later in-place change
of a saved tensor raises."
"""

import pytest
import torch
from torch import Tensor
from torch.func import grad
from torch.utils._pytree import tree_leaves, tree_map_only

from remat import checkpoint_name, policies, remat
from tests.functions import FUNCTIONS, NAMES, Pair, mlp, tensors
from tests.support import (
    assert_bitwise,
    assert_close,
    fresh,
    grads,
    run,
    seeded,
    tensors_in,
)

# Small functions save no memory under some of the policies, and law 5 tests that warning.
pytestmark = pytest.mark.filterwarnings("ignore::remat.RematWarning")

BY_NAME = {function.name: function for function in FUNCTIONS}
MLP = tensors((5, 8), (8, 16), (16,), (16, 8), (8,))
POLICIES = {
    "nothing": None,
    "everything": policies.everything_saveable,
    "name": policies.save_only_these_names("y"),
}


def fingerprint(tree):
    """Everything about the tensors in a pytree that a library could change."""
    return [
        (t._version, t.shape, t.stride(), t.storage_offset(), t.data_ptr())
        for t in tensors_in(tree)
    ] + [
        (t.untyped_storage().nbytes(), t.requires_grad, t.is_leaf, t.grad_fn)
        for t in tensors_in(tree)
    ]


@pytest.mark.contract
@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_left_alone(name):
    """Values, versions, strides, storages and flags of the arguments stay as they were."""
    leaves = fresh(BY_NAME[name].make_args())
    values = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), leaves)
    before = fingerprint(leaves)

    outputs = [
        t for t in tensors_in(remat(BY_NAME[name].fun)(*leaves)) if t.requires_grad
    ]
    torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])

    assert fingerprint(leaves) == before
    assert_bitwise(tree_map_only(torch.Tensor, torch.detach, leaves), values)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_look_like_plain_ones(name):
    """Which outputs require grad, their strides and what is not a tensor are plain's."""
    leaves = fresh(BY_NAME[name].make_args())
    found, expected = remat(BY_NAME[name].fun)(*leaves), BY_NAME[name].fun(*leaves)

    def looks(tree):
        return [
            (leaf.requires_grad, leaf.stride(), leaf.dtype)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in tree_leaves(tree)
        ]

    assert looks(found) == looks(expected)


def test_containers_are_left_alone():
    """Containers passed in keep their entries, and results are new containers."""
    weights = {"w": seeded(3).requires_grad_(), "none": None}
    tree = [weights, Pair(seeded(3, seed=1), 2)]
    entries = [*tree, *weights.values(), *tree[1]]

    def fun(tree):
        return {**tree[0], "out": (tree[0]["w"] * tree[1].first).sin().exp()}

    result = remat(fun)(tree)
    after = [*tree, *tree[0].values(), *tree[1]]

    assert list(result) == ["w", "none", "out"]
    assert list(weights) == ["w", "none"]
    assert all(a is b for a, b in zip(entries, after, strict=True))


def test_no_grad_attribute_is_filled_under_torch_func():
    """torch.func leaves .grad of its arguments None."""
    args = MLP()
    grad(lambda *args: remat(mlp)(*args).sum())(*args)

    assert all(tensor.grad is None for tensor in args)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_argument_may_be_used_again(policy):
    """x + block(x) * x gives both contributions, under both reverse modes."""

    def block(x):
        return checkpoint_name(x.sin(), "y").exp().sin()

    def around(f):
        return lambda x: (x + f(x) * x).sum()

    region = around(remat(block, policy=POLICIES[policy]))
    x = (seeded(4, 5),)

    assert_close(run(region, x), run(around(block), x))
    assert_close(grad(region)(*x), grad(around(block))(*x))


def test_calls_are_independent():
    """Two calls, and their backwards in any order, do not disturb each other."""
    region = remat(mlp, policy=policies.save_matmul_outputs)
    first, second = fresh(MLP()), fresh([t * 0.5 for t in MLP()])

    outputs = [region(*first), region(*second)]
    for output in outputs:
        output.sum().backward()

    for leaves, output in zip((first, second), outputs, strict=True):
        plain = fresh([t.detach() for t in leaves])
        expected = mlp(*plain)
        expected.sum().backward()
        assert_bitwise(output.detach(), expected.detach())
        assert_bitwise([t.grad for t in leaves], [t.grad for t in plain])


def test_gradients_accumulate_over_calls():
    """Two calls and two backwards add up in .grad, as in plain code."""
    region = remat(mlp)

    def twice(f):
        leaves = fresh(MLP())
        first, second = f(*leaves), f(*leaves)
        second.sum().backward()
        first.sum().backward()
        return [tensor.grad for tensor in leaves]

    assert_bitwise(twice(region), twice(mlp))


def test_gradients_share_no_memory():
    """Gradients that are equal to each other or to the cotangent are tensors of their own."""

    @remat
    def fun(x, y, z):
        return x + y - z.T.T, x.view(20)

    leaves = fresh((seeded(4, 5),) * 3)
    cotangents = [seeded(4, 5, seed=1), seeded(20, seed=2)]
    torch.autograd.backward(fun(*leaves), cotangents)

    owned = [*cotangents, *(leaf.grad for leaf in leaves)]
    assert len({t.untyped_storage().data_ptr() for t in owned}) == 5


@pytest.mark.parametrize("policy", POLICIES)
def test_the_graph_may_be_kept(policy):
    """A kept graph can be pulled back again, also with other cotangents."""

    def fun(x):
        return checkpoint_name(x.sin(), "y").exp().sin()

    x = seeded(5).requires_grad_()
    out, plain = remat(fun, policy=POLICIES[policy])(x), fun(x)

    for cotangent in [
        torch.ones(5).double(),
        x.detach(),
        torch.ones(1).double().expand(5),
    ]:
        (found,) = torch.autograd.grad(out, x, cotangent, retain_graph=True)
        (expected,) = torch.autograd.grad(plain, x, cotangent, retain_graph=True)
        assert_bitwise(found, expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_differentiating_twice_leaves_the_first_gradient(policy):
    """A second derivative may be taken before and after the first."""

    def fun(x):
        return checkpoint_name(x.sin(), "y").exp().sin()

    def both(f):
        x = seeded(5).requires_grad_()
        out = f(x).sum()
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(out, x, retain_graph=True)
        return first.detach(), second, again

    assert_close(both(remat(fun, policy=POLICIES[policy])), both(fun))


@pytest.mark.contract
def test_the_callers_saved_tensor_hooks_see_no_stand_in() -> None:
    """They see what the region saves, and are there again after the trace."""
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    x = seeded(3).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        found = grads(remat(lambda x: torch.sin(x).sin()), (x,))
        traced = len(seen)
        x.exp()

    assert_bitwise(found, grads(lambda x: torch.sin(x).sin(), (x,)))
    assert traced == 1
    assert len(seen) == 2
    assert {type(tensor) for tensor in seen} == {Tensor}
