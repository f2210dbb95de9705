"""`module.to(...)` and its like inside a region: nothing where nothing changes, else refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import MutationError, TraceError, modules, remat
from tests.support import assert_bitwise, grads, seeded

pytestmark = pytest.mark.contract


class Router(nn.Module):
    """A router that converts itself, as those of some mixtures of experts do."""

    scale: Tensor

    def __init__(self, convert: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.classifier = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.convert = convert

    def forward(self, x: Tensor) -> Tensor:
        self.convert(self, x)
        return self.norm(self.classifier(x * self.scale)).sin()


def _assigned(router: Any, x: Tensor) -> None:
    router.classifier = router.classifier.to(x.dtype)


HARMLESS: dict[str, Callable[[Any, Tensor], Any]] = {
    "its own dtype": _assigned,
    "its own device": lambda router, x: router.to(x.device),
    "both": lambda router, x: router.to(device=x.device, dtype=x.dtype),
    "float": lambda router, x: router.float(),
    "of a child": lambda router, x: router.norm.to(x),
    "cpu": lambda router, x: router.classifier.cpu(),
    "its own data": lambda router, x: setattr(
        router.classifier.weight, "data", router.classifier.weight.data.to(x.dtype)
    ),
}
CHANGING: dict[str, Callable[[Any, Tensor], Any]] = {
    "double": lambda router, x: router.double(),
    "there and back": lambda router, x: router.classifier.half().float(),
    "to": lambda router, x: router.to(torch.float64),
}


def _router(convert: Callable[[Any, Tensor], Any]) -> Router:
    torch.manual_seed(0)
    return Router(convert)


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    out = model(x)
    found = torch.autograd.grad(out.square().sum(), [*model.parameters()])
    return [out, *found, *model.buffers()]


@pytest.mark.parametrize("engine", ["trace", "rerun", "auto"])
@pytest.mark.parametrize("convert", HARMLESS.values(), ids=HARMLESS)
def test_a_conversion_to_what_a_module_is(convert: Any, engine: Any) -> None:
    """It changes nothing, and every parameter gets its gradient."""
    plain, model, x = (
        _router(convert),
        _router(convert),
        seeded(3, 4, dtype=torch.float32),
    )
    own = dict(model.named_parameters())
    modules.apply(model, Router, engine=engine)

    for _ in range(2):
        assert_bitwise(_step(model, x), _step(plain, x))

    assert all(own[name] is each for name, each in model.named_parameters())


@pytest.mark.parametrize(
    ("engine", "error"),
    [("trace", TraceError), ("rerun", MutationError), ("auto", TraceError)],
)
@pytest.mark.parametrize("convert", CHANGING.values(), ids=CHANGING)
def test_a_conversion_that_changes_a_module(
    convert: Any, engine: Any, error: type[Exception]
) -> None:
    """It is refused with its line and what to do, and the module is as before."""
    model, x = _router(convert), seeded(3, 4, dtype=torch.float32)
    before = [*model.parameters(), *model.buffers()]

    with pytest.raises(error, match=r"test_conversions\.py:\d+.*onvert .*outside"):
        remat(model, engine=engine)(x)

    after = [*model.parameters(), *model.buffers()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_a_module_that_the_function_makes() -> None:
    """Its tensors are the trace's own: torch converts them."""

    class Scaling(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.arange(4.0))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).sin()

    def fun(x: Tensor) -> Tensor:
        return Scaling().double()(x)

    x = seeded(3, 4, dtype=torch.float64)
    assert_bitwise(grads(remat(fun), [x]), grads(fun, [x]))
