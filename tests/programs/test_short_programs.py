"""Programs where no dispatch mode listens: the same bits as their single operators."""

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from remat import remat
from remat._torch.tensors import same_bits
from tests.functions import FUNCTIONS
from tests.support import Heard, is_differentiable

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
]


def results(function, region):
    """The outputs of a region and the gradients of their sum, from fixed numbers."""
    args = tree_map_only(
        torch.Tensor,
        lambda t: t.detach().clone().requires_grad_(is_differentiable(t)),
        function.make_args(),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = [
            each for each in tree_leaves(region(*args)) if is_differentiable(each)
        ]
        torch.stack([each.abs().sum() for each in outputs]).sum().backward()
    leaves = [each for each in tree_leaves(args) if is_differentiable(each)]
    return outputs, [each.grad for each in leaves if each.grad is not None]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_the_short_program_gives_the_same_bits(function):
    """Outputs and gradients are those of the single operators that a listener hears."""
    region = remat(function.fun, rng="preserve")
    short = results(function, region)
    with Heard():
        single = results(function, region)

    for found, expected in zip(short, single, strict=True):
        assert [each.stride() for each in found] == [each.stride() for each in expected]
        assert all(map(same_bits, found, expected))
