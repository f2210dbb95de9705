"""`layers.tiled_cross_entropy` equals the formula, and its logits never exist at once."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import remat
from remat.layers import _cross_entropy, tiled, tiled_cross_entropy
from tests.support import LiveBytes, assert_close, count_operators, seeded, swept

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:(?s).*traced for a tenth time"),
    # Forward mode's first use compiles torch's own formulas with it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

X, HEAD = seeded(2, 7, 4), seeded(11, 4, seed=1)
TARGETS = (torch.arange(14).reshape(2, 7) * 5) % 11
TARGETS[0, :3] = -100
NAMES = ("label_smoothing", "softcap", "z_loss")
WORDS = [
    dict(zip(NAMES, each, strict=True))
    for each in itertools.product((0.0, 0.1), (None, 2.0), (0.0, 0.01))
]


def formula(
    x: Tensor,
    head: Tensor,
    targets: Tensor = TARGETS,
    *,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    logits = x @ head.T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        reduction="none",
        label_smoothing=label_smoothing,
    ).view(targets.shape)
    is_used = targets != -100
    losses = losses + torch.where(is_used, z_loss * logits.logsumexp(-1) ** 2, 0)
    if reduction == "none":
        return losses
    return losses.sum() / (is_used.sum() if reduction == "mean" else 1)


def by_backward(f: Any) -> Any:
    leaves = [each.clone().requires_grad_() for each in (X, HEAD)]
    return torch.autograd.grad(f(*leaves).square().sum(), leaves)


def by_func(f: Any) -> Any:
    return torch.func.grad(lambda *a: f(*a).square().sum(), (0, 1))(X, HEAD)


def twice(f: Any) -> Any:
    leaves = [each.clone().requires_grad_() for each in (X, HEAD)]
    first = torch.autograd.grad(f(*leaves).square().sum(), leaves, create_graph=True)
    squares = torch.stack([each.square().sum() for each in first])
    return torch.autograd.grad(squares.sum(), leaves)


@pytest.mark.parametrize("reduction", ["mean", "none", *swept(["sum"])])
@pytest.mark.parametrize("options", [WORDS[0], WORDS[-1], *swept(WORDS[1:-1])], ids=str)
def test_equals_the_formula(options: dict[str, Any], reduction: Any):
    def tiles(x: Tensor, head: Tensor) -> Tensor:
        return tiled_cross_entropy(
            x, head, TARGETS, tiles=3, reduction=reduction, **options
        )

    def plain(x: Tensor, head: Tensor) -> Tensor:
        return formula(x, head, reduction=reduction, **options)

    assert_close(tiles(X, HEAD), plain(X, HEAD))
    for derivative in (by_backward, by_func, twice):
        assert_close(derivative(tiles), derivative(plain))


@pytest.mark.parametrize("tiles", [1, 14, 100, "4KiB"])
def test_any_number_of_tiles(tiles: int | str):
    def cut(x: Tensor, head: Tensor) -> Tensor:
        return tiled_cross_entropy(x, head, TARGETS, tiles=tiles)

    assert_close(by_backward(cut), by_backward(formula))
    assert_close(by_func(cut), by_func(formula))


@pytest.mark.parametrize("place", [0, 1], ids=["x", "head"])
def test_gradients_of_one_of_the_two(place: int):
    given = [X.clone(), HEAD.clone()]
    given[place].requires_grad_()
    loss = tiled_cross_entropy(given[0], given[1], TARGETS, tiles=3)
    (found,) = torch.autograd.grad(loss, given[place])

    assert_close(found, torch.autograd.grad(formula(*given), given[place])[0])


def test_a_head_laid_the_other_way():
    def cut(x: Tensor, head: Tensor) -> Tensor:
        return tiled_cross_entropy(x, head.T.contiguous(), TARGETS, tiles=3)

    assert_close(by_backward(cut), by_backward(formula))


def test_per_example_gradients():
    def each(loss: Any) -> Any:
        return torch.func.vmap(torch.func.grad(loss))(X, TARGETS)

    assert_close(
        each(lambda x, t: tiled_cross_entropy(x, HEAD, t, tiles=2)),
        each(lambda x, t: formula(x, HEAD, t)),
    )


def test_forward_mode_and_regions_and_graphs():
    def cut(x: Tensor, head: Tensor) -> Tensor:
        return tiled_cross_entropy(x, head, TARGETS, tiles=3)

    tangents = (X.cos(), HEAD.cos())
    assert_close(
        torch.func.jvp(cut, (X, HEAD), tangents),
        torch.func.jvp(formula, (X, HEAD), tangents),
    )
    assert_close(by_backward(remat(cut)), by_backward(formula))
    compiled = torch.compile(cut, backend="aot_eager", fullgraph=True)
    assert_close(by_backward(compiled), by_backward(formula))


def test_half_precision_is_computed_in_single():
    x, head = X.bfloat16(), HEAD.bfloat16()
    leaves = [x.requires_grad_(), head.requires_grad_()]
    loss = tiled_cross_entropy(leaves[0], leaves[1], TARGETS, tiles=3)
    found = torch.autograd.grad(loss, leaves)
    wide = [each.detach().float().requires_grad_() for each in leaves]
    expected = torch.autograd.grad(formula(*wide), wide)

    assert loss.dtype == torch.float32
    assert [each.dtype for each in found] == [torch.bfloat16] * 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_multiplies_in_its_dtype(reduction: Any):
    """As it does a plain head's, whose weights are wide and whose rows are narrow."""

    def step(loss: Any, x: Tensor) -> Any:
        leaves = [x.clone().requires_grad_(), HEAD.float().requires_grad_()]
        with torch.autocast(X.device.type, torch.bfloat16):
            found = loss(leaves[0], leaves[1])
        return found, torch.autograd.grad(found.sum(), leaves)

    def cut(x: Tensor, head: Tensor) -> Tensor:
        return tiled_cross_entropy(x, head, TARGETS, tiles=3, reduction=reduction)

    for x in (X.float(), X.bfloat16()):
        (found, gradients), (expected, plain) = (
            step(cut, x),
            step(lambda *a: formula(*a, reduction=reduction), x),
        )
        assert [each.dtype for each in gradients] == [each.dtype for each in plain]
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
        for one, other in zip(gradients, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)


