"""Law 1. Same numbers: functions under transforms that mix modes and batches.

"Sums with contributions from outside the call, and every other transform, agree to
rounding (`torch.testing.assert_close` defaults; suites run in float64)."
"""

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.utils._pytree import tree_map_only

from remat import remat
from tests.functions import FUNCTIONS
from tests.support import assert_close, is_differentiable, on_tensors, tensors_in

pytestmark = [
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    # Operators without a batching rule run in a loop, in plain code too.
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]

BY_NAME = {function.name: function for function in FUNCTIONS}
#: Too coarse, or a plain autograd.Function that torch.func refuses.
NEVER = {"attention_bfloat16", "half", "mixed_dtypes", "custom_gradient"}
#: What plain torch cannot do: flash attention has one derivative, in reverse.
CANNOT = {
    ("attention", "jvp"),
    ("attention", "jvp_grad"),
    ("attention", "vmap_jvp_grad"),
    ("attention", "grad_grad"),
}


def in_double(tensor):
    """Floating tensors in float64, complex ones in complex128, others as they are."""
    if not is_differentiable(tensor):
        return tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def smooth_loss(f):
    """`f` made a function to a real number."""

    def loss(*args):
        outputs = [out for out in tensors_in(f(*args)) if is_differentiable(out)]
        parts = [
            torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
            for t in outputs
        ]
        return sum((part.double().sin() * 0.7).sum() for part in parts)

    return loss


def batches(tensors):
    """Three different copies of each, stacked in front."""
    return [torch.stack([t, t * 0.5, t.cos()]) for t in tensors]


def pushed(g, tensors):
    """The value and tangent of `g` along the cosine of its arguments."""
    return jvp(g, tuple(tensors), tuple(t.cos() for t in tensors))


TRANSFORMS = {
    "vmap_grad": lambda g, f, ts: vmap(g)(*batches(ts)),
    "grad_vmap": lambda g, f, ts: grad(
        lambda *ts: vmap(f)(*ts).sum(), tuple(range(len(ts)))
    )(*batches(ts)),
    "jvp": lambda g, f, ts: pushed(f, ts),
    "jvp_grad": lambda g, f, ts: pushed(g, ts),
    "vmap_jvp_grad": lambda g, f, ts: vmap(lambda *ts: pushed(g, ts))(*batches(ts)),
    "grad_grad": lambda g, f, ts: grad(lambda *ts: smooth_loss(g)(*ts))(*ts),
}
#: Whatever breaks in these breaks in `vmap_jvp_grad`, which is tried on all of these functions.
PARTS = {"jvp", "jvp_grad"}
#: Second derivatives of all functions are taken in `test_law_01_higher_order.py` each time.
REPEATED = {*PARTS, "grad_grad"}
#: On these the parts are tried too, to say where it broke, and so are the others each time.
CORE = {"mlp", "attention_math", "group_norm", "lstm_cell_in_place", "conv_net"}
CASES = [
    (name, transform)
    for name in BY_NAME
    for transform in TRANSFORMS
    if name not in NEVER and (name, transform) not in CANNOT
    if name in CORE or transform not in PARTS
]


def is_daily(name, transform):
    """Whether a case is tried each time: `vmap_grad` of all, and what the core is there for."""
    if transform == "vmap_grad":
        return True
    # `test_law_01_transforms.py` has all transforms of attention, law 14 has those of norms.
    return name in CORE - {"attention_math", "group_norm"} and transform not in REPEATED


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        pytest.param(*case, marks=() if is_daily(*case) else pytest.mark.sweep)
        for case in CASES
    ],
)
def test_functions_under_transforms(name, transform):
    """A region of each transforms like the plain function."""
    args = tree_map_only(torch.Tensor, in_double, BY_NAME[name].make_args())

    def transformed(fun):
        loss, tensors = on_tensors(smooth_loss(fun), args)
        gradient = grad(loss, tuple(range(len(tensors))))
        return TRANSFORMS[transform](gradient, loss, tensors)

    assert_close(transformed(remat(BY_NAME[name].fun)), transformed(BY_NAME[name].fun))
