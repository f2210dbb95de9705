"""`interop.torch`: checkpoints in each other, as torch's `TestNestedCheckpoint` has them."""

import functools

import pytest
import torch

from remat import RematWarning
from remat.interop.torch import checkpoint
from tests.interop.layers import nested
from tests.support import assert_bitwise, assert_close, backward_operators, run, seeded

pytestmark = [
    pytest.mark.contract,
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]


def gradient_of(function):
    """A function that takes a derivative inside, by torch.autograd.grad."""

    def gradient(x):
        with torch.enable_grad():
            out = function(x)
        (found,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return found

    return gradient


def test_nested():
    """test_autograd.py: test_nested_checkpoint, test_nested_checkpoint_two_children."""

    def f(x):
        return x.sin().exp().sin()

    def g(x):
        return x.cos().sin().exp()

    def both(x):
        return nested(g)(nested(f)(x))

    x = seeded(3, 3).requires_grad_()
    plain = gradient_of(gradient_of(lambda x: g(f(x))))(x)

    assert_close(gradient_of(gradient_of(nested(both)))(x), plain)
    assert_close(gradient_of(gradient_of(nested(nested(both))))(x), plain)


@pytest.mark.parametrize("by", [gradient_of, torch.func.grad])
def test_a_derivative_inside(by):
    """test_autograd.py: test_nested_checkpoint_two_children, a derivative in a checkpoint."""

    def inner(x):
        return by(lambda x: x.sin().exp().sum())(x)

    args = [seeded(3)]
    assert_close(run(nested(inner), args), run(inner, args))


def test_nested_arguments():
    """test_autograd.py: ..._non_tensor_inputs_and_outputs, test_nested_checkpoint_kwargs."""

    def fn(k, a, b, f, scale=None):
        return f(k * a * b.exp()) * scale, 1, "abcd"

    a, b, scale = (torch.tensor(2.0 + i, requires_grad=True) for i in range(3))
    found = checkpoint(fn, 3, a, b, torch.sin, scale=scale, use_reentrant=False)
    expected = fn(3, a, b, torch.sin, scale=scale)

    assert found[1:] == expected[1:]
    assert_bitwise(
        torch.autograd.grad(found[0], (a, b, scale)),
        torch.autograd.grad(expected[0], (a, b, scale)),
    )
    with pytest.raises(ValueError, match=r"takes no keyword arguments.*got scale"):
        checkpoint(fn, 3, a, b, torch.sin, scale=scale, use_reentrant=True)


def test_a_hook_on_the_node_of_the_input():
    """test_autograd.py: test_nested_checkpoint_same_graph."""
    a, calls = torch.tensor(1.0, requires_grad=True), []
    out = nested(lambda a: a.sin().cos().sin())(a)
    out.grad_fn.next_functions[0][0].register_hook(lambda *_: calls.append(1))

    out.backward()

    assert len(calls) == 1


def test_a_backward_inside_a_backward():
    """test_autograd.py: test_nested_checkpoint_reentrant_backwards."""
    a = torch.tensor(1.0, requires_grad=True)
    x, out = checkpoint(lambda a: (a.sin().cos(), a.cos()), a, use_reentrant=False)
    other = x.exp()
    other.grad_fn.register_hook(lambda *unused: out.backward(retain_graph=True))

    other.backward(retain_graph=True)

    x, out = a.sin().cos(), a.cos()
    assert_close(a.grad, sum(torch.autograd.grad((x.exp(), out), a)))


def test_nothing_more_than_is_needed_runs_again():
    """test_autograd.py: test_nested_checkpoint_set_early_stop, and its ..._no_recompution_needed."""
    tail = backward_operators(nested(lambda x: x.sin().cos().clone()), seeded(3))
    assert (tail["aten.clone"], tail["aten.sin"]) == (
        0,
        2,
    )  # once for the derivative of cos
    assert backward_operators(nested(torch.sin), seeded(3)) == {
        "aten.cos": 1,
        "aten.mul": 1,
    }

    # Dead work in the middle, which stopping early runs too.
    def middle(x):
        (x.exp() * 2).sum()
        return x.sin().cos()

    assert backward_operators(nested(middle), seeded(3))["aten.exp"] == 0


def test_early_stop_cannot_be_turned_off():
    """...which is said, except where the function runs again, or torch says nothing."""
    with pytest.warns(RematWarning, match=r'engine="rerun" to checkpoint, which'):
        checkpoint(torch.sin, seeded(3).requires_grad_(), early_stop=False)
    checkpoint(
        torch.sin, seeded(3).requires_grad_(), early_stop=False, use_reentrant=True
    )

    whole = functools.partial(
        checkpoint, lambda x: x.sin().clone(), engine="rerun", early_stop=False
    )
    assert backward_operators(whole, seeded(3))["aten.clone"] == 1
