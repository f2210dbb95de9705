"""Law 4. Hands off, where somebody changes a tensor in place.

"No argument is mutated or truncated (except buffers that `fun` itself mutates, written
back once); a caller may [...] change an output in place where plain code may [...]. A
later in-place change of a saved tensor raises."
"""

import pytest
import torch

from remat import MutationError, checkpoint_name, policies, remat
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
