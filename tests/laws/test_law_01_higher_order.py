"""Law 1. Same numbers, in derivatives of derivatives by torch.autograd.

"Sums with contributions from outside the call, and every other transform, agree to
rounding (`torch.testing.assert_close` defaults; suites run in float64)."
"""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._vmap_internals import _vmap as vmap_of_autograd
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.functional import hessian, jacobian
from torch.func import grad
from torch.utils._pytree import tree_map_only

from remat import checkpoint_name, policies, remat
from tests.functions import FUNCTIONS, NAMES
from tests.support import (
    assert_close,
    fresh,
    is_differentiable,
    on_tensors,
    scalar_loss,
    seeded,
    swept,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

BY_NAME = {function.name: function for function in FUNCTIONS}
POLICIES = {
    "nothing": None,
    "everything": policies.everything_saveable,
    "names": policies.save_only_these_names("h"),
}
#: Plain torch cannot differentiate these twice, or their numbers are too coarse.
NOT_TWICE = {"attention", "attention_bfloat16", "half", "mixed_dtypes"}
# They take as long as all others; `test_numerical_derivatives` has the like of them.
LONG = ("attention_math", "cumulative", "decompositions", "lstm_cell_in_place")


def smooth(w, x):
    """A layer with an in-place operator, a norm, a constant and a name."""
    h = checkpoint_name((x @ w).tanh(), "h")
    h = h.clone().mul_(1.5) + torch.arange(4.0, dtype=x.dtype).cos()
    return F.layer_norm(h.sin(), (4,)).exp() * h


def total(f):
    """`f` as a smooth scalar function."""
    return lambda *args: (f(*args).sin() * 0.7).sum()


def arguments():
    """A square weight and a sequence."""
    return seeded(4, 4) / 2, seeded(3, 4, seed=1)


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in NAMES if name not in {*NOT_TWICE, *LONG}),
        *swept(LONG),
    ],
)
def test_second_derivatives(name):
    """create_graph, twice: second derivatives of the functions agree in float64."""
    args = in_double(BY_NAME[name].make_args())

    def second(f):
        flat, tensors = on_tensors(f, args)
        leaves = fresh(tensors, requires_grad=True)
        first = derivatives(scalar_loss(flat)(*leaves), leaves, create_graph=True)
        moved = [g * x.detach().cos() for g, x in zip(first, leaves, strict=True)]
        moved = torch.view_as_real(torch.stack([complex_sum(m) for m in moved])).sum()
        if not moved.requires_grad:
            return first
        return first, derivatives(moved, leaves)

    assert_close(second(remat(BY_NAME[name].fun)), second(BY_NAME[name].fun))


def in_double(args):
    """Every floating tensor in float64, every complex one in complex128."""

    def wide(tensor):
        if not is_differentiable(tensor):
            return tensor
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)

    return tree_map_only(torch.Tensor, wide, args)


def complex_sum(tensor):
    """The sum as a complex number, whatever the dtype."""
    return tensor.sum().to(torch.complex128)


def derivatives(root, leaves, **options):
    """Gradients with zeros where there is none."""
    return torch.autograd.grad(
        root, leaves, **options, allow_unused=True, materialize_grads=True
    )


@pytest.mark.contract
@pytest.mark.parametrize("policy", ["names", *swept(["nothing", "everything"])])
def test_third_derivatives_by_create_graph(policy):
    """Three backwards, each of the one before, agree."""

    def thrice(f):
        leaves = fresh(arguments())
        root = total(f)(*leaves)
        found = []
        for order in range(3):
            gradients = derivatives(root, leaves, create_graph=order < 2)
            found += [gradient.detach() for gradient in gradients]
            root = sum(gradient.sin().sum() for gradient in gradients)
        return found

    assert_close(thrice(remat(smooth, policy=POLICIES[policy])), thrice(smooth))