def test_no_product_runs_twice_and_logits_of_one_tile_exist():
    tokens, width, classes = 512, 16, 4096
    x = seeded(tokens, width).requires_grad_()
    head = seeded(classes, width, seed=1).requires_grad_()
    targets = torch.arange(tokens) * 7 % classes

    def step(tiles: int) -> Any:
        loss = tiled_cross_entropy(x, head, targets, tiles=tiles)
        return torch.autograd.grad(loss, (x, head))

    ran = count_operators(step, 4)
    assert ran["aten.mm"] + ran["aten.addmm_"] == 3 * 4
    with LiveBytes() as memory:
        step(32)
    logits = tokens // 32 * classes * 8
    gradients = x.nbytes + head.nbytes
    # They are scaled where they wait.
    assert memory.peak <= gradients + 1.1 * logits + 64


LOSSES = {
    "sum": (_cross_entropy._total, "(tile n) d, (tile n), ... -> "),
    "none": (_cross_entropy._losses, "(tile n) d, (tile n), ... -> (tile n)"),
}


@pytest.mark.parametrize("reduction", LOSSES)
def test_its_own_function_is_independent_and_not_traced_to_be_judged(reduction: Any):
    """So that an evaluation costs no trace for each number of tokens."""
    f, pattern = LOSSES[reduction]
    rows, labels, weight = X[0], TARGETS[1], HEAD.new_tensor(0.5)
    given = (rows, labels, HEAD, *([weight] if reduction == "sum" else []))
    judged = tiled(f, pattern, tiles=3)(*given, -100, 0.1, 2.0, 0.01)
    regions = _cross_entropy._TOTAL, _cross_entropy._LOSSES
    before = [each.cache_info() for each in regions]
    with torch.no_grad():
        found = tiled_cross_entropy(
            rows, HEAD, labels, tiles=3, reduction=reduction,
            label_smoothing=0.1, softcap=2.0, z_loss=0.01,
        )  # fmt: skip

    assert_close(judged, found * 0.5 if reduction == "sum" else found)
    assert [each.cache_info() for each in regions] == before


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_further_lengths_need_no_further_traces(reduction: Any):
    """Ten would warn, of a function that is not the user's."""
    region = _cross_entropy._LOSSES if reduction == "none" else _cross_entropy._TOTAL
    region.cache_clear()
    rows, labels = X.flatten(0, -2).repeat(3, 1), TARGETS.flatten().repeat(3)

    def loss(x: Tensor) -> Tensor:
        given = x, HEAD, labels[: len(x)]
        return tiled_cross_entropy(*given, tiles=3, reduction=reduction).sum()

    for length in range(12, 24):
        torch.func.grad(loss)(rows[:length])

    assert region.cache_info().currsize < 5


def test_the_graph_may_be_used_twice():
    leaves = [X.clone().requires_grad_(), HEAD.clone().requires_grad_()]
    loss = tiled_cross_entropy(leaves[0], leaves[1], TARGETS, tiles=3)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    many = torch.autograd.grad(
        loss,
        leaves,
        torch.arange(3.0).double(),
        retain_graph=True,
        is_grads_batched=True,
    )

    assert_close([each[2] for each in many], [2 * each for each in first])
    assert_close(torch.autograd.grad(3 * loss, leaves), [3 * each for each in first])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_many_cotangents_may_come_at_once():
    leaves = [X.clone().requires_grad_(), HEAD.clone().requires_grad_()]
    loss = tiled_cross_entropy(leaves[0], leaves[1], TARGETS, tiles=3)
    cotangents = torch.arange(3.0).double()
    found = torch.autograd.grad(loss, leaves, cotangents, is_grads_batched=True)

    right = torch.autograd.grad(formula(*leaves), leaves)
    assert_close([each[2] for each in found], [2 * each for each in right])


