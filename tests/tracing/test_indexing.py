"""Numbers in tensors that look up and write, and writes under masks, without reading them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from remat import TraceError, remat
from tests.support import assert_bitwise, assert_close, grads, run, seeded

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


LOOK_UPS: dict[str, Callable[..., Tensor]] = {
    "first": lambda x, i, j: x[i].sin(),
    "two": lambda x, i, j: x.exp()[i, j] * x[i],
    "last": lambda x, i, j: x.sin()[..., j].exp(),
    "new_axes": lambda x, i, j: x[i, None, ..., j, None].sin(),
    "apart": lambda x, i, j: x.sin()[i, :, j].sin(),
    "beside_a_list": lambda x, i, j: x[i, torch.tensor([0, 2])].sin(),
    "in_other_integers": lambda x, i, j: x.sin()[i.to(torch.int32), 1:].cos(),
}


def written(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Writes by numbers in tensors."""
    y = x.sin()
    y[i, 1:, j] = x[0, 1:, 0]
    y[i] += x[j] * 2
    y[..., j] = 3.0
    return y * x


LOOK_UPS["written"] = written


@pytest.mark.contract
@pytest.mark.parametrize("name", LOOK_UPS)
def test_a_number_in_a_tensor_looks_up(name: str) -> None:
    """As a label does in a loss for one example: outside of a trace torch reads it."""
    plain, region = LOOK_UPS[name], remat(LOOK_UPS[name])
    x = seeded(3, 4, 5)
    rows, columns = torch.tensor([0, 1, 2]), torch.tensor([1, -1, 0])

    def second(fun: Callable[..., Tensor], i: Tensor, j: Tensor) -> Tensor:
        return torch.func.jvp(
            torch.func.grad(lambda x: fun(x, i, j).sum()), (x,), (x.cos(),)
        )[1]

    for i, j in zip(rows, columns, strict=True):
        found = grads(lambda x: region(x, i, j), (x,))  # noqa: B023
        assert_bitwise(found, grads(lambda x: plain(x, i, j), (x,)))  # noqa: B023
        assert_close(second(region, i, j), second(plain, i, j))
    assert region.cache_info().misses == 1
    mapped = torch.func.vmap(
        torch.func.grad(lambda x, i, j: region(x, i, j).sum()), in_dims=(None, 0, 0)
    )(x, rows, columns)
    each = [
        torch.func.grad(lambda x: plain(x, i, j).sum())(x)  # noqa: B023
        for i, j in zip(rows, columns, strict=True)
    ]
    assert_close(mapped, torch.stack(each))


def filled(x: Tensor) -> Tensor:
    """Writes numbers under masks: of rows, of single numbers, through a view."""
    y, z = x.sin(), x.detach() > 0
    counts = torch.zeros(3, 4, dtype=torch.int64)
    y[torch.tensor([True, False, True])] = 0.5
    y[:, 1:][z[:, 1:]] = -1
    counts[z] = 2
    return y * x * counts


@pytest.mark.contract
@pytest.mark.parametrize("x", [seeded(3, 4), seeded(4, 3).t()], ids=["rows", "columns"])
def test_a_number_is_written_under_a_mask(x: Tensor) -> None:
    """However the tensor lies, the bits are plain's."""
    assert_bitwise(run(remat(filled), [x]), run(filled, [x]))


@pytest.mark.contract
@pytest.mark.parametrize("x", [seeded(3, 4), seeded(4, 3).t()], ids=["rows", "columns"])
def test_a_write_under_a_mask_is_mapped(x: Tensor) -> None:
    """Maps of its backward, and of what holds it, raised an error of torch's own."""
    mask = torch.tensor([True, False, True])

    def rows(x: Tensor) -> Tensor:
        y = x.sin()
        y[mask] = 0.5
        return y * x

    def mapped(fun: Callable[..., Tensor]) -> Tensor:
        both = torch.stack([x, -x])
        return torch.func.grad(lambda x: torch.func.vmap(fun)(x).sum())(both)

    for transform in (torch.func.jacrev, torch.func.hessian):
        assert_close(transform(remat(filled))(x), transform(filled)(x))
    assert_close(mapped(remat(rows)), mapped(rows))


def in_place(x: Tensor, i: Tensor) -> Tensor:
    """Changes what it has looked up, which is a view where torch reads the number."""
    y = x.sin()
    y[i][0].add_(1)
    return y * x


@pytest.mark.contract
def test_what_is_looked_up_may_not_be_changed() -> None:
    """It would be no change of the tensor, without a word."""
    with pytest.raises(TraceError, match=r"test_indexing\.py") as error:
        remat(in_place)(seeded(3, 4).requires_grad_(), torch.tensor(1))

    assert "the result of `x[i]`, where `i` is a tensor, is changed in place" in str(
        error.value
    )
    assert "Write x[i] = ..., or x[i] += ..." in str(error.value)
