"""Where a shape depends on values: what works, and what the error says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from remat import TraceError, remat
from tests.support import assert_bitwise, assert_close, seeded

pytestmark = pytest.mark.contract
ROWS = torch.tensor([True, False, True])
KNOWN = r"torch\.where\(mask, a, b\), x\.masked_fill or torch\.nonzero_static"


def put(mask: Callable[[Tensor], Tensor], value: Any) -> Callable[[Tensor], Tensor]:
    """Writes a value wherever a mask is set."""

    def fun(x: Tensor) -> Tensor:
        y = x * 2
        y[mask(y)] = value
        return (y.sin() * x).sum()

    return fun


SAME = {
    "a number": put(lambda y: y > 0, 3.0),
    "a tensor of one number": put(lambda y: y > 0, torch.tensor(3.0).double()),
    "a row for each row": put(lambda y: y[:, 0] > 0, seeded(2, seed=3)),
    "one row": put(lambda y: y[:, 0] > 0, seeded(1, 2, seed=3)),
    "a mask from outside": put(lambda _: ROWS, seeded(2, seed=3)),
}


@pytest.mark.parametrize("name", SAME)
def test_a_write_under_a_mask_is_mapped(name: str) -> None:
    """Of what is the same wherever the mask is set; plain torch maps only some of them."""
    fun, xs = SAME[name], seeded(4, 3, 2)
    region = remat(fun)

    assert_close(vmap(grad(region))(xs), torch.stack([grad(fun)(x) for x in xs]))
    assert_bitwise(grad(region)(xs[0]), grad(fun)(xs[0]))


def test_a_write_of_one_row_each_is_refused_under_vmap() -> None:
    """How many rows there are depends on values; the error is ours, and names the line."""
    region = remat(put(lambda y: y[:, 0] > 0, seeded(2, 2)))

    with pytest.raises(TraceError, match=rf"test_values_in_shapes\.py:\d+: .*{KNOWN}"):
        vmap(grad(region))(seeded(4, 3, 2))


def test_a_loss_of_aligned_sequences_is_refused() -> None:
    """No other operator takes the place of its kernel, which hides a shape."""
    targets, lengths = torch.ones(2, 3, dtype=torch.int64), ((6, 6), (3, 3))
    loss: Any = F.ctc_loss

    with pytest.raises(
        TraceError, match=r"Use F\.ctc_loss outside of the region, or eng"
    ):
        remat(lambda x: loss(x.log_softmax(-1), targets, *lengths))(
            seeded(6, 2, 5).requires_grad_()
        )


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "x[mask]": lambda x: x[x > 0].sin().sum(),
    "nonzero": lambda x: x[torch.nonzero(x[:, 0] > 0)].sin().sum(),
    "masked_select": lambda x: torch.masked_select(x, x > 0).sin().sum(),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_of_values_is_refused(name: str) -> None:
    """With the line, and the nearest forms that work."""
    region = remat(SHAPES[name])

    with pytest.raises(TraceError, match=rf"test_values_in_shapes\.py:\d+: .*{KNOWN}"):
        region(seeded(3, 2).requires_grad_())


def test_classes_of_values_are_refused() -> None:
    """With num_classes it works, under vmap too."""
    labels, x = torch.tensor([0, 2, 1]), seeded(3, 3).requires_grad_()

    with pytest.raises(TraceError, match=r"test_values_in_shapes\.py:\d+: "):
        remat(lambda x: (F.one_hot(labels) * x.sin()).sum())(x)
    found = remat(lambda x: (F.one_hot(labels, 3) * x.sin()).sum())(x)

    assert_bitwise(found, (F.one_hot(labels) * x.sin()).sum())


@pytest.mark.parametrize("name", SHAPES)
def test_rerun_accepts_them(name: str) -> None:
    """Under the transforms that torch supports there."""
    fun, x = SHAPES[name], seeded(3, 2)
    region = remat(fun, engine="rerun")

    assert_bitwise(grad(region)(x), grad(fun)(x))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_result_is_refused(kind: str) -> None:
    """It has no strides for a program to return it by."""
    with pytest.raises(TraceError, match=r"layout torch\.sparse_c\w+: is made inside"):
        remat(lambda x: getattr(x.sin(), kind)())(seeded(3, 2).requires_grad_())


EDGES = torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 1, 0]], dtype=torch.float64)

OF_EDGES: dict[str, Callable[[Tensor], Tensor]] = {
    "_nnz": lambda x: x / EDGES.to_sparse()._nnz(),
    "indices": lambda x: x[EDGES.to_sparse().indices()[0][:2]],
    "values": lambda x: x * EDGES.to_sparse_csr().values().numel(),
    "crow_indices": lambda x: x * EDGES.to_sparse_csr().crow_indices()[-1],
    "col_indices": lambda x: x * len(EDGES.to_sparse_csr().col_indices()),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:.*from now on:remat.RematWarning")
@pytest.mark.parametrize("part", OF_EDGES)
def test_how_much_a_sparse_tensor_holds_is_refused(part: str) -> None:
    """torch's stand-in says that it holds nothing."""
    x, fun = seeded(3, 4).requires_grad_(), OF_EDGES[part]

    with pytest.raises(
        TraceError, match=rf"`\.{part}\(\)` of a sparse tensor at test_v"
    ):
        remat(fun)(x)
    assert_bitwise(remat(fun, engine="auto")(x), fun(x))