def test_retain_graph():
    """A kept graph gives the same gradient each time, and a freed one an error."""
    leaves = fresh(arguments())
    root = total(remat(smooth))(*leaves)

    once = derivatives(root, leaves, retain_graph=True)
    twice = derivatives(root, leaves)

    assert_close(once, twice)
    with pytest.raises(RuntimeError, match="second time"):
        derivatives(root, leaves)


def sum_of_sines(tensors):
    """One number of all."""
    return torch.cat([each.flatten() for each in tensors]).sin().sum()


BASIS = torch.eye(12, dtype=torch.float64).view(12, 3, 4)


class InBackward(torch.autograd.Function):
    """Calls a function of the cotangent in its backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.sin()

    @staticmethod
    def backward(ctx, *grad_outputs):
        return ctx.function(*grad_outputs), None


def in_backward(f, w, x):
    return InBackward.apply(x @ w, lambda cotangent: f(w, cotangent))


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("call", [lambda f, w, x: f(w, x), in_backward])
def test_batched_cotangents(call, create_graph, engine):
    """autograd.grad with is_grads_batched pulls back several cotangents at once, any order."""
    region = remat(smooth, engine=engine)
    region(*arguments())  # a trace that knows no cotangent

    def pulled(f):
        leaves = fresh(arguments())
        options = {"is_grads_batched": True, "create_graph": create_graph}
        found = torch.autograd.grad(call(f, *leaves), leaves, BASIS, **options)
        if not create_graph:
            return found
        return found, torch.autograd.grad(sum_of_sines(found), leaves)

    for _ in range(2):
        assert_close(pulled(region), pulled(smooth))


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_batched_cotangents_of_draws(engine):
    """Each sees the draws of the forward."""
    region = remat(lambda w, x: F.dropout(x @ w).sin(), rng="preserve", engine=engine)
    leaves = fresh(arguments())
    output = region(*leaves)
    grad_by = partial(torch.autograd.grad, output, leaves, retain_graph=True)

    one_by_one = zip(*map(grad_by, BASIS), strict=True)
    assert_close(
        grad_by(BASIS, is_grads_batched=True), tuple(map(torch.stack, one_by_one))
    )


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_batched_cotangents_inside_of_others_are_refused(engine):
    """torch's older vmap nests, and has no public name."""
    (w, x), region = fresh(arguments()), remat(smooth, engine=engine)
    output = region(w, x)

    def pulled(scale):
        rows = vmap_of_autograd(lambda row: (row * scale).expand_as(output))(BASIS[0])
        options = {"is_grads_batched": True, "retain_graph": True}
        return torch.autograd.grad(output, w, rows, **options)[0]

    with pytest.raises(NotImplementedError) as raised:
        vmap_of_autograd(pulled)(seeded(2))
    assert re.fullmatch(
        r"the backward of the region smooth: is mapped by is_grads_batched=True "
        r"inside of another one\. torch\.func maps a region .*, or loop over one\.",
        str(raised.value),
    )


@pytest.mark.parametrize("vectorize", [False, True], ids=["looped", "vectorized"])
def test_torch_autograd_functional(vectorize):
    """torch.autograd.functional's hessian and jacobian agree."""
    args = arguments()
    for derivative, wrap in [(hessian, total), (jacobian, lambda f: f)]:
        take = partial(derivative, inputs=args, vectorize=vectorize)
        assert_close(take(wrap(remat(smooth))), take(wrap(smooth)))


ENGINES = ["trace", "rerun"]


