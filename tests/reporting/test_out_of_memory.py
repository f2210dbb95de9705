"""Out of memory: the exception names the regions and the values that held memory.

"when a backward or forward under remat runs out of memory, the exception names the regions
and values that held it (a note added to the exception)."
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad

from remat import checkpoint_name, policies, remat, scan, schedules
from remat.testing import assert_equivalent
from tests.reporting.models import batch, block, parameters

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:.*:remat.RematWarning"),
]

_ABSURD = 2**60


class Greedy(torch.autograd.Function):
    """The identity, which asks for an exbibyte in its forward or in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        ctx.where = where
        return _ask(x.sin(), where == "forward")

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _ask(grad_outputs[0].cos(), ctx.where == "backward"), None


def _ask(x: Tensor, really: bool) -> Tensor:
    return x + torch.empty(_ABSURD, dtype=torch.uint8).sum() if really else x


def greedy(where: str) -> Callable[[Tensor], Tensor]:
    """A region whose forward or backward finds no memory."""

    def hungry(x: Tensor) -> Tensor:
        return Greedy.apply(x, where)  # pyright: ignore[reportUnknownMemberType, reportReturnType]

    return remat(hungry)


def loss(where: str) -> Callable[[Any, Tensor], Tensor]:
    """Two layers that save their attention, then a region that asks for too much."""
    layer = remat(block, policy=policies.save_only_these_names("attn"))
    last = greedy(where)

    def loss(given: Any, x: Tensor) -> Tensor:
        for p in given:
            x = layer(p, x)
        return last(x).sum()

    return loss


def by_backward(f: Callable[..., Tensor], given: Any, x: Tensor) -> None:
    """A step of plain autograd."""
    for p in given:
        for each in p.values():
            each.requires_grad_()
    f(given, x).backward()


def by_grad(f: Callable[..., Tensor], given: Any, x: Tensor) -> None:
    """A step of torch.func."""
    grad(f)(given, x)


def by_backward_watched(f: Callable[..., Tensor], given: Any, x: Tensor) -> None:
    """A step of plain autograd that somebody looks at."""
    from tests.support import LiveBytes

    with LiveBytes():
        by_backward(f, given, x)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("step", [by_backward, by_backward_watched, by_grad])
def test_the_note_names_regions_and_values(
    step: Callable[..., None], where: str
) -> None:
    """Who failed, who held memory, how much, and the values with their lines."""
    with pytest.raises(RuntimeError, match=r"allocate memory|out of memory") as caught:
        step(loss(where), parameters(2), batch())

    (note,) = caught.value.__notes__
    assert note.startswith(f"remat: out of memory in the {where} of the region ")
    assert "hungry" in note.splitlines()[0]
    assert "block: " in note
    assert '"attn" (models.py:' in note
    assert "remat.report" in note


def test_bytes_are_those_that_were_held() -> None:
    """Two layers hold an input and their attention; parameters do not count."""
    given, x = parameters(2), batch()

    with pytest.raises(RuntimeError) as caught:
        by_backward(loss("forward"), given, x)

    (note,) = caught.value.__notes__
    helper = (
        2 * 2 * 16 * 4
    )  # attention's log-sum-exp, which only the newest torch saves
    attention, between = 2 * x.nbytes, x.nbytes
    sizes = {attention + between, attention + between + 2 * helper}
    assert any(f"held {size / 1024:.1f} KiB" in note for size in sizes)
    assert "  2 x 4.0 KiB" in note
    assert "`p.qkv`" not in note


def failing(error: Exception) -> Any:
    """A region of a sine whose backward raises."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            raise error

    def fails(x: Tensor) -> Tensor:
        return Failing.apply(x)  # pyright: ignore[reportUnknownMemberType, reportReturnType]

    return remat(fails, engine="rerun")


def test_another_error_has_no_note() -> None:
    """What is no shortage passes as it is."""
    region = failing(RuntimeError("no luck"))

    with pytest.raises(RuntimeError, match="no luck") as caught:
        region(torch.ones(2, requires_grad=True)).sum().backward()

    assert not getattr(caught.value, "__notes__", [])


def test_what_runs_again_in_python_is_named_too() -> None:
    """engine="rerun" has no values of its own, but a name and its inputs."""

    def hungry(x: Tensor) -> Tensor:
        return Greedy.apply(x, "backward")  # pyright: ignore[reportUnknownMemberType, reportReturnType]

    region: Any = remat(hungry, engine="rerun")
    x = torch.ones(256, requires_grad=True)

    with pytest.raises(RuntimeError) as caught:
        region(region(x * 2)).sum().backward()

    (note,) = caught.value.__notes__
    assert "hungry: 2.0 KiB" in note


def test_an_accelerators_error_is_recognized() -> None:
    """`torch.OutOfMemoryError`, raised in a backward, gets the note."""
    region = failing(torch.OutOfMemoryError("CUDA out of memory."))

    with pytest.raises(torch.OutOfMemoryError) as caught:
        region(torch.ones(2, requires_grad=True) * 2).sum().backward()

    assert caught.value.__notes__[0].startswith("remat: out of memory in the backward")


def test_a_region_that_found_no_memory_works_again() -> None:
    """Nothing is left behind by the error."""
    fun = remat(lambda x: checkpoint_name(x.sin(), "s").exp().sin())
    with pytest.raises(RuntimeError):
        by_backward(loss("backward"), parameters(2), batch())

    assert_equivalent(fun, fun, transforms=["backward"])(torch.ones(3).double())


def test_a_scheduled_stack_is_named() -> None:
    """Its stages have one name; the error of the backward is the user's own."""

    def hungry(x: Tensor, w: Tensor) -> tuple[Tensor, None]:
        return greedy_in_backward(x * w), None

    greedy_in_backward = greedy("backward")
    x, ws = torch.ones(256, requires_grad=True), torch.ones(4, 256)

    with pytest.raises(RuntimeError) as caught:
        scan(hungry, x, ws, schedule=schedules.Every(2))[0].sum().backward()

    assert any("hungry" in note for note in caught.value.__notes__)
