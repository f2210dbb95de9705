"""`first_difference` names the first operator at which two computations part."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from remat import checkpoint_name, policies, remat
from remat.testing import first_difference
from remat.testing._compare import Gap
from tests.functions import FUNCTIONS
from tests.support import name_of_generator, seeded

BY_NAME = {function.name: function for function in FUNCTIONS}
pytestmark = pytest.mark.filterwarnings("ignore::remat.RematWarning")


def hidden(x, approximate):
    h = checkpoint_name(F.gelu(x @ x.T, approximate=approximate), "hidden")
    return h.softmax(-1) * 2.0


def exact(x):
    return hidden(x, "none")


def by_tanh(x):
    return hidden(x, "tanh")


@pytest.mark.parametrize("name", ["mlp", "attention_math", "in_place", "many_outputs"])
def test_a_region_does_not_differ(name):
    """Recomputation, dropped views and pure operators are no differences."""
    fun, make_args = BY_NAME[name].fun, BY_NAME[name].make_args

    found = first_difference(fun, remat(fun, policy=policies.save_matmul_outputs))

    assert found(*make_args()) is None


def test_the_operator_the_name_and_the_line():
    """The first operator, not the output where it shows."""
    found = first_difference(exact, by_tanh)(seeded(3, 3))

    assert found is not None
    assert (found.phase, found.op, found.name) == ("forward", "aten.gelu", "hidden")
    assert found.source.startswith("test_first_difference.py:")
    assert str(found).startswith(
        'the first difference is in the forward: aten.gelu "hidden" at test_first_diff'
    )
    assert found.gap is not None
    assert found.gap.num_elements == 9


class Slope(torch.autograd.Function):
    """The sine; its gradient reads another cosine than it should."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, *grad_outputs):
        (x,) = ctx.saved_tensors
        return grad_outputs[0] * (x + 0.5).cos()


def test_a_difference_in_the_backward():
    """Where forwards agree, the backward's operators are matched."""
    found = first_difference(torch.sin, Slope.apply)(seeded(3))

    assert found is not None
    assert (found.phase, found.op, found.source) == ("backward", "aten.cos", "")


def test_it_looks_under_a_transform():
    """Of both functions transformed: the operator, its name and its line."""
    f, g = (torch.func.vmap(torch.func.grad(each)) for each in (root_sum, other_sum))

    found = first_difference(f, g)(seeded(4, 3).abs())

    assert found is not None
    assert (found.op, found.name) == ("aten.exp", "hidden")
    assert found.source.startswith("test_first_difference.py:")


def root_sum(x):
    return checkpoint_name(x.sin().exp(), "hidden").sum()


def other_sum(x):
    return checkpoint_name((x.sin() * 1.001).exp(), "hidden").sum()


def test_values_of_one_operator_are_told_apart():
    """Of several products of one shape, the one that has no equal in the other function."""
    found = first_difference(
        lambda x: x.sin() * x.sin().detach(), lambda x: x.sin() * x.sin()
    )(seeded(3, 3))

    assert found is not None
    assert found.name == "the gradient of argument `x`"
    assert found.phase == "backward"


def lost(x):
    return x.detach().sin()


def overwriting(x):
    y = (x * 1.0).sin()
    with torch.no_grad():
        x.mul_(2.0)
    return y


def drawing(x):
    torch.rand(3)
    return x.sin()


@pytest.mark.parametrize(
    ("g", "text"),
    [
        (lost, "the gradient of argument `x`: is missing in the second function only."),
        (
            lambda x: x.sin().float(),
            "the output: is float64[3] in the first and float32",
        ),
        (
            lambda x: x.sin()[:2],
            "the output: is float64[3] in the first and float64[2]",
        ),
        (overwriting, "is in argument `x` after the call: element (0,) is"),
        (drawing, f"is in {name_of_generator()} after the call: element"),
    ],
    ids=["gradient", "dtype", "shape", "argument", "generator"],
)
def test_a_result_alone_may_differ(g, text):
    """Where no operator differs, the result is named."""
    found = first_difference(lambda x: x.sin(), g)(seeded(3))

    assert found is not None
    assert found.op == ""
    assert text in str(found)