@pytest.mark.contract
@pytest.mark.parametrize(
    "name", ["layer_norm", "in_place", *swept(["complex_arithmetic", "normalizers"])]
)
def test_numerical_derivatives(name):
    """gradcheck, forward mode and batches included, and gradgradcheck pass."""
    flat, tensors = on_tensors(
        remat(BY_NAME[name].fun), in_double(BY_NAME[name].make_args())
    )
    leaves = fresh(tensors)

    assert gradcheck(flat, leaves, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(flat, leaves, check_batched_grad=True)


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", *swept(["rerun"])])
@pytest.mark.parametrize(
    "name", ["layer_norm", *swept(["complex_arithmetic", "normalizers"])]
)
def test_numerical_derivatives_forward_over_reverse(name, engine):
    """gradgradcheck passes where the gradient's derivative is taken by dual numbers."""
    region = remat(BY_NAME[name].fun, engine=engine)
    flat, tensors = on_tensors(region, in_double(BY_NAME[name].make_args()))

    assert gradgradcheck(flat, fresh(tensors), check_fwd_over_rev=True)


DUALS = {
    "smooth": lambda x: (x.exp().sin() * x).sin(),
    "norm": lambda x: F.layer_norm(x, (4,), x.sum(0), x[0]).exp(),
    "complex": lambda x: torch.view_as_real((x + 1j * x.sin()).conj().exp()),
    "view": lambda x: x.T,
}


def parts(dual):
    """The value of a dual tensor and its tangent, which must be there."""
    value, tangent = forward_ad.unpack_dual(dual)
    assert tangent is not None, "the tangent is lost"
    return value.detach(), tangent.detach()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wants_grad", [False, True])
@pytest.mark.parametrize("name", DUALS)
def test_dual_tensors(name, wants_grad, engine):
    """Forward mode by torch.autograd.forward_ad carries values and tangents."""

    def push(f):
        x = seeded(3, 4).requires_grad_(wants_grad)
        with forward_ad.dual_level():
            return parts(f(forward_ad.make_dual(x, x.cos())))

    region = remat(DUALS[name], engine=engine)
    assert_close(push(region), push(DUALS[name]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["smooth", "norm", "complex"])
def test_dual_tensors_through_a_backward(name, engine):
    """Forward over reverse by torch.autograd.forward_ad keeps the gradient's tangent."""

    def push(f):
        x = seeded(3, 4).requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x.detach().cos())
            (gradient,) = torch.autograd.grad(f(dual).sum(), x, create_graph=True)
            return parts(gradient)

    region = remat(DUALS[name], engine=engine)
    assert_close(push(region), push(DUALS[name]))


def in_parts(x, w):
    """The second output has no gradient where only w is differentiated."""
    return (x.sin() * w).tanh(), x * 3, x * w, x > 0


@pytest.mark.contract
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wants_grad", [False, True])
def test_dual_tensors_and_outputs_without_a_gradient(wants_grad, engine):
    """All outputs keep their tangents, and so do all gradients."""

    def push(f):
        x, w = seeded(3).requires_grad_(wants_grad), seeded(3, seed=1).requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x.detach().cos())
            *outputs, flags = f(dual, w)
            wanted = [x, w] if wants_grad else [w]
            total = outputs[0].sum() + outputs[2].sum()
            gradients = torch.autograd.grad(total, wanted, create_graph=True)
            return flags, [*map(parts, (*outputs, *gradients))]

    assert_close(push(remat(in_parts, engine=engine)), push(in_parts))


#: Operators that torch differentiates apart where a factor is zero.
PRODUCTS = {
    "cumprod": lambda x: x.cumprod(0),
    "prod": lambda x: x.prod(0),
    "of all": lambda x: x.prod(),
    "vander": lambda x: torch.linalg.vander(x[:, 0]),
}


@pytest.mark.contract
@pytest.mark.parametrize("order", [2, *swept([1, 3])])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_zeros(name, order):
    """Alike at every call, the first of which takes another way than later ones."""
    x = seeded(4, 3)
    x[1], x[3, 0] = 0.0, 0.0

    def derivative(f):
        for _ in range(order):
            f = grad(scalar_loss(f))
        return f(x)

    region = remat(PRODUCTS[name])
    expected = derivative(PRODUCTS[name])
    for _ in range(3):
        assert_close(derivative(region), expected)
