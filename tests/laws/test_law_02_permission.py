"""Law 2. Permission.

"Walk back from the wanted gradients; stop at an input or at a value that the policy
permits; recompute everything else: what the walk stops at is saved, nothing more.
Constants made inside are recomputed. Aliases are one value. One tensor needed twice is
saved once. Inputs may be held beyond that for a second derivative; `saved_residuals`
marks them."
"""

import pytest
import torch
from torch.func import grad, jacrev, vjp, vmap

from remat import checkpoint_name, policies, remat
from tests.inspection import assert_saves, split_residuals
from tests.support import backward_operators, count_operators, in_turn, seeded

NAMED = policies.save_only_these_names


def sines(x):
    """sin(sin(sin(sin(x)))), every value named."""
    for name in "abcd":
        x = checkpoint_name(x.sin(), name)
    return x


X = seeded(5)
#: policy, sines that the backward runs again, names saved
LADDER = {
    "none": (None, 3, ""),
    "nothing": (policies.nothing_saveable, 3, ""),
    "everything": (policies.everything_saveable, 0, "abc"),
    "a": (NAMED("a"), 2, "a"),
    "b": (NAMED("b"), 2, "b"),
    "c": (NAMED("c"), 2, "c"),
    "a_b": (NAMED("a", "b"), 1, "ab"),
    "a_b_c": (NAMED("a", "b", "c"), 0, "abc"),
    "any_but_b": (policies.save_any_names_but_these("b"), 1, "ac"),
    "anything_except_b": (policies.save_anything_except_these_names("b"), 1, "ac"),
    "output": (NAMED("d"), 3, ""),
    "glob": (NAMED("[bc]"), 1, "bc"),
    "by_op": (policies.by_op("sin"), 0, "abc"),
    "callable": (lambda value: "c" in value.names, 2, "c"),
}
ladder = pytest.mark.parametrize("rung", LADDER)
# That "d" alone saves nothing is worth a warning, and law 5 tests it.
quiet = pytest.mark.filterwarnings("ignore::remat.RematWarning")


@pytest.mark.contract
@quiet
@ladder
def test_ladder_of_sines_under_backward(rung):
    """The backward re-runs the sines that were not saved, and no other operator."""
    policy, again, _ = LADDER[rung]

    counts = backward_operators(remat(sines, policy=policy), X)

    assert counts["aten.sin"] == again
    assert counts["aten.cos"] == 4


@pytest.mark.contract
@quiet
@ladder
def test_ladder_of_sines_saves_exactly(rung):
    """What is saved is what the walk stops at, by name and by measured bytes."""
    policy, _, names = LADDER[rung]

    assert_saves(
        remat(sines, policy=policy), (X,), names=names, size_bytes=40 * len(names)
    )


@quiet
@pytest.mark.parametrize(
    ("rung", "transform"), in_turn(LADDER, ["grad", "vjp", "vmap_grad", "jacrev"])
)
def test_ladder_of_sines_under_torch_func(rung, transform):
    """Under torch.func the counts are those of .backward()."""
    policy, again, _ = LADDER[rung]
    region = remat(sines, policy=policy)
    transformed = {
        "grad": grad(lambda x: region(x).sum()),
        "vjp": lambda x: vjp(region, x)[1](x),
        "vmap_grad": vmap(grad(region)),
        "jacrev": jacrev(region),
    }[transform]
    transformed(X)

    counts = count_operators(transformed, X)

    assert counts["aten.sin"] == 4 + again
    assert counts["aten.cos"] == 4


def test_the_argument_is_a_residual_with_a_path():
    """Arguments that the backward needs are listed by path, once, at their size."""
    region = remat(lambda p, x: (p["w"] * x).sin())
    arguments, _ = split_residuals(region, {"w": X}, X.clone())
    twice, _ = split_residuals(region, {"w": X}, X)

    assert [a.path for a in arguments] == ["p.w", "x"]
    assert [a.path for a in twice] == ["p.w"]
    assert [(tuple(a.shape), a.dtype, a.size_bytes) for a in arguments] == [
        ((5,), torch.float64, 40)
    ] * 2