def test_what_is_made_of_indices_and_values_holds_these() -> None:
    at, held = torch.tensor([[0, 1], [1, 0]]), torch.ones(2, dtype=torch.float64)

    def fun(x: Tensor) -> Tensor:
        sparse = torch.sparse_coo_tensor(at, held, (3, 3), check_invariants=False)
        return x * sparse._nnz()

    x = seeded(3, 4).requires_grad_()
    assert_bitwise(remat(fun)(x), fun(x))


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: EDGES.to_sparse() @ x.sin(),
    "mm": lambda x: torch.sparse.mm(EDGES.to_sparse(), x.sin()),
    "compressed": lambda x: EDGES.to_sparse_csr() @ x.sin(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_a_sparse_tensor_is_multiplied(product: Callable[[Tensor], Tensor]) -> None:
    x = seeded(3, 4).requires_grad_()
    found, expected = remat(product)(x), product(x)

    assert_bitwise(found, expected)
    assert_bitwise(*(torch.autograd.grad(y.sum(), x) for y in (found, expected)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_in_groups(dtype: torch.dtype) -> None:
    """A mixture of experts calls them; torch 2.13 knows the shapes of one dtype's alone."""
    x = seeded(8, 16).to(dtype).requires_grad_()
    weights = seeded(2, 16, 16, seed=1).to(dtype).requires_grad_()
    ends = torch.tensor([4, 8], dtype=torch.int32)

    def fun(x: Tensor, weights: Tensor) -> Tensor:
        return torch.ops.aten._grouped_mm(x.sin(), weights, offs=ends).sin()

    found, expected = remat(fun)(x, weights), fun(x, weights)

    assert_bitwise(found, expected)
    assert_bitwise(
        torch.autograd.grad(found.sum(), (x, weights)),
        torch.autograd.grad(expected.sum(), (x, weights)),
    )


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_weighted_loss_that_ignores_targets(engine: Any) -> None:
    """torch sums the weights of the others, whose number a trace does not know, or of all."""
    targets, weight = torch.tensor([3, 3, 2, 2, 1, 2, 0, 2]), seeded(4).abs()

    def fun(x: Tensor) -> Tensor:
        return F.cross_entropy(x, targets, weight, ignore_index=1, label_smoothing=0.1)

    x = seeded(8, 4)
    found, expected = (
        torch.autograd.functional.vjp(each, x)
        for each in (remat(fun, engine=engine), fun)
    )

    # By a few units in the last place, where the order of a sum is another one.
    if engine == "rerun":
        assert_bitwise(found, expected)
    else:
        assert_close(found, expected)


def test_a_tensor_of_a_file_asks_for_another_engine(tmp_path: Path) -> None:
    """torch.from_file is given no tensor; torch says in other words that it has no data there."""
    file = tmp_path / "numbers"
    file.write_bytes(b"\0" * 16)

    def fun(x: Tensor) -> Tensor:
        return x * torch.from_file(str(file), size=4)

    x = seeded(4).requires_grad_()
    with pytest.raises(TraceError, match=r"from_file.*Use .*engine=\"rerun\""):
        remat(fun)(x)

    assert_bitwise(remat(fun, engine="rerun")(x), fun(x))
