"""Which functions run tile by tile: judged by their traces, before anything runs."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import RematWarning, TileError, disabled, random, remat
from remat.layers import tiled
from tests.support import assert_bitwise, assert_close, count_operators, seeded

X, W, H = seeded(2, 6, 4), seeded(4, 8, seed=1), seeded(8, 4, seed=2)
ALIKE = "b (tile s) d -> b (tile s) d"
TARGETS = torch.arange(12).reshape(2, 6) % 8


def heads(x: Tensor) -> Tensor:
    return x.view(2, -1, 2, 2).transpose(1, 2)


def outer(x: Tensor) -> Tensor:
    return x[..., :, None] * x[..., None, :]


def added_to(x: Tensor, place: Any, other: Tensor) -> Tensor:
    """Changes a part of it in place."""
    x[place].add_(other)
    return x


def groups(x: Tensor) -> Tensor:
    """For each place one of two."""
    return (x[..., 0] > 0).long().flatten()


def of_each(x: Tensor) -> Tensor:
    """The same for each channel."""
    return groups(x)[:, None].expand(-1, 4)


INDEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax over channels": lambda x: x.softmax(-1),
    "cumsum over channels": lambda x: x.cumsum(-1),
    "roll of channels": lambda x: x.roll(1, 2),
    "sort of channels": lambda x: x.sort(-1).values,
    "split heads": lambda x: heads(x).softmax(-1).transpose(1, 2).flatten(2),
    "layer norm": lambda x: F.layer_norm(x, (4,), torch.ones(4).double()),
    "group norm": lambda x: F.group_norm(x.flatten(0, 1), 2).view(x.shape),
    "rms norm": lambda x: F.rms_norm(x, (4,)),
    "centered channels": lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    "linear": lambda x: F.linear(F.linear(x, H, H[:, 0]), W),
    "einsum": lambda x: torch.einsum("bsd,de,ec->bsc", x, W, H),
    "batched products": lambda x: torch.bmm(x, W.expand(2, 4, 8)) @ H,
    "cross attention": lambda x: F.scaled_dot_product_attention(
        x, H.expand(2, 8, 4), H.expand(2, 8, 4)
    ),
    "joined channels": lambda x: torch.cat([x, x * 2], -1)[..., 2:6],
    "stacked": lambda x: torch.stack([x, x.exp()], 1).sum(1),
    "per channel": lambda x: x * torch.arange(4),
    "masks": lambda x: torch.where(x > 0, x, torch.zeros_like(x)).masked_fill(x < -1, 0.5),
    "expanded": lambda x: x + torch.ones(4).double().expand(2, x.shape[1], 4).clone(),
    "embedding": lambda x: F.embedding(x.argmax(-1), H),
    "a table": lambda x: H[x.argmax(-1)],
    "gather": lambda x: x.gather(-1, x.argsort(-1)),
    "buckets": lambda x: x * torch.bucketize(x, H[:, 0].sort().values),
    "chosen channels": lambda x: x.index_select(2, torch.tensor([0, 1, 1, 0])),
    "top channels": lambda x: x.topk(2, -1).values.repeat(1, 1, 2),
    "one hot": lambda x: F.one_hot(x.argmax(-1), 4).double(),
    "gates": lambda x: F.glu(torch.cat([x, x], -1)),
    "padded channels": lambda x: F.pad(x, (1, 1))[..., 1:-1],
    "other dtypes": lambda x: x.clamp(0, 1).float().double(),
    "vmap": torch.func.vmap(lambda row: row.softmax(-1)),
    "drawn": lambda x: x * 0 + random.normal(random.key(0), (4,)),
    "conv of each": lambda x: F.conv1d(x.reshape(-1, 1, 4), W[:1, None, :3], padding=1).view(x.shape),
    "hardswish": F.hardswish,
    "a slope for each channel": lambda x: F.prelu(x.mT, H[0, :]).mT,
    "log sigmoid": F.logsigmoid,
    "a kernel of one place": lambda x: F.conv1d(x.mT, W[:, :4, None], W[:, 0]).mT,
    "a kernel of one row": lambda x: F.conv2d(x[:, None], W[:1, None, None, :3], padding=(0, 1))[:, 0],
    "transposed, of one place": lambda x: F.conv_transpose1d(x.mT, W[:, :4, None]).mT,
    "cross product": lambda x: torch.linalg.cross(x[..., :3], x[..., 1:]).repeat(1, 1, 2)[..., :4],
    "matrix exponential": lambda x: torch.linalg.matrix_exp(outer(x)).sum(-1),
    "written to other channels": lambda x: added_to(x.clone(), (..., slice(1, None)), x[..., :-1]),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEPENDENT)
def test_what_is_independent_runs(name: str):
    f = INDEPENDENT[name]

    assert_close(tiled(f, ALIKE, tiles=2)(X), f(X))


DEPENDENT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), "scaled_dot_product"),
    "causal attention": (
        lambda x: F.scaled_dot_product_attention(
            x[:, None], H.expand(2, 1, 8, 4), H.expand(2, 1, 8, 4), is_causal=True
        )[:, 0],
        "scaled_dot_product",
    ),
    "products of all pairs": (lambda x: x @ x.mT @ x, "matmul"),
    "softmax": (lambda x: x.softmax(1), "softmax"),
    "softmax over all": (lambda x: x.flatten(1).softmax(-1).view(x.shape), "softmax"),
    "cumsum": (lambda x: x.cumsum(1), "cumsum"),
    "roll": (lambda x: x.roll(1, 1), "roll"),
    "sort": (lambda x: x.sort(1).values, "sort"),
    "flip": (lambda x: x.flip(1), "flip"),
    "centered": (lambda x: x - x.mean(1, keepdim=True), "sub"),
    "normed": (lambda x: x / x.norm(), "norm"),
    "largest": (lambda x: x - x.amax(1, keepdim=True), "amax"),
    "batch norm": (lambda x: F.batch_norm(x.mT, None, None, training=True).mT, "batch_norm"),
    "convolution": (lambda x: F.conv1d(x.mT, W[None, :, :3], padding=1).mT.expand(x.shape), "conv1d"),
    "padding": (lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1], "pad"),
    "shifted": (lambda x: torch.cat([x[:, 1:], x[:, :1]], 1), "getitem"),
    "picked": (lambda x: x[:, [0] * x.shape[1]], "getitem"),
    "positions": (lambda x: x + torch.arange(x.shape[1])[:, None], "add"),
    "divided by the size": (lambda x: x / x.shape[1], "div"),
    "times a tensor of the size": (lambda x: x * torch.full((1,), x.shape[1]), "full"),
    "times the size as a tensor": (lambda x: x * torch.tensor([x.shape[1]]), "constant|tensor"),
    "a slice that is longer than a tile": (
        lambda x: F.pad(x[:, :4], (0, 0, 0, x.shape[1] - min(4, x.shape[1]))), "getitem|pad",
    ),
    "the last places": (lambda x: x + x[:, -4:].sum(1, keepdim=True), "getitem"),
    "the diagonal": (lambda x: x + x.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None], "diagonal"),
    "windows": (lambda x: x.view(2, -1, 3, 4).softmax(1).view(x.shape), "view|softmax"),
    "another order": (lambda x: x.reshape(2, 4, -1).transpose(1, 2), "reshape"),
    "distances": (lambda x: torch.cdist(x, x) @ x, "cdist"),
    "lower triangle": (lambda x: x.tril(), "tril"),
    "a mask's count": (lambda x: x / torch.ones_like(x[..., 0]).sum(), "sum"),
    "the last number": (lambda x: x * torch.arange(x.shape[1])[-1], "getitem"),
    "a number on a grid": (lambda x: x * torch.linspace(0, 1, x.shape[1])[1], "getitem"),
    "a trace": (lambda x: x * torch.eye(x.shape[1]).sum(), "sum"),
    "one of the size": (lambda x: x * torch.zeros(x.shape[1]).softmax(0)[0], "softmax"),
    "a repeated axis": (lambda x: x[:, :, None].expand(-1, -1, x.shape[1], -1).sum(2), "expand"),
    "a repeated sum": (lambda x: x * x.sum(1)[:, None].expand(-1, x.shape[1], -1).sum(1)[:, None], "sum"),
    "filled with a sum": (
        lambda x: x * torch.empty(x.shape[1], 1).double().fill_(x.sum()), "fill",
    ),
    "other operands": (
        lambda x: (lambda a, b: (a if x.shape[1] > 4 else b) - a * b + a + b)(x.exp(), x.sin()), "sub",
    ),
    "a scale by the boundaries": (
        lambda x: x * torch.bucketize(x, torch.zeros(x.shape[1]).double()), "bucketize",
    ),
    "products of the size": (lambda x: (x @ torch.ones(4, x.shape[1]).double()).sum(-1, True) + x, "matmul"),
    "padding of the size": (lambda x: F.pad(x, (0, x.shape[1]), value=1).sum(-1, True) + x, "pad"),
    "classes": (lambda x: x * F.one_hot(torch.tensor([0]), x.shape[1]).double().mean(), "mean"),
    "a factor of a product": (
        lambda x: torch.addmm(H[0], x[0], W[:, :4], alpha=x.shape[1]).expand(x.shape), "addmm",
    ),
    "an eps": (lambda x: F.layer_norm(x, (4,), eps=1 / x.shape[1]), "layer_norm"),
    "a scale of attention": (
        lambda x: F.scaled_dot_product_attention(
            x, H.expand(2, 8, 4), H.expand(2, 8, 4), scale=1 / x.shape[1]
        ),
        "scaled_dot_product",
    ),
    "steps": (lambda x: functools.reduce(lambda y, _: y * 0.9, range(x.shape[1]), x), "mul"),
    "a branch on the size": (lambda x: x.exp() if x.shape[1] > 4 else x.sin(), "sin"),
    "a part of the whole": (lambda x: x.split(5, 1)[0] * 2, "split|getitem|mul"),
    "gathered from the first": (
        lambda x: x + x.gather(1, torch.zeros(2, 1, 4, dtype=torch.int64)).sum(1, True), "gather",
    ),
    "scattered to the first": (
        lambda x: x.scatter(2, torch.zeros(2, 1, 1, dtype=torch.int64), 9.0), "scatter",
    ),
    "causal attention over merged queries": (
        lambda x: F.scaled_dot_product_attention(
            x.reshape(1, 1, -1, 4), H.expand(1, 1, 8, 4), H.expand(1, 1, 8, 4), is_causal=True
        ).view(x.shape),
        "scaled_dot_product",
    ),
    "a kernel of one place that strides": (
        lambda x: x + F.conv1d(x.mT, W[:, :4, None], stride=2).sum(-1)[:, None], "conv1d",
    ),
    "a kernel of one place beside padding": (
        lambda x: F.conv1d(x.mT, W[:, :4, None], W[:, 0], padding=1).mT[:, :-2], "conv1d",
    ),
    "solved along it": (
        lambda x: torch.linalg.solve(torch.ones(x.shape[1], x.shape[1]).double().tril(), x), "linalg_solve|tril",
    ),
    "distances to others": (lambda x: torch.cdist(x, H[None, :, :4]).sum(-1, True) + x.cumsum(1), "cdist|cumsum"),
    "distances of all pairs": (lambda x: torch.cdist(x, x.exp())[..., :1] + x, "cdist"),
    "written to the next place": (
        lambda x: added_to(x.clone(), (slice(None), slice(1, None)), x[:, :-1]), "getitem",
    ),
    "sums of groups": (
        lambda x: x * torch.zeros(2, 4, dtype=torch.float64).index_add(0, groups(x), x.flatten(0, 1)).sum(0), "mul",
    ),
    "a captured key": (
        lambda x: random.dropout(random.key(0), x, 0.5), "dropout|mul|random",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEPENDENT)
def test_what_mixes_the_axis_is_refused_by_operator_and_line(name: str):
    f, operator = DEPENDENT[name]
    where = rf"tiled: (\w+\.)?({operator})\w* at test_tile_independence.py:\d+: "

    with pytest.raises(TileError, match=where):
        tiled(f, ALIKE, tiles=2)(X)


def test_a_result_that_is_not_where_the_pattern_says_is_refused():
    def f(x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True).expand(x.shape) / x.shape[1]

    with pytest.raises(TileError, match=r"independence\.py:\d+\): a result is not cut"):
        tiled(f, ALIKE, tiles=2)(X)


@pytest.mark.parametrize(
    ("f", "pattern"),
    [
        (lambda x: torch.zeros(2, 5, 4), ALIKE),
        (lambda x: x.new_zeros(2, 1, 4), ALIKE),
        (lambda x: x[:, :, None].expand(-1, -1, x.shape[1], -1), "b (tile s) d -> b (tile s) ..."),
        (lambda x: x.sum(1)[:, None].expand(-1, x.shape[1], -1), "b (tile s) d -> ..."),
    ],
)  # fmt: skip
def test_a_result_of_another_length_is_refused(
    f: Callable[[Tensor], Tensor], pattern: str
):
    with pytest.raises(
        TileError, match=r"a result is|as many values|does not have each place"
    ):
        tiled(f, pattern, tiles=2)(X)


def test_results_that_are_views_of_an_argument_are_judged_too():
    """No step of the graph makes them."""

    def repeated(x: Tensor) -> Tensor:
        return x[:, None].expand(-1, x.shape[0], -1, -1)

    with pytest.raises(TileError, match=r"expand .* does not have each place"):
        tiled(repeated, "(tile n) s d -> (tile n) m s d", tiles=2)(X)
    with pytest.raises(TileError, match=r"getitem .* a number that depends"):
        tiled(lambda x: x[:, x.shape[0]], "(tile n) s d -> (tile n) d", tiles=2)(X)


def test_how_many_results_there_are_may_not_depend_on_the_size():
    def some(x: Tensor) -> list[Tensor]:
        return [x.exp()] * (2 if x.shape[1] > 3 else 1)

    with pytest.raises(TileError, match="returns more or fewer values"):
        tiled(some, ALIKE, tiles=2)(X)


def test_what_is_returned_or_captured_may_not_depend_on_the_size():
    """The steps are the same."""

    def swapped(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x.exp(), x.sin())[:: 1 if x.shape[1] > 4 else -1]  # pyright: ignore[reportReturnType]

    def scaled(x: Tensor) -> Tensor:
        return x * (W[0, :4] if x.shape[1] > 4 else H[0])

    for f in (swapped, scaled):
        with pytest.raises(TileError, match=r"reads or returns|is a step for tiles"):
            tiled(f, ALIKE, tiles=2)(X)


def merged(x: Tensor) -> Tensor:
    """Of rows (s d), where `turned` has rows (d s)."""
    return x.reshape(len(x), -1)


def turned(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(len(x), -1)


MEETS_ITSELF: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a product": (lambda x: merged(x) @ turned(x).T, "b c"),
    "a dot product": (lambda x: torch.dot(merged(x)[0], turned(x)[0]), ""),
    "a loss": (lambda x: F.mse_loss(merged(x), turned(x), reduction="sum"), ""),
    "another batch": (
        lambda x: x.reshape(-1, 4).T @ x.transpose(0, 1).reshape(-1, 4),
        "d e",
    ),
}


@pytest.mark.parametrize(("f", "out"), MEETS_ITSELF.values(), ids=MEETS_ITSELF)
def test_the_axis_may_not_meet_itself_in_another_order(f: Any, out: str):
    """Summed over both orders, tiles would pair places that the whole does not."""
    with pytest.raises(TileError, match="the axis meets itself in another order"):
        tiled(f, f"b (tile s) d -> {out}", tiles=2)(X)


BEHIND: dict[str, Callable[[Tensor], Tensor]] = {
    "stacked": lambda x: torch.stack([x, 2 * x], 1).flatten(1, 2),
    "heads": lambda x: heads(x).reshape(2, -1, 2),
    "repeated": lambda x: x[:, None].expand(-1, 2, -1, -1).reshape(2, -1, 4),
}


@pytest.mark.parametrize("f", BEHIND.values(), ids=BEHIND)
def test_the_axis_behind_another_is_not_cut_along_both(f: Any):
    """In a dimension (h s) its places come once for each h."""
    with pytest.raises(TileError, match="not cut along its dimension 1"):
        tiled(f, ALIKE, tiles=2)(X)


OF_THE_LENGTH: dict[str, Callable[[Tensor], Tensor]] = {
    "the end of a grid": lambda x: x * torch.linspace(0, x.shape[1], 4),
    "the end of powers": lambda x: x * torch.logspace(0, x.shape[1], 4),
    "an order": lambda x: torch.special.polygamma(x.shape[1], x.abs() + 1),
}


@pytest.mark.parametrize("f", OF_THE_LENGTH.values(), ids=OF_THE_LENGTH)
def test_numbers_called_like_lengths_may_not_depend_on_the_size(f: Any):
    """`end` says how long a slice is, and not a grid."""
    with pytest.raises(TileError, match="a number that depends on the size"):
        tiled(f, ALIKE, tiles=2)(X)


NOT_LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": lambda x: torch.div(x.sum(1), 2.0, rounding_mode="floor"),
    "bits": lambda x: x.sum(1).view(torch.int64),
    "whole numbers": lambda x: x.sum(1).to(torch.int64),
    "another dtype": lambda x: x.sum(1).view(torch.float32),
    "some": lambda x: (x > 0).count_nonzero(1).bool().float(),
    "a short integer": lambda x: (x > 0).sum(1).to(torch.int8).float(),
}


@pytest.mark.parametrize("f", NOT_LINEAR.values(), ids=NOT_LINEAR)
def test_a_sum_is_not_rounded_in_each_tile(f: Any):
    with pytest.raises(TileError, match="is not used linearly"):
        tiled(f, "b (tile s) d -> b d", tiles=2)(X)


def test_a_last_tile_of_one_place_is_judged_too():
    """Also where its steps are others: a copy that only longer tiles need is no fault."""
    odd = seeded(2, 5, 4)
    with pytest.raises(TileError, match=r"computes with a number .* 2, and 3"):
        tiled(lambda x: x * (3 if x.shape[1] == 1 else 2), ALIKE, tiles=3)(odd)
    with pytest.raises(TileError, match="for a tile of one place"):
        tiled(lambda x: x + x.squeeze(1), ALIKE, tiles=2)(odd[:, :3])

    def copied(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2).exp()

    assert_bitwise(tiled(copied, ALIKE, tiles=3)(odd), copied(odd))

    def product(x: Tensor) -> Tensor:
        return torch.einsum("bsd,de->bse", x, W)

    assert_close(tiled(product, ALIKE, tiles=3)(odd), product(odd))


def test_a_number_that_is_returned_may_not_depend_on_the_size():
    """The first tile's would be that of the whole."""
    with pytest.raises(TileError, match=r"returns \[3\], and \[6\] for a tile"):
        tiled(lambda x: (x, x.shape[1]), ALIKE, tiles=2)(X)
    assert tiled(lambda x: (x, x.shape[2]), ALIKE, tiles=2)(X)[1] == 4