def test_residuals_describe_themselves():
    """A residual tells its name, operator, shape, dtype, bytes, source line and reason."""
    _, (residual,) = split_residuals(remat(sines, policy=NAMED("b")), X)

    assert residual.name == "b"
    assert residual.op == "aten.sin"
    assert (tuple(residual.shape), residual.dtype) == ((5,), torch.float64)
    assert residual.size_bytes == 40
    assert "test_law_02_permission.py" in str(residual.source)
    assert residual.reason == "permitted by save_only_these_names('b')"


def test_inputs_that_only_a_second_derivative_needs_are_marked():
    """A linear function's argument is no residual of the first derivative."""
    arguments, made = split_residuals(remat(lambda x: x * 2.0 + 1.0), X)

    assert made == []
    assert [(each.path, each.reason) for each in arguments] == [
        ("x", "an argument, held for a second derivative only")
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.view(5, 1),
        lambda y: y.view(1, 5).T.flatten(),
        lambda y: y.expand(3, 5),
        lambda y: y.detach(),
        lambda y: y[None].transpose(0, 1)[..., 0],
    ],
    ids=["view", "transposed", "expanded", "detached", "sliced"],
)
def test_aliases_are_one_value(change):
    """A name on any alias of a value saves the value, once."""

    def fun(x):
        y = x.exp().sin()
        named = checkpoint_name(change(y), "y")
        return (y.cos() * y[None]).sin().sum(0) + named.sum()

    region = remat(fun, policy=NAMED("y"))

    assert_saves(region, (X,), count=1, size_bytes=40)
    assert backward_operators(region, X)["aten.exp"] == 1  # for cos(exp(x))


def test_names_on_two_views_of_one_value_save_it_once():
    """Two named views of one storage are one saved value."""

    def fun(x):
        y = x.exp().sin()
        left, right = (
            checkpoint_name(y[:3], "left"),
            checkpoint_name(y.view(5, 1), "all"),
        )
        return left.cos().sum() + right.sin().sum() + y.cos()

    assert_saves(remat(fun, policy=NAMED("*")), (X,), count=1, size_bytes=40)


@pytest.mark.parametrize("policy", [NAMED("y"), policies.everything_saveable])
def test_one_tensor_needed_twice_is_saved_once(policy):
    """However many operators read a value, its bytes are held once."""

    def fun(x):
        y = checkpoint_name(x.exp().sin(), "y")
        y = checkpoint_name(y, "y")
        return y * y + y.sin() + y.cos() * y.view(5)

    region = remat(fun, policy=policy)
    _, made = split_residuals(region, X)

    assert [residual.name for residual in made].count("y") == 1
    if policy != policies.everything_saveable:
        assert_saves(region, (X,), count=1, size_bytes=40)


def constants(x):
    """A function whose backward needs constants that are made inside."""
    rows = torch.arange(5.0, dtype=x.dtype).cos()
    hidden = torch.ones(5, dtype=torch.bool).tril(-1) if x.dim() > 1 else rows > 0.5
    return (x.sin() * rows.exp()).masked_fill(hidden, 0.0).exp() * torch.full((5,), 2.0)


def test_constants_are_recomputed():
    """A constant made inside is not saved, whatever the policy permits."""
    region = remat(constants, policy=policies.everything_saveable)

    _, made = split_residuals(region, X)
    assert not any(op in str(r.op) for r in made for op in ("arange", "full", "gt"))
    assert {r.dtype for r in made} == {torch.float64}
    assert backward_operators(region, X)["aten.arange"] == 1
    # sin is an argument's, mul and where read constants, exp its own result
    assert_saves(region, (X,), size_bytes=40)
