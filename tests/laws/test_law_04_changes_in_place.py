"""Law 4. Hands off, where somebody changes a tensor in place.

"No argument is mutated or truncated (except buffers that `fun` itself mutates, written
back once); a caller may [...] change an output in place where plain code may [...]. A
later in-place change of a saved tensor raises."
"""

import pytest
import torch

from remat import (
    MutationError,
    SavedTensorModifiedError,
    checkpoint_name,
    policies,
    remat,
)
from tests.support import assert_bitwise, assert_close, run, seeded

# Small functions save no memory under some of the policies, and law 5 tests that warning.
pytestmark = pytest.mark.filterwarnings("ignore::remat.RematWarning")

POLICIES = {
    "nothing": None,
    "everything": policies.everything_saveable,
    "name": policies.save_only_these_names("y"),
}


@pytest.mark.contract
@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_may_be_changed_in_place(policy):
    """An output that plain code may change in place may be changed, and the others stay."""

    def fun(x):
        y = checkpoint_name(x.sin(), "y")
        return y + 1, y.sin().exp().sum(0), y.cos() * 2

    def changed(f):
        def after(x):
            first, second, third = f(x)
            first.mul_(x)
            third[0] = second
            return first, second.clone(), third.add_(first)

        return after

    region = remat(fun, policy=POLICIES[policy])
    args = (seeded(4, 5),)

    assert_close(run(changed(region), args), run(changed(fun), args))


def test_a_view_output_may_be_changed_in_place():
    """An output that is a view of another value inside may be changed in place."""

    def fun(x):
        return (x.sin() * x).exp().add(1.0).T, (x.cos() * x).sum()

    def changed(f):
        def after(x):
            first, second = f(x)
            first.mul_(2.0)[0].sin_()
            return first, second

        return after

    args = (seeded(4, 5),)
    assert_close(run(changed(remat(fun)), args), run(changed(fun), args))


SHARING = {
    "a part": lambda y: (y, y[0]),
    "a part first": lambda y: (y[:, 1], y),
    "itself": lambda y: (y, y),
    "another shape": lambda y: (y.view(-1), y, y.T),
    "parts": lambda y: (y[0], y[1:]),
    "a detached part": lambda y: (y, y[:2].detach()),
}


@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("returned", SHARING)
def test_outputs_that_share_memory_change_together(returned, engine):
    """And so do their gradients, whichever is changed."""
    w = seeded(3, 3, seed=1)

    def fun(x):
        return SHARING[returned]((x @ w).sin())

    def changed(f):
        def after(x, place):
            outputs = f(x)
            outputs[place].mul_(2)
            return sum(each.square().sum() for each in outputs)

        return after

    region, x = remat(fun, engine=engine), seeded(3, 3)
    for place in range(len(fun(x))):
        found, expected = (
            run(lambda x: changed(f)(x, place), (x,))  # noqa: B023
            for f in (region, fun)
        )
        assert_close(found, expected)
    mapped = torch.vmap(region)(x.expand(2, 3, 3))
    assert_close(mapped, torch.vmap(fun)(x.expand(2, 3, 3)))


@pytest.mark.contract
@pytest.mark.parametrize("policy", ["everything", "name"])
def test_a_changed_saved_output_raises(policy):
    """A saved value that is an output must not be changed before the backward."""

    def fun(x):
        return checkpoint_name(x.sin().exp(), "y")

    x = seeded(5).requires_grad_()
    y = remat(fun, policy=POLICIES[policy])(x)
    y.mul_(2.0)

    with pytest.raises(RuntimeError, match=r"modified|changed"):
        y.sum().backward()


@pytest.mark.contract
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("change", ["whole", "view", "data_of_leaf"])
def test_a_changed_argument_raises(policy, change):
    """An argument that the backward reads must not be changed before it."""

    def fun(x):
        return checkpoint_name(x.sin(), "y").exp().sin()

    leaf = seeded(5).requires_grad_()
    x = leaf if change == "data_of_leaf" else leaf * 1.0
    out = remat(fun, policy=POLICIES[policy])(x)
    with torch.no_grad():
        (x[:2] if change == "view" else x).add_(1.0)

    with pytest.raises(RuntimeError, match=r"modified|changed"):
        out.sum().backward()


def product(p, x):
    """Its backward reads both, and `p` once more in the recomputation."""
    return (p["w"] * x).sin()