def test_a_branch_on_the_size_of_the_last_tile_is_refused():
    x = seeded(2, 8, 4)

    with pytest.raises(TileError, match="sin"):
        tiled(lambda x: x.exp() if x.shape[1] == 2 else x.sin(), ALIKE, tiles=3)(x)


def test_two_tiles_of_one_place_are_judged():
    """By larger ones than the whole."""
    with pytest.raises(TileError, match="div"):
        tiled(lambda x: x / x.shape[1], ALIKE, tiles=2)(X[:, :2])


def test_half_precision_sums_and_means_are_those_of_the_whole():
    """Small parts are not swallowed one by one; what is no mean stays as it is."""
    ones = torch.ones(2048, 1, dtype=torch.bfloat16)
    total = tiled(lambda x: x.sum(), "(tile n) d ->", tiles=1024)
    mean = tiled(
        lambda x: (x.mean(), torch.tensor(5)), "(tile n) d ->", tiles=4, reduce="mean"
    )

    assert_bitwise(total(ones), ones.sum())
    assert_bitwise(mean(ones), (ones.mean(), torch.tensor(5)))


def test_functions_of_one_code_are_judged_each_by_itself():
    """What a closure holds decides: here whether the size of a tile is a factor."""

    def scaled(number: Callable[[Tensor], float]) -> Callable[[Tensor], Tensor]:
        return lambda x: x * number(x)

    assert_close(tiled(scaled(lambda _: 3.0), ALIKE, tiles=2)(X), X * 3)
    with pytest.raises(TileError, match="mul"):
        tiled(scaled(lambda x: float(x.shape[1])), ALIKE, tiles=2)(X)


