"""Law 12, where settings of torch's say differently how precise products are.

"Autocast and other numerics switches are part of the signature, and recomputation runs
under the forward's."
"""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remat import remat
from tests.laws.switches import arguments, bfloat16, mlp
from tests.support import deterministic

#: torch's settings of the precision of float32, from the most general to those of products.
FLOAT32: list[Any] = [
    torch.backends,
    torch.backends.cuda.matmul,
    cast(Any, torch.backends.mkldnn).matmul,
]


def precisions() -> list[str]:
    """The precision that is in force, for all backends and for two of them."""
    return [each.fp32_precision for each in FLOAT32]


@contextlib.contextmanager
def precision_of(place: int, value: str) -> Iterator[None]:
    """Another precision by one of these settings, for a while."""
    before = FLOAT32[place].fp32_precision
    _set_precision(place, value)
    try:
        yield
    finally:
        _set_precision(place, before)


def _set_precision(place: int, value: str) -> None:
    backends: Any = torch.backends
    with backends.__allow_nonbracketed_mutation():  # torch's own tests forbid it
        FLOAT32[place].fp32_precision = value


@pytest.fixture
def unset_precisions() -> Iterator[None]:
    """Lets both backends follow the general precision, for a while."""
    with precision_of(1, "none"), precision_of(2, "none"):
        yield


@pytest.mark.contract
@pytest.mark.usefixtures("unset_precisions")
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("place", range(3), ids=["all", "cuda", "mkldnn"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_precisions_that_have_no_common_name(
    place: int, where: str, engine: Any
) -> None:
    """`get_float32_matmul_precision` raises under them; the forward's come back with it."""
    region, leaves, before = remat(mlp, engine=engine), arguments(), precisions()
    around, is_forward = precision_of(place, "tf32"), where == "forward"
    rows: list[tuple[str, list[str]]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            rows.append((str(func.overloadpacket), precisions()))
            return func(*args, **(kwargs or {}))

    with around if is_forward else contextlib.nullcontext():
        forward = precisions()
        y = region(*leaves)
    with contextlib.nullcontext() if is_forward else around:
        backward = precisions()
        with Seen():
            torch.autograd.grad(y.sum(), leaves)
        assert precisions() == backward != forward

    products = [found[1:] for name, found in rows if name == "aten.tanh"]
    # Both "none" and "ieee" mean all bits.
    seen = [[each.replace("none", "ieee") for each in found] for found in products]
    assert seen == [[each.replace("none", "ieee") for each in forward[1:]]]
    assert precisions() == before


@pytest.mark.contract
@pytest.mark.usefixtures("unset_precisions")
@pytest.mark.parametrize("place", range(3), ids=["all", "cuda", "mkldnn"])
def test_a_precision_of_one_backend_makes_another_trace(place: int) -> None:
    def fun(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return mlp(x, w1, w2)

    region, leaves = remat(fun), arguments()
    for _ in range(3):
        region(*leaves)
    before = region.cache_info().misses
    with precision_of(place, "tf32"):
        region(*leaves)
    region(*leaves)

    assert region.cache_info().misses == before + 1


@pytest.mark.contract
@pytest.mark.usefixtures("unset_precisions")
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_precision_that_was_not_set_is_not_set_afterwards(engine: Any) -> None:
    """Its backend follows the general one, before a region as after it."""
    leaves = arguments()
    with bfloat16:
        y = remat(mlp, engine=engine)(*leaves)
    with deterministic():
        y.float().sum().backward()

    with precision_of(0, "tf32"):
        assert precisions() == ["tf32"] * 3
