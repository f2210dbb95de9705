"""No fallback.

"There is no fallback to `fun`: a region either recomputes or says why not." And of the
issue: "under `nothing_saveable` the tests count more than zero recomputed operators for
every function whose plain version saves an intermediate."
"""

from collections import Counter

import pytest
import torch
from torch.func import functionalize, grad

from remat import policies, remat
from tests.functions import FUNCTIONS
from tests.support import (
    ALIASING,
    backward_operators,
    count_operators,
    forward_operators,
    fresh,
    held_bytes,
    on_tensors,
    scalar_loss,
    seeded,
    tensors_in,
)

pytestmark = pytest.mark.filterwarnings("ignore::remat.RematWarning")


def saves_an_intermediate(fun, args):
    """Whether plain autograd keeps a computed value, neither argument nor output.

    Constants count as arguments here: a value is computed if it depends on one that
    requires grad.
    """
    packed = []
    leaves = fresh(args)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t, lambda t: t
    ):
        outputs = fun(*leaves)
    known = {storage_of(tensor) for tensor in tensors_in((leaves, outputs))}
    return any(
        tensor.requires_grad and storage_of(tensor) not in known for tensor in packed
    )


def storage_of(tensor):
    """The address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


SAVING = [f for f in FUNCTIONS if saves_an_intermediate(f.fun, f.make_args())]
saving = pytest.mark.parametrize("function", SAVING, ids=lambda function: function.name)


def computing(counts: Counter[str]) -> Counter[str]:
    """The operators that compute, without those that only rename bits."""
    return Counter({op: n for op, n in counts.items() if op not in ALIASING})


def test_the_functions_save():
    """Nearly all of the functions save an intermediate in plain torch."""
    assert len(SAVING) > 0.75 * len(FUNCTIONS)


@pytest.mark.contract
@saving
def test_the_backward_recomputes(function):
    """Under nothing_saveable, the backward runs operators of the forward again."""
    args = function.make_args()
    forward = computing(forward_operators(function.fun, *args))
    plain = computing(backward_operators(function.fun, *args))

    counts = computing(backward_operators(remat(function.fun), *args))

    again = {op: counts[op] - plain[op] for op in forward if counts[op] > plain[op]}
    assert again


@saving
def test_nothing_is_held(function):
    """Under nothing_saveable, only arguments wait for the backward."""
    args = function.make_args()

    assert held_bytes(remat(function.fun), *args) == 0
    assert held_bytes(function.fun, *args) > 0


@saving
def test_torch_func_recomputes(function):
    """Under torch.func.grad, a region runs more operators than one that saves everything."""
    counts = {}
    for policy in [policies.nothing_saveable, policies.everything_saveable]:
        region = remat(function.fun, policy=policy)
        flat, tensors = on_tensors(scalar_loss(region), function.make_args())
        gradient = grad(flat, tuple(range(len(tensors))))
        gradient(*tensors)
        counts[policy] = computing(count_operators(gradient, *tensors)).total()

    assert counts[policies.nothing_saveable] > counts[policies.everything_saveable]


@pytest.mark.contract
@pytest.mark.parametrize("is_outside", [True, False], ids=["outside", "inside"])
def test_functionalize_recomputes(is_outside):
    """Around a gradient, and in one, the operators are those of the gradient alone."""
    x, w = seeded(3, 4), seeded(4, 4)

    def loss(x):
        return remat(lambda x: ((x @ w).sin() @ w).exp())(x).sum()

    both = functionalize(grad(loss)) if is_outside else grad(functionalize(loss))

    counts, expected = (
        computing(count_operators(each, x)) for each in (both, grad(loss))
    )
    assert counts == expected
    assert counts["aten.mm"] == 6