@pytest.mark.parametrize(
    ("f", "reduce"),
    [
        (lambda x: x.sum() ** 2, "sum"),
        (lambda x: x.sum() + 1, "sum"),
        (lambda x: x.sum() / x.mean(), "sum"),
        (lambda x: 1 / x.mean(), "mean"),
        (lambda x: x.amax(), "sum"),
        (lambda x: x.sum() * x.sum(), "sum"),
        (lambda x: F.linear(x.sum((0, 1)), H, H[:, 0]), "sum"),
        (lambda x: torch.stack([x.sum(), W.sum()]), "sum"),
        (lambda x: torch.stack([x.sum(), x.mean()]), "sum"),
        (lambda x: W[:2, :4].index_add(0, groups(x), x.flatten(0, 1)), "sum"),
        (
            lambda x: torch.ones(2, 4, dtype=torch.float64).scatter_add(
                0, of_each(x), x.flatten(0, 1)
            ),
            "sum",
        ),
        (
            lambda x: (
                torch.zeros(2, 4)
                .double()
                .scatter_add(
                    0, torch.zeros(2, 4, dtype=torch.int64), x.detach().flatten(0, 1)
                )
            ),
            "sum",
        ),
        (
            lambda x: F.multi_margin_loss(x[0, :, 0], torch.tensor(0), reduction="sum"),
            "sum",
        ),
        (lambda x: F.binary_cross_entropy_with_logits(x, x * 0), "sum"),
    ],
)
def test_what_is_no_sum_or_mean_is_refused(f: Callable[[Tensor], Tensor], reduce: Any):
    with pytest.raises(TileError):
        tiled(f, "b (tile s) d ->", tiles=2, reduce=reduce)(X)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("f", "reduce"),
    [
        (lambda x: -2 * x.square().sum() / 3 + x.sum(), "sum"),
        (lambda x: x.flatten(0, 1).T @ x.flatten(0, 1), "sum"),
        (lambda x: x.sum(1).mean(), "sum"),
        (lambda x: x.mean() + 1, "mean"),
        (lambda x: x.mean((0, 1)) * 3, "mean"),
        (lambda x: F.mse_loss(x, torch.zeros_like(x)), "mean"),
        (lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="sum"), "sum"),
        (lambda x: W.sum(), "mean"),
        (lambda x: x.sum((0, 1)) @ W, "sum"),
        (lambda x: torch.dot(x.mean((0, 1)), H[0]), "mean"),
        (
            lambda x: F.binary_cross_entropy_with_logits(
                x, x.sigmoid(), reduction="sum"
            ),
            "sum",
        ),
        (
            lambda x: F.binary_cross_entropy_with_logits(x, x * 0, pos_weight=H[0]),
            "mean",
        ),
        (
            lambda x: torch.zeros(2, 4, dtype=torch.float64).index_add(
                0, groups(x), x.flatten(0, 1)
            ),
            "sum",
        ),
        (
            lambda x: torch.zeros(2, 4, dtype=torch.float64).scatter_add(
                0, of_each(x), x.flatten(0, 1)
            ),
            "sum",
        ),
        (
            lambda x: torch.zeros(2).index_add(
                0, groups(x), torch.ones(len(groups(x)))
            ),
            "sum",
        ),
        (lambda x: torch.stack([x.sum(), x.cos().sum()]), "sum"),
        (lambda x: torch.cat([x.mean((0, 1)), W[0]]), "mean"),
        (lambda x: (x > 0).count_nonzero(), "sum"),
    ],
)
def test_what_is_a_sum_or_mean_runs(f: Callable[[Tensor], Tensor], reduce: Any):
    cut = tiled(f, "b (tile s) d ->", tiles=2, reduce=reduce)

    assert_close(cut(X), f(X))