def changed_parameter():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh())
    loss = remat(module)(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    torch.optim.SGD(module.parameters(), 0.1).step()
    return loss.backward


def changed_argument():
    p = {"w": seeded(3).requires_grad_() * 1.0}
    loss = remat(product)(p, seeded(3, seed=1)).sum()
    p["w"].add_(1.0)
    return loss.backward


def changed_captured():
    w = seeded(3).requires_grad_()
    loss = remat(lambda x: product({"w": w}, x))(seeded(3, seed=1)).sum()
    with torch.no_grad():
        w.add_(1.0)
    return loss.backward


def changed_output():
    fun = remat(lambda x: checkpoint_name(x.sin().exp(), "y"), policy=POLICIES["name"])
    y = fun(seeded(3).requires_grad_())
    y.mul_(2.0)
    return y.sum().backward


def changed_between_derivatives():
    p = {"w": seeded(3).requires_grad_() * 1.0}
    loss = remat(product)(p, seeded(3, seed=1)).sum()
    (slope,) = torch.autograd.grad(loss, p["w"], create_graph=True)
    p["w"].add_(1.0)
    return slope.sum().backward


CHANGES = {
    changed_parameter: (
        "`self.0.weight` (float32[3, 2]), which waits for the backward of the region "
        "Sequential: was changed in place since the forward, like 1 more of its tensors."
    ),
    changed_argument: (
        "`p.w` (float64[3]), which waits for the backward of the region product: was "
        "changed in place since the forward."
    ),
    changed_captured: "closure variable `w` (float64[3]), which waits for the backward",
    changed_output: "an output, which waits for the backward of the region ",
    changed_between_derivatives: "a tensor (float64[3]), which waits for the backward",
}


@pytest.mark.contract
@pytest.mark.parametrize("change", CHANGES)
def test_the_error_names_what_was_changed(change):
    """The tensor, its shape and the region, where autograd tells a shape alone."""
    backward = change()

    with pytest.raises(SavedTensorModifiedError) as raised:
        backward()
    assert str(raised.value).startswith(CHANGES[change])


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("which", ["argument", "captured", "mapped", "twice"])
def test_a_change_after_a_torch_func_forward_raises(which, engine):
    """Its wrappers do not tell autograd, which goes on with the new numbers."""
    p, x, cotangent = {"w": seeded(3)}, seeded(3, seed=1), seeded(3, seed=2)
    region = remat(product, engine=engine)
    over_x = remat(lambda x: product(p, x), engine=engine)
    calls = {
        "argument": lambda: torch.func.vjp(region, p, x),
        "captured": lambda: torch.func.vjp(over_x, x),
        "mapped": lambda: torch.func.vjp(torch.func.vmap(region), p, x),
        "twice": lambda: torch.func.vjp(
            lambda p, x: torch.func.vjp(region, p, x)[1](cotangent), p, x
        ),
    }

    pull_back = calls[which]()[1]
    given = (cotangent,) if which != "twice" else (({"w": cotangent}, cotangent),)
    expected = pull_back(*given)
    assert_bitwise(pull_back(*given), expected)
    p["w"].add_(1.0)
    with pytest.raises(SavedTensorModifiedError, match="changed in place"):
        pull_back(*given)


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("change", ["whole", "view"])
def test_a_change_inside_functionalize_raises(change, engine):
    """Its tensors count no writes; what was written before the forward is no change."""
    region = remat(lambda x, w: (x @ w).tanh().sum(), engine=engine)

    def gradient(x, w, *, changes_after):
        x, one = x * 1, torch.ones((), dtype=torch.float64)
        part = x if change == "whole" else x[0]
        part.add_(1.0)
        pull_back = torch.func.vjp(lambda w: region(x, w), w)[1]
        if changes_after:
            part.add_(1.0)
        return pull_back(one)

    run = torch.func.functionalize(gradient)
    args = seeded(3, 4), seeded(4, 2, seed=1)
    assert_bitwise(
        run(*args, changes_after=False), gradient(*args, changes_after=False)
    )
    with pytest.raises(SavedTensorModifiedError, match="changed in place"):
        run(*args, changes_after=True)


MUTATIONS = {
    "whole": lambda x: x.add_(1.0),
    "part": lambda x: x[0].mul_(2.0),
    "view": lambda x: x.T.sin_(),
}
mutations = pytest.mark.parametrize("mutation", MUTATIONS)


@mutations
def test_a_function_that_changes_a_differentiated_argument_is_refused(mutation):
    """An in-place operator on an argument that wants a gradient raises, changing nothing."""

    def fun(x, y):
        MUTATIONS[mutation](x)
        return (x * y).sin()

    x, y = seeded(3, 4).requires_grad_() * 1.0, seeded(3, 4, seed=1).requires_grad_()
    before = x.detach().clone()

    with pytest.raises(MutationError, match="in place"):
        remat(fun)(x, y)
    assert_bitwise(x.detach(), before)


@mutations
def test_a_buffer_is_written_back_once(mutation):
    """A tensor without gradient that the function changes ends as plain code leaves it."""

    def fun(x, y):
        MUTATIONS[mutation](x)
        return (x * y).sin().exp()

    def ends(f):
        buffer, y = seeded(3, 4), seeded(3, 4, seed=1).requires_grad_()
        f(buffer, y).sum().backward()
        return buffer, y.grad

    assert_bitwise(ends(remat(fun)), ends(fun))
