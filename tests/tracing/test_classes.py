"""What makes another tensor of one past all of torch's modes: another class, a parameter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jvp, vmap

from remat import TraceError, remat
from tests.support import assert_bitwise, assert_close, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]
each_engine = pytest.mark.parametrize("engine", ["trace", "auto", "rerun"])


def of_a_result(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin().as_subclass(Tensor)


def of_an_argument(x: Tensor, w: Tensor) -> Tensor:
    return (x.as_subclass(Tensor) * w).sin()


def of_a_parameter(x: Tensor, w: Tensor) -> Tensor:
    return (x * w.as_subclass(Tensor)).sin()


def parameter(x: Tensor, w: Tensor) -> Tensor:
    return (x * nn.Parameter(w)).sin() + w


def itself(x: Tensor, w: Tensor) -> Tensor:
    return x.as_subclass(Tensor)


FUNCTIONS = [of_a_result, of_an_argument, of_a_parameter, parameter, itself]


@each_engine
@pytest.mark.filterwarnings("ignore:.*saves no memory")
@pytest.mark.parametrize("fun", FUNCTIONS)
def test_it_is_that_tensor(fun: Callable[..., Tensor], engine: Any) -> None:
    """Its gradients are plain's under every transform, those of what is captured too."""
    w = nn.Parameter(seeded(3))

    def plain(x: Tensor) -> Tensor:
        return fun(x, w)

    def gradients(function: Callable[..., Tensor]) -> list[Any]:
        x = seeded(3, seed=1).requires_grad_()
        y = function(x)
        return [y, *torch.autograd.grad(y.sum(), [x, w], allow_unused=True)]

    region, x = remat(plain, engine=engine), seeded(2, 3, seed=1)
    assert_bitwise(gradients(region), gradients(plain))
    for transformed in (
        lambda function: vmap(grad(lambda x: function(x).sum()))(x),
        lambda function: hessian(lambda x: function(x).sum())(x[0]),
        lambda function: jvp(function, (x[0],), (x[1],)),
    ):
        assert_close(transformed(region), transformed(plain))


class Named(Tensor):
    pass


def test_another_class_is_refused() -> None:
    """A trace has no such tensors; `engine="auto"` runs the function again."""

    def fun(x: Tensor) -> Tensor:
        return x.sin().as_subclass(Named).cos()

    x = seeded(3).requires_grad_()
    with pytest.raises(TraceError) as caught:
        remat(fun)(x)
    with pytest.warns(match=r"as_subclass\(Named\).*makes a tensor of a subclass"):
        found = remat(fun, engine="auto")(x)

    assert "test_classes.py" in str(caught.value)
    assert str(caught.value).endswith(
        "makes a tensor of a subclass. A trace runs on tensors of a class of its own. "
        'Leave it out, or use engine="rerun", which runs the function again in the backward.'
    )
    assert type(found) is Named
    assert_bitwise(
        torch.autograd.grad(found.sum(), x), torch.autograd.grad(fun(x).sum(), x)
    )
    assert "as_subclass" not in vars(Tensor)
