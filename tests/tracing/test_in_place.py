"""In-place operators become pure ones by name where nothing else has seen the tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, jvp, vmap

from remat import TraceError, remat
from remat._torch import tracer
from tests.support import assert_bitwise, assert_close, daily, grads, seeded

pytestmark = pytest.mark.contract


def fresh(x: Tensor) -> Tensor:
    """Two writes to a tensor of its own, read in between and after."""
    y = x.sin()
    y.mul_(x)
    z = y.exp()
    return y.add_(1).cos() + z


def through_a_view(x: Tensor) -> Tensor:
    """A write to a part."""
    y = x.sin()
    y[0].mul_(3)
    return y.cos()


def under_an_alias(x: Tensor) -> Tensor:
    """A write that a view made before shows."""
    y = x.sin()
    part = y[:1]
    y.mul_(3)
    return part.cos() + y.sum()


def promoted(x: Tensor) -> Tensor:
    """The pure operator's result would be of another dtype."""
    y = x.sin().float()
    y.mul_(x.double())
    return y.cos()


def expanded(x: Tensor) -> Tensor:
    """The written tensor was an input's; a copy of it is fresh."""
    y = x.clone()
    y.fill_(2.0)
    return (y * x).sin()


def power(x: Tensor) -> Tensor:
    """aten.pow_.Scalar, whose pure overload is not aten.pow.Scalar."""
    y = x.sin()
    y.pow_(2)
    return y.cos()


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "fresh": (fresh, True),
    "filled": (expanded, True),
    "overload": (power, True),
    "view": (through_a_view, False),
    "alias": (under_an_alias, False),
    "dtype": (promoted, False),
}


@pytest.fixture
def second_traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What went through torch's functionalization."""
    known: list[Any] = []
    functionalized = tracer.functionalized

    def noticed(function: Any) -> Any:
        known.append(function)
        return functionalized(function)

    monkeypatch.setattr(tracer, "functionalized", noticed)
    return known


@pytest.mark.parametrize(("fun", "is_renamed"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_writes_inside_a_region(
    fun: Callable[[Tensor], Tensor], is_renamed: bool, second_traces: list[Any]
) -> None:
    """The numbers are plain autograd's, whichever way a write goes."""
    x = seeded(3, 4).requires_grad_()

    y = remat(fun)(x)
    (found,) = torch.autograd.grad(y.sum(), x)

    assert torch.equal(y, fun(x))
    assert torch.equal(found, torch.autograd.grad(fun(x).sum(), x)[0])
    assert (not second_traces) == is_renamed


def test_dropout_needs_no_second_trace(second_traces: list[Any]) -> None:
    """Its mask is drawn in place; in a transformer's layer also for a transposed tensor."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    x = seeded(2, 5, 8)
    gradients = []

    for call in (layer, remat(layer)):
        torch.manual_seed(3)
        call(x).sum().backward()
        gradients.append([parameter.grad for parameter in layer.parameters()])
        layer.zero_grad()

    assert all(map(torch.equal, *gradients))
    assert not second_traces


def test_a_default_that_the_pure_operator_lacks() -> None:
    """Dropout at one half beside statistics, which take the second trace."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    x = seeded(3, 4).requires_grad_()
    found = []

    for call in (model, remat(model)):
        torch.manual_seed(3)
        y = call(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), x)))

    assert all(map(torch.equal, *found))


def test_numbers_that_are_assigned() -> None:
    """`y.data = ...` is unseen by a trace, but for `y.data *= 2`, which assigns its own."""

    def scaled(x: Tensor) -> Tensor:
        y = x.sin()
        y.data *= 2
        return y * x

    def replaced(x: Tensor) -> Tensor:
        y = x.sin()
        y.data = x.detach().cos()
        return y * x

    assert_bitwise(grads(remat(scaled), [seeded(3)]), grads(scaled, [seeded(3)]))
    with pytest.raises(
        TraceError, match=r"`\.data = \.\.\.` of float64\[3\] at test_in"
    ):
        remat(replaced)(seeded(3).requires_grad_())
    rerun = remat(replaced, engine="rerun")
    assert_bitwise(grads(rerun, [seeded(3)]), grads(replaced, [seeded(3)]))


