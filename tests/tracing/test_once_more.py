"""A function that runs or is traced once more for a derivative, and raises only then."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import RecomputationError, remat


def _second(y: Tensor, x: Tensor) -> None:
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    first.sum().backward()


def _first(y: Tensor, _: Tensor) -> None:
    y.sum().backward()


@pytest.mark.parametrize(
    ("options", "differentiate"),
    [({"verify": True}, _second), ({"engine": "rerun"}, _first)],
    ids=["traced anew", "rerun"],
)
@pytest.mark.filterwarnings("ignore::remat.RematWarning")
def test_what_a_function_raises_only_then_is_told(options, differentiate):
    """A `StopIteration` out of a backward would say nothing of the region; it is the cause."""
    runs = itertools.count()

    def function(x: Tensor) -> Tensor:
        if next(runs):
            raise StopIteration
        return x.sin()

    region = remat(function, **options)
    x = torch.ones(3, requires_grad=True)
    y = region(x)

    with pytest.raises(
        RecomputationError, match=r"once_more.py:\d+: .*\(StopIteration.*an iterator"
    ) as told:
        differentiate(y, x)

    assert isinstance(told.value.__cause__, StopIteration)


@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.filterwarnings("ignore:.*jit:FutureWarning")
def test_what_torch_raises_inside_of_it_stays_torchs(engine):
    """Forward mode of an operator without a rule for it is refused as without a region."""

    def function(x):
        return F.multi_margin_loss(x, torch.tensor([0, 1]))

    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match="forward AD") as plain:
        torch.func.jvp(function, (x,), (x,))
    with pytest.raises(RuntimeError, match="forward AD") as found:
        torch.func.jvp(remat(function, engine=engine), (x,), (x,))

    assert not isinstance(found.value, RecomputationError)
    assert type(plain.value) is type(found.value)
