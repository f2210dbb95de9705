"""Results that are no tensors, and tensors without numbers: what both tools say of them."""

import numpy as np
import pytest
import torch

from remat import RematError
from remat.testing import NotEquivalentError, assert_equivalent, first_difference
from tests.support import seeded

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script", "ignore:There is a performance drop"
)

# What is made anew by each call, and is no tensor.
LEAVES = {
    "nan": lambda: float("nan"),
    "complex nan": lambda: complex("nan"),
    "array": lambda: np.arange(3),
    "array with nan": lambda: np.array([1.0, np.nan, -0.0]),
    "no element": lambda: np.ones((0, 2)),
    "texts": lambda: np.array(["a", "b"]),
    "objects": lambda: np.array([None, float("nan")]),
    "scalar": lambda: np.float32("nan"),
}


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES)
def test_leaves_that_are_no_tensors_are_compared_by_contents(make):
    """A NaN is itself, an array is what it holds, its shape and its dtype."""

    def fun(x):
        return x.sin(), make()

    assert assert_equivalent(fun, fun)(seeded(3)).excused == ()
    assert first_difference(fun, fun)(seeded(3)) is None


UNLIKE = {
    "number": (float("nan"), 1.0),
    "class": (1, 1.0),
    "element": (np.array([1.0, np.nan]), np.array([np.nan, 1.0])),
    "shape": (np.ones((1, 2)), np.ones((2, 1))),
    "dtype": (np.ones(2), np.ones(2, np.float32)),
    "array": (np.ones(1), 1.0),
    "tensor": (1.0, torch.ones(())),
}


@pytest.mark.parametrize(("one", "other"), UNLIKE.values(), ids=UNLIKE)
def test_leaves_that_are_no_tensors_may_differ(one, other):
    """Where one differs, both tools tell."""
    f, g = (lambda x: (x.sin(), one)), (lambda x: (x.sin(), other))

    with pytest.raises(NotEquivalentError, match="the structure of the outputs: is "):
        assert_equivalent(f, g)(seeded(3))
    assert first_difference(f, g)(seeded(3)) is not None


def on_meta(x):
    return x.detach().to("meta")


@pytest.mark.parametrize(
    ("f", "g", "device"),
    [
        (torch.sin, torch.cos, "meta"),
        (on_meta, on_meta, None),
        (torch.clone, on_meta, None),
        (on_meta, torch.clone, None),
    ],
    ids=["arguments", "results", "of the second", "of the first"],
)
def test_results_without_numbers_are_refused(f, g, device):
    """On the meta device nothing would be compared."""
    x = seeded(3).to(device)

    for check in (assert_equivalent, first_difference):
        with pytest.raises(RematError, match="the output") as caught:
            check(f, g)(x)
        assert str(caught.value).endswith(
            "the output (float64[3]): is on the meta device. Results are compared as "
            "numbers, which a meta tensor does not have. Pass tensors on a real device, "
            "small ones if memory is short."
        )


def test_what_is_captured_may_have_no_numbers():
    """Where results have some, they are compared."""
    unset = torch.empty(3, device="meta")

    def fun(x):
        return x.sin() * len(unset)

    assert assert_equivalent(fun, fun, transforms=["backward"])(seeded(3))
    assert first_difference(fun, fun)(seeded(3)) is None
