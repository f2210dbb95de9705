"""Law 14 for what models are made of: no nest runs more operators of a kind than plain torch.

Where everything is saved. A kind is counted with its form in place.
"""

from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jacfwd, jvp, vmap

from remat import policies, remat
from remat._torch import schemas
from tests.laws.derivatives import TORCH
from tests.laws.nests import NESTS
from tests.support import ALIASING, assert_close, count_operators, seeded, swept

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:.*saves no memory:remat.RematWarning"),
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

WIDTH = 4
#: A matrix, another one, and two rows.
P = (seeded(WIDTH, WIDTH), seeded(WIDTH, WIDTH, seed=1), *seeded(2, WIDTH, seed=2))
X = seeded(3, WIDTH, seed=3)

Weights = tuple[Tensor, Tensor, Tensor, Tensor]


def gated(p: Weights, x: Tensor) -> Tensor:
    """What the blocks of language models compute."""
    w, v, *_ = p
    return (F.silu(x @ w) * (x @ v)) @ w.mT


def attention(p: Weights, x: Tensor) -> Tensor:
    """Each row attends to both halves of itself."""
    q, k = (x @ p[0]).view(-1, 2, WIDTH // 2), (x @ p[1]).view(-1, 2, WIDTH // 2)
    return ((q @ k.mT).softmax(-1) @ k).flatten(1)


def convolved(p: Weights, x: Tensor) -> Tensor:
    """Without a bias, with one, and transposed."""
    w, v, _, bias = p
    y = F.conv1d(x[:, None].sin(), w[:, None], padding=2).sigmoid()
    y = F.conv1d(y, v[:, :, None], bias).tanh()
    return F.conv_transpose1d(y, v[:, :, None], stride=2).sin()


def put(p: Weights, x: Tensor) -> Tensor:
    """Rows that are written in place, where an index says."""
    y = (x @ p[0]).sin()
    y.index_put_((x.argmax(-1) * 0,), (x @ p[1]).tanh()[:1])
    return y * 2


def rotated(p: Weights, x: Tensor) -> Tensor:
    """Rotary positions: both halves of a row, each read twice."""
    y = x @ p[0]
    left, right = y[..., : WIDTH // 2], y[..., WIDTH // 2 :]
    turned = left * p[2][:2] - right * p[3][:2], right * p[2][:2] + left * p[3][:2]
    return torch.cat(turned, -1).sin() @ p[1]


def filled(p: Weights, x: Tensor) -> Tensor:
    """Slices of a fresh tensor, written in place."""
    y = x @ p[0]
    out = torch.empty_like(y)
    out[..., ::2] = y[..., ::2].sin()
    out[..., 1::2] = y[..., 1::2].tanh()
    return out @ p[1]


def filled_row_by_row(p: Weights, x: Tensor) -> Tensor:
    """The same of single rows and columns."""
    y = x @ p[0]
    out = torch.zeros_like(y)
    for k in range(WIDTH):
        out[:, k] = y[:, k].sin() * y[:, -1]
    out[0] = y[0].tanh()
    return out @ p[1]


def batch_normed(p: Weights, x: Tensor) -> Tensor:
    """Two channels, by the statistics of the batch."""
    y = (x @ p[0]).view(-1, 2, 2)
    scale, shift = (row.view(2, 2).sum(0) for row in p[2:])
    return F.batch_norm(y, None, None, scale, shift, training=True).sin()


def pushed(p: Weights, x: Tensor) -> Tensor:
    """Forward mode inside of the function."""
    return jvp(lambda x: (x @ p[0]).tanh(), (x,), (x.sin(),))[1] @ p[1]


def jacobian(p: Weights, x: Tensor) -> Tensor:
    """The same for every direction."""
    return jacfwd(lambda x: (x @ p[0]).tanh())(x.sum(0))


def solved(p: Weights, x: Tensor) -> Tensor:
    """A system of equations, and how large its matrix is."""
    matrix = p[0] @ p[0].mT + 2 * torch.eye(WIDTH, dtype=x.dtype)
    size = torch.linalg.slogdet(matrix).logabsdet
    return torch.linalg.solve(matrix, x.mT).mT.sin() * size


def twice(p: Weights, x: Tensor) -> Tensor:
    """What it computes twice it returns once."""
    _unread = x @ p[0]
    return (x @ p[0]).sin()


def compared(p: Weights, x: Tensor) -> Tensor:
    """A product for what has no gradient, and once more for what has one."""
    return torch.where(x @ p[0] > 0, (x @ p[0]).sin(), x)


FUNCTIONS: dict[str, Callable[[Weights, Tensor], Any]] = {
    "silu": lambda p, x: F.silu(x @ p[0]) @ p[1],
    "mish": lambda p, x: F.mish(x @ p[0]) @ p[1],
    "glu": lambda p, x: F.glu(x @ p[0]) @ p[1].view(2, -1),
    "gated": gated,
    "softmax": attention,
    "cross_entropy": lambda p, x: F.cross_entropy(x @ p[0], x.argmax(-1)),
    "rms_norm": lambda p, x: F.rms_norm(x @ p[0], (WIDTH,), p[2]).sin(),
    "layer_norm": lambda p, x: F.layer_norm(x @ p[0], (WIDTH,), *p[2:]).sin(),
    "group_norm": lambda p, x: F.group_norm(x @ p[0], 2, *p[2:]).sin(),
    "convolutions": convolved,
    "whole numbers": lambda p, x: ((y := (x @ p[0]).tanh()), y.argmax(-1), y > 0),
    "topk": lambda p, x: (x @ p[0]).tanh().topk(2),
    "sort": lambda p, x: (x @ p[0]).tanh().sort(),
    "index_put": put,
    "rotary": rotated,
    "slices in place": filled,
    "rows in place": filled_row_by_row,
    "batch_norm": batch_normed,
    "solve": solved,
    "compared": compared,
    "cumprod": lambda p, x: (x @ p[0]).cumprod(-1).sin(),
    "twice": twice,
    "jvp": pushed,
    "jacfwd": jacobian,
}

#: torch differentiates another formula than the backward that it runs in first order, and so
#: do programs: that backward gives the numbers, and torch's decomposition of it the derivative,
#: which a third order takes of both.
OTHER_FORMULA = {
    "silu": "silu_backward sigmoid_backward neg add",
    "gated": "silu_backward sigmoid_backward neg add",
    "mish": "mish_backward softplus softplus_backward sigmoid_backward tanh_backward neg add "
    "lt _to_copy",
    "group_norm": "native_group_norm_backward addcmul neg add _to_copy",
    "rms_norm": "_fused_rms_norm_backward div neg _to_copy",
    # How a diagonal is written without a write in place.
    "jacfwd": "diagonal_scatter",
}
#: Each program takes the parts of a saved value again that it reads, and puts their cotangents
#: in place; what is written in place is put into a copy.
IN_PARTS = {
    "rotary": "slice_backward",
    "slices in place": "slice_backward slice_scatter zeros",
    "rows in place": "select_backward select_scatter zeros",
    "cumprod": "slice_backward select_backward",
}
#: In forward mode the weight of each class counts as one that may have a tangent. Where
#: examples are mapped, each program makes the same indices or ones, and torch puts a slice
#: where indices say.
SMALL = {
    ("cross_entropy", "jvp(grad)"): "sub mul",
    ("index_put", "grad(vmap(grad))"): "arange",
    ("slices in place", "grad(vmap(grad))"): "arange gather scatter",
    ("rows in place", "grad(vmap(grad))"): "arange gather scatter",
    ("batch_norm", "grad(vmap(grad))"): "ones",
    ("cumprod", "grad(grad(grad))"): "sum",
}
#: Copies, and tangents that are zeros.
CHEAP = "clone zeros_like fill empty_like empty_strided"


def excused(name: str, nest: str) -> set[str]:
    """The kinds of which a nest may run more."""
    told = [each.get(name, "") for each in (OTHER_FORMULA, IN_PARTS)]
    told += [CHEAP, SMALL.get((name, nest), "")]
    return {f"aten.{kind}" for kind in " ".join(told).split()}


def first(out: Any) -> Tensor:
    """What is differentiated of what a function returns."""
    return out if isinstance(out, Tensor) else out[0]


def of_kinds(run: Callable[[], Any]) -> Counter[str]:
    """How many operators of each kind one run takes, once everything is traced."""
    run()
    found: Counter[str] = Counter()
    for name, count in count_operators(run).items():
        found[name.removesuffix("_")] += count
    return found


NESTED = ("grad(grad)", "jvp(grad)", "grad(vmap(grad))", "grad(grad(grad))")
CASES = [(name, nest) for name in FUNCTIONS for nest in NESTED]
#: Functions whose like is daily.
ALIKE = ("mish", "glu", "sort", "batch_norm", "slices in place")
#: The factors of a solve come with whole numbers: in forward mode they keep their tangents as
#: they are.
FIRST = {"solve": "jvp(grad)"} | dict.fromkeys(ALIKE, "")
DAILY = [
    case
    for case in CASES
    if case[0] == "gated" or case[1] == FIRST.get(case[0], "grad(grad)")
]


def assert_no_more(name: str, nest: str, function: Callable[..., Any]) -> None:
    """Of a kind than plain torch, whose numbers they are."""
    region = remat(function, policy=policies.everything_saveable)

    def plain() -> Any:
        return NESTS[nest](TORCH, lambda p, x: first(function(p, x)), P, X)

    def run() -> Any:
        return NESTS[nest](TORCH, lambda p, x: first(region(p, x)), P, X)

    assert_close(run(), plain())
    found, most = of_kinds(run), of_kinds(plain)
    more = {kind: (n, most[kind]) for kind, n in found.items() if n > most[kind]}
    assert more.keys() <= ALIASING | excused(name, nest), more


@pytest.mark.parametrize(
    "case",
    [*DAILY, *swept(case for case in CASES if case not in DAILY)],
    ids=" ".join,
)
def test_no_more_of_a_kind_than_plain_torch(case: tuple[str, str]) -> None:
    """And the numbers are those of plain torch."""
    assert_no_more(*case, FUNCTIONS[case[0]])


def scaled(p: Weights, x: Tensor) -> Tensor:
    """Of code of its own: traces go by it."""
    return F.rms_norm(x @ p[0], (WIDTH,), p[2]).sin()


def normed(
    x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """An RMS norm with its factors, of tensors below autograd."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    factors = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * factors * (1 if weight is None else weight), factors


@pytest.fixture
def fused_norm() -> Generator[None]:
    """Makes an RMS norm and its backward one operator each, as they are on a GPU."""
    norm, backward = "_fused_rms_norm", schemas.FUSED_NORM_BACKWARD
    here = torch.get_default_device().type
    if schemas.has_kernel_on(here, f"aten::{norm}"):
        yield
        return
    key = {"cpu": "CPU"}.get(here, "PrivateUse1")
    api: Any = torch.library
    with api._scoped_library("aten", "IMPL") as kernels:
        kernels.impl(norm, normed, key)
        kernels.impl(backward, schemas.DECOMPOSED[backward], key)
        yield


@pytest.mark.parametrize("nest", NESTED)
def test_no_more_where_a_norm_is_one_operator(nest: str, fused_norm: None) -> None:
    """Its backward has no derivative: that of what it is made of is taken."""
    del fused_norm
    assert_no_more("rms_norm", nest, scaled)


def test_examples_are_normed_at_once(fused_norm: None) -> None:
    """Torch's vmap runs the backward of a fused norm example by example."""
    del fused_norm
    region = remat(scaled)
    examples = torch.stack([X, X + 1, X - 1])

    def gradients() -> Any:
        return vmap(grad(lambda p, x: region(p, x).sum()), (None, 0))(P, examples)

    assert not of_kinds(gradients)["aten._fused_rms_norm_backward"]
