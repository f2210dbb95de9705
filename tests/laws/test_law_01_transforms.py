"""Law 1. Same numbers, under every other transform.

"Sums with contributions from outside the call, and every other transform, agree to
rounding (`torch.testing.assert_close` defaults; suites run in float64)."
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)

from remat import checkpoint_name, policies, remat
from tests.functions import attention_math
from tests.support import assert_close, in_turn, seeded, swept

pytestmark = [
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
    # torch.func.jvp itself calls torch.jit.script, and linearize leaves a dangling node.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr"),
]

POLICIES = {
    "nothing": None,
    "everything": policies.everything_saveable,
    "names": policies.save_only_these_names("h*"),
}


def smooth(w, x):
    """A layer with an in-place operator, a norm, a constant and a name."""
    h = checkpoint_name((x @ w).tanh(), "h1")
    h = h.clone().mul_(1.5) + torch.arange(4.0, dtype=x.dtype).cos()
    return F.layer_norm(checkpoint_name(h.sin(), "h2"), (4,)).exp() * h


def attend(w, x):
    """An attention block whose parameters are all made from `w`, x a (t, d) sequence."""
    ln, wide = (
        (w.sum(0).tile(2), w.sum(1).tile(2)),
        torch.cat([w, w.cos()], 1).tile(2, 1),
    )
    params = {"qkv": wide.tile(1, 3), "out": wide, "up": wide, "down": wide, "ln": ln}
    x = x.tile(1, 2)[None].tile(1, 6 // len(x), 1)
    return attention_math(params, x).sum((0, 1))[:4] / 50


def arguments():
    """A square weight and a sequence."""
    return seeded(4, 4) / 2, seeded(3, 4, seed=1)


def total(f):
    """`f` as a smooth scalar function."""
    return lambda *args: (f(*args).sin() * 0.7).sum()


def batch(x):
    """Three different copies of a tensor, stacked in front."""
    return torch.stack([x, x.sin(), x * 0.5])


def third(f, w, x):
    """All third derivatives in `w` along one direction and itself."""
    one = grad(lambda w: total(f)(w, x))
    two = grad(lambda w: (one(w) * w.detach().cos()).sum())
    return grad(lambda w: (two(w) * w.detach().sin()).sum())(w)


def linearized(f, w, x):
    """`linearize` and its linear map at two tangents."""
    value, tangent = linearize(f, w, x)
    return value, tangent(w.cos(), x.sin()), tangent(w, x)


TRANSFORMS = {
    "grad": lambda f, w, x: grad(total(f), (0, 1))(w, x),
    "grad_and_value": lambda f, w, x: grad_and_value(total(f))(w, x),
    "vjp": lambda f, w, x: vjp(f, w, x)[1](f(w, x).cos()),
    "jvp": lambda f, w, x: jvp(f, (w, x), (w.cos(), x.sin())),
    "jacrev": lambda f, w, x: jacrev(f, (0, 1))(w, x),
    "jacrev_chunked": lambda f, w, x: jacrev(f, chunk_size=5)(w, x),
    "jacfwd": lambda f, w, x: jacfwd(f, (0, 1))(w, x),
    "jacfwd_jacfwd": lambda f, w, x: jacfwd(jacfwd(f))(w, x),
    "jacrev_jacrev": lambda f, w, x: jacrev(jacrev(total(f), 1), 1)(w, x),
    "jacrev_jacfwd": lambda f, w, x: jacrev(jacfwd(total(f), 1), 0)(w, x),
    "hessian": lambda f, w, x: hessian(total(f), 1)(w, x),
    "linearize": linearized,
    "vmap": lambda f, w, x: vmap(f, (None, 0))(w, batch(x)),
    "vmap_grad": lambda f, w, x: vmap(grad(total(f)), (None, 0))(w, batch(x)),
    "grad_vmap": lambda f, w, x: grad(total(vmap(f, (None, 0))))(w, batch(x)),
    "vmap_vmap": lambda f, w, x: vmap(vmap(f, (0, None)), (None, 0))(
        batch(w), batch(x)
    ),
    "vmap_vmap_grad": lambda f, w, x: vmap(vmap(grad(total(f)), (0, None)), (None, 0))(
        batch(w), batch(x)
    ),
    "vmap_grad_vmap": lambda f, w, x: vmap(grad(total(vmap(f, (None, 0)))), (0, None))(
        batch(w), batch(x)
    ),
    "vmap_jacrev": lambda f, w, x: vmap(jacrev(f), (0, 0))(batch(w), batch(x)),
    "vmap_jvp": lambda f, w, x: vmap(lambda w, x: jvp(f, (w, x), (x.T @ x, x)))(
        batch(w), batch(x)
    ),
    "jvp_vmap": lambda f, w, x: jvp(
        vmap(f, (None, 0)), (w, batch(x)), (w, batch(x).cos())
    ),
    "grad_grad": lambda f, w, x: grad(lambda w: grad(total(f))(w, x).sin().sum())(w),
    "jvp_grad": lambda f, w, x: jvp(grad(total(f)), (w, x), (w.cos(), x)),
    "grad_jvp": lambda f, w, x: grad(
        lambda w: jvp(f, (w, x), (w, x.cos()))[1].sin().sum()
    )(w),
    "vmap_jvp_grad": lambda f, w, x: vmap(
        lambda x: jvp(lambda w: grad(total(f))(w, x), (w,), (w.cos(),))
    )(batch(x)),
    "jvp_jvp": lambda f, w, x: jvp(
        lambda w: jvp(lambda x: f(w, x), (x,), (x.cos(),))[1], (w,), (w,)
    ),
    "grad_vmap_grad": lambda f, w, x: grad(
        lambda w: vmap(grad(total(f), 1), (None, 0))(w, batch(x)).sin().sum()
    )(w),
    "third": third,
    "functionalize_grad": lambda f, w, x: functionalize(grad(total(f)))(w, x),
    "grad_functionalize": lambda f, w, x: grad(functionalize(total(f)))(w, x),
    "vmap_functionalize_grad": lambda f, w, x: vmap(
        functionalize(grad(total(f))), (None, 0)
    )(w, batch(x)),
    "functional_call": lambda f, w, x: grad(
        lambda p: functional_call(Layer(f), p, (x,)).sin().sum()
    )({"w": w}),
}
#: One for each rule of a region and for each pair of them.
MAIN = (
    *("grad", "vjp", "jacrev", "vmap_grad", "grad_vmap", "grad_grad"),
    *("jvp_grad", "grad_jvp", "vmap_jvp_grad"),
)
#: Three levels, two of them of one kind.
OF_THREE = ("vmap_vmap_grad", "vmap_grad_vmap", "grad_vmap_grad")
#: Those under which `test_law_01_functions_under_transforms.py` does not have attention.
OF_ATTENTION = (
    *("grad", "vjp", "jacfwd", "linearize"),
    *("vmap_jacrev", "jvp_vmap", "grad_jvp", "jvp_jvp"),
)
#: Made of those, and of `vmap_grad` and `grad_vmap` there.
MADE_OF_THEM = (
    *("jacrev", "vmap_vmap_grad", "vmap_grad_vmap"),
    *("hessian", "third", "grad_vmap_grad"),
)


class Layer(torch.nn.Module):
    """`f` as a module with the parameter `w`."""

    def __init__(self, f):
        super().__init__()
        self.f = f
        self.w = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))

    def forward(self, x):
        return self.f(self.w, x)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("transform", "policy"),
    [
        *((name, "names") for name in TRANSFORMS if name not in OF_THREE),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                *itertools.product(OF_THREE, ["names"]),
                *itertools.product(MAIN, ["nothing", "everything"]),
            )
        ),
    ],
)
def test_transforms_of_a_layer(transform, policy):
    """Every transform of a region that saves a part gives the plain function's numbers.

    In a sweep the main ones do where it saves nothing, as attention does below and the
    functions of `test_law_01_functions_under_transforms.py` do, and where it saves everything.
    """
    w, x = arguments()
    region = remat(smooth, policy=POLICIES[policy])

    found = TRANSFORMS[transform](region, w, x)

    assert_close(found, TRANSFORMS[transform](smooth, w, x))


@pytest.mark.parametrize("transform", [*OF_ATTENTION, *swept(MADE_OF_THEM)])
def test_transforms_of_attention(transform):
    """Transforms of an attention block give the plain numbers."""
    w, x = arguments()

    found = TRANSFORMS[transform](remat(attend), w, x)

    assert_close(found, TRANSFORMS[transform](attend, w, x))


@pytest.mark.parametrize("policy", ["names", *swept(["nothing", "everything"])])
@pytest.mark.parametrize(
    "transform", ["grad", "vmap_grad", "grad_grad", *swept(["jvp_grad"])]
)
def test_transforms_of_nested_regions(transform, policy):
    """A region of regions transforms like the plain composition."""
    w, x = arguments()

    def compose(f):
        return lambda w, x: f(w, f(w, x) * 0.1)

    region = remat(compose(remat(smooth, policy=POLICIES[policy])))

    found = TRANSFORMS[transform](region, w, x)

    assert_close(found, TRANSFORMS[transform](compose(smooth), w, x))


IN_DIMS = [0, 1, -1, (0, None), (None, -1), (2, 0), (-2, -3)]
OUT_DIMS = [0, 1, -1, (0, -1), (-2, 1)]


def two_outputs(w, x):
    """Two outputs of two dimensions, each of them needing both arguments."""
    h = (x @ w).tanh()
    return h.exp() * x, h.sin().T


DIMS = [*itertools.product(IN_DIMS, [0]), *itertools.product([(2, 0)], OUT_DIMS)]


@pytest.mark.parametrize(
    ("dims", "order"), in_turn(DIMS, ["vmap", "vmap_vjp", "vjp_vmap"]), ids=str
)
def test_any_in_dims_and_out_dims(dims, order):
    """vmap over any dimension, or none, in and out, also negative ones."""
    in_dims, out_dims = dims
    sizes = in_dims if isinstance(in_dims, tuple) else (in_dims, in_dims)
    w, x = (
        t if dim is None else batch(t).movedim(0, dim)
        for t, dim in zip((seeded(4, 4), seeded(3, 4, seed=1)), sizes, strict=True)
    )

    def pull(f):
        def pulled(w, x):
            cotangents = tuple(out.cos() for out in f(w, x))
            return vjp(f, w, x)[1](cotangents)

        return pulled

    def run(f):
        if order == "vmap_vjp":
            return vmap(pull(f), in_dims, out_dims)(w, x)
        mapped = vmap(f, in_dims, out_dims)
        return pull(mapped)(w, x) if order == "vjp_vmap" else mapped(w, x)

    assert_close(run(remat(two_outputs)), run(two_outputs))


def test_vmap_over_containers_and_chunks():
    """vmap maps over dicts with static leaves held out, and in chunks."""

    def fun(batch, scale):
        return {
            "y": (batch["x"] @ batch["w"]).tanh().exp() * scale,
            "n": batch["n"] + 1,
        }

    args = ({"x": seeded(4, 3, 5), "w": seeded(5, 2), "n": torch.arange(4)}, 2.0)
    in_dims = ({"x": 0, "w": None, "n": 0}, None)

    for chunk in [None, 3]:
        found = vmap(remat(fun), in_dims, chunk_size=chunk)(*args)
        assert_close(found, vmap(fun, in_dims, chunk_size=chunk)(*args))