def test_the_mean_over_no_target_is_no_number():
    """As torch's is, whose gradients are zeros."""
    none = torch.full_like(TARGETS, -100)

    def cut(x: Tensor, head: Tensor) -> Tensor:
        return tiled_cross_entropy(x, head, none, tiles=3)

    def plain(x: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy((x @ head.T).flatten(0, 1), none.flatten())

    leaves = [X.clone().requires_grad_(), HEAD.clone().requires_grad_()]
    loss = cut(*leaves)
    assert cut(X, HEAD).isnan()
    assert loss.isnan()
    expected = torch.autograd.grad(plain(*leaves), leaves)
    assert_close(torch.autograd.grad(loss, leaves), expected)
    assert_close(torch.func.grad(cut, (0, 1))(X, HEAD), expected)


@pytest.mark.parametrize("tied", ["rows of it", "itself"])
def test_rows_may_depend_on_the_head(tied: str):
    """As tied embeddings do: each order has the product's own part of the gradient."""
    targets = torch.arange(11)[:5] if tied == "rows of it" else torch.arange(11)

    def derivatives(loss: Any) -> list[Tensor]:
        head = HEAD.clone().requires_grad_()
        rows = torch.tanh(head[:5] * 2) if tied == "rows of it" else head
        (first,) = torch.autograd.grad(loss(rows, head), head, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), head)
        return [first.detach(), second]

    found = derivatives(lambda x, w: tiled_cross_entropy(x, w, targets, tiles=2))
    assert_close(found, derivatives(lambda x, w: formula(x, w, targets)))


def test_gradients_in_float16_are_those_of_a_scaled_loss():
    """They are too small for it without."""
    x, head = seeded(512, 16).half(), (seeded(1024, 16, seed=1) / 4).half()
    targets = torch.arange(512)

    def gradients(loss: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in (x, head)]
        found = torch.autograd.grad(loss(*leaves).float() * 65536, leaves)
        return [each.double() for each in found]

    def tiled_loss(x: Tensor, head: Tensor) -> Tensor:
        return tiled_cross_entropy(x, head, targets, tiles=4)

    expected = gradients(lambda x, w: formula(x, w, targets), torch.float64)
    for one, other in zip(gradients(tiled_loss, x.dtype), expected, strict=True):
        assert (one - other).norm() < 2e-3 * other.norm()


def test_the_mean_over_no_token_is_no_number():
    """Without a gradient too."""
    assert tiled_cross_entropy(X[0, :0], HEAD, TARGETS[0, :0], tiles=3).isnan()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)  # fmt: skip
def test_small_integers_are_targets(dtype: torch.dtype):
    found = tiled_cross_entropy(X[1], HEAD, TARGETS[1].to(dtype), tiles=3)

    assert_close(found, formula(X[1], HEAD, TARGETS[1]))


def test_torchs_own_chunks_run_in_a_region_under_torch_func():
    """Outside of one torch refuses them there."""
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=4, chunking_method=None
    )

    def loss(x: Tensor, head: Tensor) -> Tensor:
        rows, labels = x.flatten(0, 1), TARGETS.flatten()
        return F.linear_cross_entropy(rows, head, labels, options=options)

    found = torch.func.grad(remat(loss), (0, 1))(X, HEAD)
    assert_close(found, torch.func.grad(formula, (0, 1))(X, HEAD))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"head": HEAD[:, :3]}, r"head of \[11, 3\]"),
        ({"targets": TARGETS[0]}, r"targets of \[7\]"),
        ({"softcap": -1.0}, "limit of the logits"),
        ({"label_smoothing": 2.0}, r"a number in \[0, 1\]"),
        ({"reduction": "max"}, "It can be 'mean', 'sum', 'none'"),
        ({"tiles": 0}, "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], text: str):
    given: dict[str, Any] = {"x": X, "head": HEAD, "targets": TARGETS, "tiles": 2}

    with pytest.raises(ValueError, match=text):
        tiled_cross_entropy(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"targets": TARGETS.double()}, r"targets=\.\.\.\): got torch.float64.*the number of a class"),
        ({"targets": TARGETS > 5}, "got torch.bool.*Pass integers"),
        ({"targets": TARGETS * 1j}, "got torch.complex"),
        ({"targets": TARGETS.tolist()}, r"targets=\.\.\.\): got a list.*tensors alone"),
        ({"head": torch.nn.Linear(4, 11)}, r"head=\.\.\.\): got a Linear.*the weight of a linear layer"),
        ({"x": None}, r"x=\.\.\.\): got a NoneType"),
    ],
)  # fmt: skip
def test_what_is_no_tensor_or_no_class_is_refused(change: dict[str, Any], text: str):
    """Truncated to whole numbers, other targets would have a loss too."""
    given: dict[str, Any] = {"x": X, "head": HEAD, "targets": TARGETS, "tiles": 2}

    with pytest.raises(TypeError, match=text):
        tiled_cross_entropy(**{**given, **change})