def test_sums_of_groups_where_the_axis_is_merged_with_others():
    def f(x: Tensor) -> Tensor:
        rows = torch.zeros(2, 4, dtype=torch.float64)
        return rows.index_add(0, groups(x), x.flatten(0, 1))

    assert_close(tiled(f, "s (tile n) d ->", tiles=3)(X), f(X))
    assert_close(tiled(f, "(tile n) s d ->", tiles=2)(X), f(X))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_cross_entropy_is_a_sum(reduction: str):
    def f(x: Tensor, targets: Tensor) -> Tensor:
        logits = (x @ W).flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction=reduction)
        return losses.sum()

    cut = tiled(f, "b (tile s) d, b (tile s) ->", tiles=3)
    assert_close(cut(X, TARGETS), f(X, TARGETS))


def test_the_mean_of_cross_entropy_warns_of_ignored_targets():
    def f(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy((x @ W).flatten(0, 1), targets.flatten())

    cut = tiled(f, "b (tile s) d, b (tile s) ->", tiles=3, reduce="mean")
    with pytest.warns(RematWarning, match="targets that are not ignored"):
        assert_close(cut(X, TARGETS), f(X, TARGETS))


def test_refuses_before_anything_runs():
    counted = count_operators(_refused)

    assert not counted


def _refused() -> None:
    with pytest.raises(TileError, match="softmax"):
        tiled(lambda x: x.sin().softmax(1), ALIKE, tiles=2)(X)


AROUND: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "plain": lambda f: f,
    "region": remat,
    "vmap": lambda f: lambda x: torch.func.vmap(f)(x[None])[0],
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize(
    "is_of_mode", [False, True], ids=["from outside", "of the mode"]
)
def test_where_no_gradient_is_wanted_it_is_judged_too(mode: Any, around: Any, is_of_mode: bool):  # fmt: skip
    """No region runs there, and the tiles would be as wrong."""
    with mode():
        x = X.clone() if is_of_mode else X
        found = around(tiled(lambda x: x.softmax(-1), ALIKE, tiles=2))(x)
        with pytest.raises(TileError, match="softmax"):
            around(tiled(lambda x: x.softmax(1), ALIKE, tiles=2))(x)

    assert_close(found, X.softmax(-1))


def test_what_was_judged_without_gradients_has_them_later():
    f = tiled(lambda x: (x @ W).sin() @ H, ALIKE, tiles=2)
    x = X.clone().requires_grad_()
    with torch.no_grad():
        f(x)
    (found,) = torch.autograd.grad(f(x).sum(), x)

    assert_close(found, torch.autograd.grad(((x @ W).sin() @ H).sum(), x)[0])


def test_nothing_is_judged_where_regions_are_disabled():
    with disabled():
        found = tiled(lambda x: x.softmax(1), ALIKE, tiles=2)(X)

    assert_close(found, torch.cat([each.softmax(1) for each in X.split(3, 1)], 1))


@pytest.mark.parametrize("tiles", [6, 12])
def test_tiles_of_one_place_are_judged_by_larger_ones(tiles: int):
    bias = seeded(6, 4, seed=3)

    with pytest.raises(TileError, match=r"add at .* has a value for each place"):
        tiled(lambda x: x + bias[: x.shape[1]], ALIKE, tiles=tiles)(X)


@pytest.mark.parametrize("is_keyword", [False, True], ids=["captured", "keyword"])
def test_a_value_for_each_place_must_be_cut_too(is_keyword: bool) -> None:
    """It is refused by what would help; an error of the function's own stays its own."""
    x, mask = seeded(13, 4), seeded(13, 4, seed=1)
    pattern = "(tile n) d -> (tile n) d"

    def fun(x: Tensor, given: Any = mask) -> Tensor:
        return x * given

    options = {"given": mask} if is_keyword else {}
    with pytest.raises(TileError, match=r"on 4 of the 13 places.*positional argument"):
        tiled(fun, pattern, tiles=4)(x, **options)
    with pytest.raises(RuntimeError, match="reduction dim"):
        tiled(lambda x: x @ x, pattern, tiles=4)(x)