def product_with(weight):
    return lambda x: x @ weight


def test_captured_tensors_of_one_label_are_told_apart():
    """Closures of one factory: a gradient that all but the last lose."""
    weights = [seeded(3, 3, seed=k).requires_grad_() for k in range(2)]
    one, two = map(product_with, weights)
    lost = product_with(weights[0].detach())

    def both(x):
        return one(x) + two(x)

    found = first_difference(both, lambda x: lost(x) + two(x))(seeded(2, 3))

    assert found is not None
    assert found.name == "the gradient of closure variable `weight`"
    # Met in another order they are the same tensors.
    assert first_difference(both, lambda x: two(x) + one(x))(seeded(2, 3)) is None


def test_a_copy_of_a_module_is_compared_by_its_own_state():
    """Its buffers change as those of the first do; where they do not, that is told."""
    plain = torch.nn.BatchNorm1d(3)
    other = copy.deepcopy(plain)

    assert first_difference(plain, other)(torch.randn(4, 3)) is None
    other.momentum = 0.2
    found = first_difference(plain, other)(torch.randn(4, 3))
    assert found is not None
    assert found.name == "self.running_mean after the call"


def with_dropout(x):
    return F.dropout(x.tanh(), 0.5)


def row_by_row(x):
    filled = x.new_empty(x.shape)
    filled[:2], filled[2:] = x[:2].tanh(), x[2:].tanh()
    return filled


def by_indices(x):
    filled, is_large = torch.empty_like(x), x > 0
    filled[is_large], filled[~is_large] = x[is_large].tanh(), 0.5
    return filled


def counted(x):
    places = torch.empty(x.shape, dtype=torch.int64)
    return x * places.copy_(x.argsort())


@pytest.mark.parametrize("fun", [with_dropout, row_by_row, by_indices, counted])
def test_memory_that_is_not_set_is_no_difference(fun):
    """What it held before is no result, also where it is filled part by part."""
    junk = itertools.count()

    def after_junk(x, factor):
        with _disable_current_modes():
            for _ in range(8):  # what the next tensors of this size begin with
                torch.full_like(x, next(junk), requires_grad=False)
        return (fun(x) * factor).exp()

    def first(x):
        return after_junk(x, 1.0)

    x = seeded(4, 4)
    assert first_difference(first, first)(x) is None
    found = first_difference(first, lambda x: after_junk(x, 1.001))(x)
    assert found is not None
    assert found.op == "aten.mul"


def test_state_and_arguments_stay():
    """Generators end where they were, and arguments are copies."""
    x, state = seeded(3), torch.get_rng_state()

    first_difference(torch.rand_like, torch.rand_like)(x)

    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, seeded(3))


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ([torch.inf, 1.0], [torch.inf, 1.5], "by at most 0.5 (relative 0.5)"),
        ([0.0, 1.0], [2.0, 1.0], "is 0.0 in the first and 2.0 in the second; 1 of 2"),
        ([0.0, 1.0], [2.0, 1.0], "by at most 2 (relative inf)"),
        ([2**60, 0], [2**60 + 1, 0], f"is {2**60} in the first and {2**60 + 1} in"),
        ([2**60, 0], [2**60 + 1, 0], "1 of 2 elements differ, by at most 1 "),
    ],
)
def test_a_difference_is_told_in_figures(one, other, text):
    """Equal infinities differ by nothing, and whole numbers are whole."""
    assert text in str(Gap.between(torch.tensor(one), torch.tensor(other)))


@pytest.mark.parametrize(
    "other", [lambda x: (x.sin(), 4), lambda x: (x.sin(),)], ids=["leaf", "structure"]
)
def test_what_is_no_tensor_differs_too(other: Any) -> None:
    """A leaf, or how many there are, where all tensors agree."""
    found = first_difference(lambda x: (x.sin(), 3), other)(torch.ones(2))

    assert found is not None
    assert found.name == "the structure of the outputs"
    assert "(3,)" in found.mismatch
    assert "the structure of the outputs" in str(found)
