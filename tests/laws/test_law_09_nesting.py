"""Law 9. Nesting is JAX's.

"The outermost policy decides what crosses from its forward to its backward, and sees
names inside inner regions; an inner policy decides what is held inside the outer's
recomputation, so inner regions still bound the peak there. Oracle, from JAX: inner =
name(sin(name(sin x, "a")), "b"), f = inner∘inner; extra sins for inner policy nothing /
everything / a / b: under outer nothing 4/3/3/4, everything 0/0/0/0, a 1/1/1/1,
b 2/2/2/2."
"""

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jvp, vmap

from remat import checkpoint_name, policies, remat, saved_residuals
from tests.support import (
    LiveBytes,
    assert_bitwise,
    assert_close,
    backward_operators,
    count_operators,
    fresh,
    grads,
    held_bytes,
    in_turn,
    pairwise,
    run,
    seeded,
    swept,
)

# An inner policy's names are another region's business, and some cells save nothing.
pytestmark = [
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

POLICIES = {
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
    "a": policies.save_only_these_names("a"),
    "b": policies.save_only_these_names("b"),
}
#: outer policy -> extra sines for the inner policy nothing, everything, a, b
ORACLE = {
    "nothing": (4, 3, 3, 4),
    "everything": (0, 0, 0, 0),
    "a": (1, 1, 1, 1),
    "b": (2, 2, 2, 2),
}
CELLS = [
    (outer, inner, extra)
    for outer, row in ORACLE.items()
    for inner, extra in zip(POLICIES, row, strict=True)
]
PAIRS = list(itertools.product(POLICIES, POLICIES))
cells = pytest.mark.parametrize(("outer", "inner", "extra"), CELLS)
X = seeded(5)


def inner_function(x):
    """Two sines, both named."""
    return checkpoint_name(checkpoint_name(x.sin(), "a").sin(), "b")


def twice(f):
    """f after f."""
    return lambda x: f(f(x))


def nested(*names):
    """Regions in regions, each of two of the next; the outermost policy first."""
    fun = inner_function
    for depth, name in enumerate(reversed(names)):
        fun = remat(twice(fun) if depth else fun, policy=POLICIES[name])
    return fun


def plain(levels):
    """The function of `nested` without any region."""
    fun = inner_function
    for _ in range(levels - 1):
        fun = twice(fun)
    return fun


@pytest.mark.contract
@cells
def test_sixteen_cells(outer, inner, extra):
    """The backward re-runs as many sines as JAX's, and its bits are plain's."""
    region = nested(outer, inner)

    assert backward_operators(region, X)["aten.sin"] == extra
    assert_bitwise(run(region, (X,)), run(plain(2), (X,)))


@cells
def test_sixteen_cells_under_torch_func(outer, inner, extra):
    """torch.func.grad re-runs as many, per example in vmap too."""
    region = nested(outer, inner)
    gradient, mapped = grad(lambda x: region(x).sum()), vmap(grad(region))
    assert_close(mapped(X), gradient(X))

    assert count_operators(gradient, X)["aten.sin"] == 4 + extra
    assert count_operators(mapped, X)["aten.sin"] == 4 + extra
    assert_bitwise(gradient(X), run(plain(2), (X,), [X * 0 + 1])[1][0])


@pytest.mark.parametrize(
    ("outer", "names"),
    [("nothing", ""), ("everything", "aab"), ("a", "aa"), ("b", "b")],
)
@pytest.mark.parametrize("inner", POLICIES)
def test_the_outermost_policy_decides_what_crosses(outer, names, inner):
    """Names inside inner regions are seen; the inner policies change nothing held.

    The last b is the output, which no derivative reads.
    """
    region = nested(outer, inner)

    made = [residual for residual in saved_residuals(region, X) if not residual.path]

    assert sorted(residual.name for residual in made) == sorted(names)
    assert held_bytes(region, X) == 40 * len(names)


#: outermost policy -> extra sines for any policies inside
OUTERMOST = {"everything": 0, "a": 3, "b": 4}


@pytest.mark.parametrize(
    ("outer", "middle", "inner"),
    pairwise(OUTERMOST, ["nothing", "everything", "a"], POLICIES),
)
def test_three_levels(outer, middle, inner):
    """With all a of eight sines, three are run again; with all b, four; bits are plain's."""
    region, extra = nested(outer, middle, inner), OUTERMOST[outer]

    assert backward_operators(region, X)["aten.sin"] == extra
    assert_bitwise(run(region, (X,)), run(plain(3), (X,)))


@pytest.mark.parametrize(("middle", "inner"), PAIRS)
def test_three_levels_under_nothing(middle, inner):
    """Under an outermost `nothing`, no inner policy loses bits or recomputes twice as much."""
    region = nested("nothing", middle, inner)
    sines = backward_operators(region, X)["aten.sin"]

    assert 7 <= sines <= 6 + 4 + 4
    assert_bitwise(run(region, (X,)), run(plain(3), (X,)))
    assert held_bytes(region, X) == 0


@pytest.mark.parametrize(("outer", "inner"), in_turn(POLICIES, [*POLICIES][::-1]))
def test_nested_second_derivatives(outer, inner):
    """Second derivatives, in reverse and forward over reverse, are plain's."""

    def derivatives(f):
        gradient = grad(lambda x: f(x).sin().sum())
        second = grad(lambda x: gradient(x).cos().sum())(X)
        return gradient(X), second, jvp(gradient, (X,), (X.cos(),))

    assert_close(derivatives(nested(outer, inner)), derivatives(plain(2)))


def test_inner_regions_bound_the_peak_of_the_outer_recomputation():
    """One region around 16 regions of 4 sines peaks far below one around 64 sines."""
    x = seeded(1 << 14)

    def four(x):
        return x.sin().sin().sin().sin()

    def sixteen(f):
        def stack(x):
            for _ in range(16):
                x = f(x)
            return x

        return stack

    def peak(f):
        grads(f, (x,))
        (leaf,) = fresh((x,))
        with LiveBytes() as memory:
            out = f(leaf)
            out.sum().backward()
        return memory.peak / x.untyped_storage().nbytes()

    whole, grouped = peak(remat(sixteen(four))), peak(remat(sixteen(remat(four))))
    assert whole >= 60
    assert grouped <= 30


def six(x):
    """Six operators, the last of them named."""
    return checkpoint_name(x.sin().exp().sin().cos().tanh().sin(), "part")


def peak_of_second_derivative(inner, policy, first=lambda x: x):
    """Of eight functions in a region, in tensors as large as the argument."""

    def stack(x):
        x = first(x)
        for _ in range(8):
            x = inner(x)
        return x

    region, x = remat(stack, policy=policy), seeded(1 << 10)
    run = grad(lambda x: grad(lambda x: region(x).sum())(x).sum())
    run(x)
    with LiveBytes() as memory:
        run(x)
    return memory.peak / x.untyped_storage().nbytes()


def test_inner_regions_of_another_policy_bound_second_derivatives():
    """As they do first ones; regions of its own policy, which saves each, are one with it."""
    policy = policies.save_only_these_names("part")
    peak = functools.partial(peak_of_second_derivative, policy=policy)

    assert peak(remat(six)) < peak(remat(six, policy=policy)) == peak(six)


@pytest.mark.parametrize(
    "policy",
    [policies.save_only_these_names("first"), *swept([policies.budget(1 << 14)])],
    ids=["one value", "a budget"],
)
def test_inner_regions_bound_second_derivatives_where_they_bound_first(policy):
    """Those of its own policy, too, where that saves less than each of them computes."""
    first = functools.partial(checkpoint_name, name="first")
    peak = functools.partial(
        peak_of_second_derivative, policy=policy, first=lambda x: first(x.sin())
    )

    assert 2 * peak(remat(six, policy=policy)) < peak(six)


def test_the_same_function_inside_and_outside():
    """A region that is called by itself and inside another keeps a policy for each."""
    inner = remat(inner_function, policy=policies.everything_saveable)
    outer = remat(twice(inner))

    assert backward_operators(inner, X)["aten.sin"] == 0
    assert backward_operators(outer, X)["aten.sin"] == 3
    assert backward_operators(inner, X)["aten.sin"] == 0


def test_inner_policies_are_told_apart():
    """Outer functions of one code share no trace where their regions' policies differ."""
    for inner, extra in zip(POLICIES, ORACLE["nothing"], strict=True):
        region = remat(twice(remat(inner_function, policy=POLICIES[inner])))
        assert backward_operators(region, X)["aten.sin"] == extra, inner


@pytest.mark.parametrize("where", ["cell", "attribute", "container"])
def test_a_changed_inner_policy_is_seen(where):
    """A region that takes another's place brings its policy with it."""
    held = SimpleNamespace(attribute=None, container=[None])

    def fun(x):
        f = {"cell": region, "attribute": held.attribute}.get(where, held.container[0])
        return f(f(x))

    outer = remat(fun)
    for inner, extra in zip(POLICIES, ORACLE["nothing"], strict=True):
        region = remat(inner_function, policy=POLICIES[inner])
        held.attribute, held.container[0] = region, region
        assert backward_operators(outer, X)["aten.sin"] == extra, inner


class _Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(seeded(4, 4))

    def forward(self, x):
        return (x @ self.weight).sin()


@pytest.mark.parametrize("is_traced_before", [False, True])
def test_an_inner_region_brings_its_parameters(is_traced_before):
    """A region inside that has a trace already lifts the tensors that it captures."""
    module = _Inner()
    inner, x = remat(module), seeded(3, 4)
    if is_traced_before:
        inner(x.requires_grad_())

    outer = remat(lambda x: inner(inner(x)))
    outer(x).sum().backward()
    weight = module.weight
    found, weight.grad = weight.grad, None
    ((x @ weight).sin() @ weight).sin().sum().backward()

    assert_bitwise(found, weight.grad)


def test_an_inner_region_reaches_values_of_the_outer():
    """A closure over what the outer trace computes is lifted as any captured tensor."""

    def plain(w, x, region=lambda fun: fun):
        scaled = w * 2

        def inner(x):
            return torch.tanh(x @ scaled) * w[0]

        return region(inner)(x).sum()

    outer = remat(lambda w, x: plain(w, x, remat))
    w, x = seeded(4, 4), seeded(3, 4)
    leaves = [w.clone().requires_grad_(), x.clone().requires_grad_()]

    assert_bitwise(
        torch.autograd.grad(outer(*leaves), leaves),
        torch.autograd.grad(plain(*leaves), leaves),
    )
    for transform in (grad, jacfwd, hessian, lambda f: vmap(grad(f), (None, 0))):
        assert_close(transform(outer)(w, x), transform(plain)(w, x))


CONSTANTS: dict[str, Callable[..., torch.Tensor]] = {
    "factor": lambda x, y: x * y * torch.tensor([1.0, 0.0, 3.0]),
    "index": lambda x, y: x * y[:, torch.tensor([1, 0, 2])],
    "list": lambda x, y: x * y[:, [1, 0, 2]],
}


@pytest.mark.contract
@pytest.mark.parametrize("around", [False, True], ids=["static", "open"])
@pytest.mark.parametrize("inside", [False, True], ids=["static", "open"])
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_region_inside_makes_constants(name: str, inside: bool, around: bool) -> None:
    """Met first in the trace around it, and traced again there for other cotangents."""
    function = CONSTANTS[name]
    inner = remat(function, dynamic_shapes=inside)
    outer = remat(lambda x, y: inner(x, y) * 2 + y, dynamic_shapes=around)
    inner.cache_clear()
    outer.cache_clear()
    args = [seeded(2, 3).requires_grad_(), seeded(2, 3, seed=1).requires_grad_()]

    def gradients(f: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        y = f(*args)
        return [y, *torch.autograd.grad((y.T * seeded(3, 2, seed=2)).sum(), args)]

    assert_close(gradients(outer), gradients(lambda x, y: function(x, y) * 2 + y))