@pytest.mark.parametrize(
    "part", [slice(-1, None), slice(1, -1), slice(-9, 2), slice(3, 1), slice(0, 9, 2)]
)
def test_a_write_to_a_slice_counted_from_the_end_is_mapped(part: slice) -> None:
    """torch's vmap of `slice_scatter` takes where a slice starts and ends as it is."""

    def fun(x: Tensor) -> Tensor:
        fresh = x * 2.0
        fresh[:, part].sin_()
        return fresh.exp().sum()

    x = seeded(3, 4)

    def second(of: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.func.jacrev(torch.func.grad(of))(x)

    torch.testing.assert_close(second(remat(fun)), second(fun))


@pytest.mark.contract
def test_a_loss_whose_backward_writes_in_place() -> None:
    """The pass that replaces in-place operators keeps all others whole."""
    args = (seeded(), seeded(seed=1))
    fun = F.binary_cross_entropy_with_logits

    assert_bitwise(grads(remat(fun), args), grads(fun, args))
    assert_bitwise(remat(fun)(*args), fun(*args))
    assert "aten.binary_cross_entropy_with_logits" in operators_of(remat(fun), args)


def operators_of(region: Any, args: Any) -> tuple[str, ...]:
    """The operators of a region's forward program."""
    return region.programs(*args)[0].operators


def overlapping(x: Tensor) -> Tensor:
    """One row of windows that overlap."""
    windows = (x * 1).unfold(0, 2, 1)
    windows[0].zero_()
    return windows.sin()


def apart(x: Tensor) -> Tensor:
    """Windows that leave an element out."""
    y = x * 2
    y.unfold(0, 2, 2).mul_(2)
    return y.sin()


def repeated(x: Tensor) -> Tensor:
    """Rows that are one in memory."""
    y = x.detach() * 2
    y.expand(2, 5).zero_()
    return x * y.cos()


def real_part(x: Tensor) -> Tensor:
    """A write that a derivative of the second order cannot make anew."""
    y = torch.complex(x, x.cos())
    y.real.mul_(2)
    return y.abs()


def _second(fun: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    slope = torch.func.grad(lambda x: fun(x).sum())
    return torch.func.jvp(slope, (x,), (x,))[1]


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize(
    ("fun", "derive"),
    [
        (overlapping, lambda fun, x: grads(fun, [x])),
        (apart, lambda fun, x: grads(fun, [x])),
        (repeated, lambda fun, x: grads(fun, [x])),
        (real_part, _second),
    ],
    ids=["overlapping", "apart", "repeated", "real part, jvp(grad)"],
)
def test_a_write_that_torch_cannot_follow_is_named(
    fun: Callable[[Tensor], Tensor], derive: Callable[..., Any]
) -> None:
    """By its line, instead of torch's words about its compiler."""
    x = seeded(5)
    with pytest.raises(
        TraceError, match=r"\w+: reads or writes.*cannot be traced.*rerun"
    ):
        derive(remat(fun), x)
    assert_close(derive(remat(fun, engine="rerun"), x), derive(fun, x))


def into_nothing(x: Tensor) -> Tensor:
    """torch gives the empty tensor the shape of what is written."""
    y = torch.empty(0, dtype=x.dtype)
    torch.matmul(x.detach(), x.detach().mT, out=y)
    return y.add_(1) @ x


def through_unsafe_parts(x: Tensor) -> Tensor:
    """Parts of which torch says that they are new, and which lie in the whole all the same."""
    y = x * 1.0
    one, other = y.unsafe_chunk(2, -1)
    one.add_(5.0)
    return y.sum() + other.cos().sum() + one.sigmoid().sum()


@pytest.mark.parametrize("fun", [into_nothing, through_unsafe_parts])
def test_writes_to_what_looks_new(fun: Callable[[Tensor], Tensor]) -> None:
    """Numbers and gradients are plain's to the bit."""
    x = seeded(4, 6)
    assert_bitwise(grads(remat(fun), [x]), grads(fun, [x]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gates_of_a_recurrent_cell(dtype: torch.dtype) -> None:
    """It writes to parts of its gates, which a kernel then reads in their strides."""
    torch.manual_seed(0)
    cell = nn.GRUCell(16, 16).to(dtype)
    given = [seeded(8, 16, dtype=dtype), seeded(8, 16, seed=1, dtype=dtype)]
    assert_bitwise(grads(remat(cell), given), grads(cell, given))


#: Temporaries by how they lie.
LAID_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "in order": lambda x: x.sin(),
    "across": lambda x: x.t().sin(),
    "view": lambda x: x.sin().t(),
    "part": lambda x: x.t().sin()[:, 1:],
}
#: Writes to them that count in memory, or whose derivatives do.
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda y: y[0].mul_(2),
    "column": lambda y: y[:, 0].mul_(y[:, 1].exp()),
    "rows": lambda y: y[1:].mul_(3),
    "narrow": lambda y: y.narrow(1, 0, 2).sin_(),
    "view of a view": lambda y: y.t()[0].mul_(2),
    "diagonal": lambda y: y.diagonal().mul_(2),
    "fill_diagonal_": lambda y: y.fill_diagonal_(0.5),
    "strided": lambda y: y.as_strided((2,), (2,)).mul_(2),
    "strided part": lambda y: y.t()[1:].as_strided((2,), (1,)).mul_(2),
    "read strided": lambda y: y[0].mul_(y[1:].as_strided((1,), (1,)).clone().exp()),
}
#: The others write to such parts too.
OF_EACH_KIND = ("column", "view of a view", "fill_diagonal_", "strided", "read strided")


def _mapped_push(fun: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return vmap(lambda x: jvp(grad(fun), (x,), (x.cos(),))[1])(torch.stack([x, -x]))


#: Transforms under which a program that counts in memory is mapped, or derived from again.
DERIVED: dict[str, Callable[..., Any]] = {
    "hessian": lambda fun, x: hessian(fun)(x),
    "jacrev(jacrev)": lambda fun, x: jacrev(jacrev(fun))(x),
    "vmap(jvp(grad))": _mapped_push,
    "grad(vmap)": lambda fun, x: grad(lambda x: vmap(fun)(x).sum())(x.expand(2, 3, 3)),
    "jvp(grad)": lambda fun, x: jvp(grad(fun), (x,), (x.cos(),))[1],
    "grad(grad(grad))": lambda fun, x: grad(
        lambda x: grad(lambda x: grad(fun)(x).square().sum())(x).sin().sum()
    )(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script", "ignore:There is a performance")
@pytest.mark.parametrize("derive", daily(DERIVED, ["vmap(jvp(grad))"]))
@pytest.mark.parametrize("write", daily(WRITES, OF_EACH_KIND))
@pytest.mark.parametrize("lay", daily(LAID_OUT, ["across"]))
def test_writes_by_strides_under_transforms(
    lay: Callable[[Tensor], Tensor],
    write: Callable[[Tensor], Any],
    derive: Callable[..., Any],
) -> None:
    """Wherever vmap lays an example, the elements that are read and written are plain's."""

    def fun(x: Tensor) -> Tensor:
        y = lay(x)
        write(y)
        return y.sin().square().sum()

    x = seeded(3, 3)
    assert_close(derive(remat(fun), x), derive(fun, x))


@pytest.mark.parametrize("shape", [(5, 2), (2, 5), (3, 3, 3)])
def test_a_diagonal_of_a_part_is_filled(shape: tuple[int, ...]) -> None:
    """Also around the end of a tall matrix, and in all dimensions at once."""

    def fun(x: Tensor) -> Tensor:
        y = torch.stack([x, x.cos()]).sin()
        y[1].fill_diagonal_(0.5, wrap=True)
        return y.square()

    assert_bitwise(grads(remat(fun), [seeded(*shape)]), grads(fun, [seeded(*shape)]))


def of_two_numbers(x: Tensor) -> Tensor:
    """Complex numbers, read as pairs."""
    pairs = torch.view_as_real(torch.complex(x, x.cos()) * 1)
    return pairs.as_strided((2, 2), (1, 4), 1).square()


def of_pairs(x: Tensor) -> Tensor:
    """Pairs, read as complex numbers."""
    whole = torch.view_as_complex((x * 1).reshape(3, 2, 2))
    return whole.as_strided((2,), (1,), 1).abs()


def of_halves(x: Tensor) -> Tensor:
    """Numbers, each read as two."""
    return x * (x * 1).view(torch.float32).detach().as_strided((4,), (1,), 5)


@pytest.mark.parametrize("fun", [of_two_numbers, of_pairs, of_halves])
def test_strides_count_elements_of_the_views_own_dtype(fun: Any) -> None:
    """Not those of the memory behind it."""
    assert_bitwise(grads(remat(fun), [seeded(3, 4)]), grads(fun, [seeded(3, 4)]))


@pytest.mark.parametrize("dim", [0, 1])
def test_strides_of_nothing_under_vmap(dim: int) -> None:
    """An empty temporary lies in any order."""

    def fun(x: Tensor) -> Tensor:
        y = x[:0].clone()
        y.as_strided((0, 2), (2, 1)).add_(1)
        return y.sum() + x.sin().sum()

    def derive(fun: Any) -> Any:
        return vmap(grad(fun), dim, dim)(seeded(3, 3, 3))

    assert_close(derive(remat(fun)), derive(fun))
