"""`engine="rerun"`: what stands for a tensor of a user's class is of that class, and says the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import TraceError, remat
from tests.support import assert_bitwise, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:.*runs the function again in its backward"),
]


class Scaled(nn.Parameter):
    """A parameter whose product is scaled: by an attribute if it has one, else by -1."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out * getattr(args[1], "scale", -1) if func is torch.mul else out

    def halved(self) -> Tensor:
        return self * 0.5


class Boxes(Tensor):
    """A tensor with a format."""

    form: str


def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.mul(x.sin(), w).sin()


def by_format(x: Tensor, w: Tensor) -> Tensor:
    factor = 2 if getattr(w, "form", "plain") == "double" else 1
    return (x * w * factor).sin()


def by_class(x: Tensor, w: Any) -> Tensor:
    return x.sin() * (w.halved() if isinstance(w, Scaled) else w)


def scaled(**attributes: object) -> Tensor:
    w = Scaled(seeded(3))
    vars(w).update(attributes)
    return w


def boxes() -> Tensor:
    w: Any = seeded(3).as_subclass(Boxes).requires_grad_()
    w.form = "double"
    return w


CASES: dict[str, Any] = {
    "functions of its own": (product, scaled),
    "an attribute": (product, lambda: scaled(scale=3)),
    "a method": (by_class, scaled),
    "an attribute of a tensor": (by_format, boxes),
}


@pytest.mark.parametrize("engine", ["rerun", "auto"])
@pytest.mark.parametrize("is_captured", [False, True], ids=["argument", "captured"])
@pytest.mark.parametrize("case", CASES)
def test_a_class_of_the_users(case: str, is_captured: bool, engine: Any) -> None:
    """Its functions, methods and attributes are those of what it stands for, whenever it runs."""
    fun, make = CASES[case]
    w, x = make(), seeded(3).requires_grad_()

    def given(x: Tensor, w: Tensor) -> Tensor:
        _ = x.isnan().any().item()  # no trace takes it
        return fun(x, w)

    def gradients(wrap: Any) -> Any:
        region = wrap((lambda x: given(x, w)) if is_captured else given)
        y = region(x) if is_captured else region(x, w)
        (once,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(once.sum(), [x, w])

    again = gradients(lambda fun: remat(fun, engine=engine))
    assert_bitwise(again, gradients(lambda fun: fun))


def test_attributes_are_those_of_the_forward() -> None:
    """Also those of an argument that gets others before the backward."""
    x, w = seeded(3).requires_grad_(), scaled(scale=3)
    (expected,) = torch.autograd.grad(product(x, w).sum(), x)

    y = remat(product, engine="rerun")(x, w)
    vars(w)["scale"] = 5

    assert_bitwise(torch.autograd.grad(y.sum(), x)[0], expected)


def test_a_class_with_slots_is_refused() -> None:
    """What is kept in them cannot be copied by a rule."""

    class Slotted(Tensor):
        __slots__ = ("form",)

    w = seeded(3).as_subclass(Slotted)

    with pytest.raises(TraceError) as caught:
        remat(by_format, engine="rerun")(seeded(3).requires_grad_(), w)

    assert str(caught.value) == (
        "a tensor float64[3] of the class test_a_class_with_slots_is_refused.<locals>."
        'Slotted: has `__slots__`, which engine="rerun" cannot copy. The function runs on '
        "what stands for its tensors. Leave out `__slots__`, or pass "
        "`x.as_subclass(torch.Tensor)`."
    )
