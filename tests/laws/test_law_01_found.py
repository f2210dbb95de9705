"""Law 1, same numbers: what was found wrong once, each a test.

"Without lossy storage, the outputs of one call, and the contributions it makes to
gradients given its cotangents, are bitwise those of `fun` under `.backward()` on a CPU."
"""

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import TraceError, modules, remat
from remat._torch import fakes
from tests.support import assert_bitwise, assert_close, grads, run, seeded

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


def step(module: nn.Module, fun: Callable[..., Any], x: Tensor) -> list[Any]:
    """Output, gradients and buffers of one training step from a fixed seed."""
    torch.manual_seed(0)
    out = fun(x)
    out = out[0] if isinstance(out, tuple) else out
    out.sum().backward()
    return [out.detach(), *(p.grad for p in module.parameters()), *module.buffers()]


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout_of_a_transposed_value": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True),
        (2, 5, 16),
    ),
    "a_kernel_that_asks_for_grad_mode": (
        lambda: nn.LSTM(4, 6, batch_first=True),
        (2, 5, 4),
    ),
    "buffers_and_in_place_activations": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Flatten()
        ),
        (2, 3, 7),
    ),
}


@pytest.mark.contract
@pytest.mark.parametrize(("make", "shape"), MODULES.values(), ids=MODULES)
def test_a_module_trains_alike(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """Outputs, gradients and buffers to the last bit."""
    torch.manual_seed(1)
    plain = make()
    other = copy.deepcopy(plain)
    x = torch.randn(shape)

    assert_bitwise(step(other, remat(other), x), step(plain, plain, x))


class _Projected(nn.Module):
    """Attention of a tensor with itself, as a module that a model calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, value=x, need_weights=False)[0]


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_tensor_that_is_given_twice_is_one_tensor(engine: str) -> None:
    """Attention projects at once where `query is key`, and so does the region."""
    torch.manual_seed(1)
    plain = _Projected()
    other = modules.apply(copy.deepcopy(plain), "attention", engine=engine)
    x = torch.randn(2, 5, 8)

    for _ in range(2):
        assert_bitwise(step(other, other, x), step(plain, plain, x))


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_which_arguments_are_the_same_is_seen_at_each_call(engine: str) -> None:
    """Another pattern is another signature, also where calls are recognized in C."""

    def fun(tree: dict[str, Tensor], y: Tensor, z: Tensor) -> Tensor:
        scale = 2.0 if z is y else 3.0 if tree["a"] is z else 5.0
        return tree["a"].sin() * y.cos() + scale * z.exp() * y

    region = remat(fun, engine=engine)
    a, b = (seeded(3, seed=k).requires_grad_() for k in (0, 1))
    calls = [({"a": a}, a, a), ({"a": a}, b, b), ({"a": a}, b, a), ({"a": b}, b, a)]

    for args in calls * 3:
        found, right = region(*args), fun(*args)
        assert_bitwise([found, *_pulled(found, a, b)], [right, *_pulled(right, a, b)])


def _pulled(out: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(out.sum(), inputs, allow_unused=True)


@pytest.mark.parametrize("which", [(0,), (0, 1), (2,)], ids=str)
def test_forward_mode_over_a_norm_with_constant_parameters(
    which: tuple[int, ...],
) -> None:
    """Tangents for some of input, weight and bias: torch cannot trace that by itself."""
    args = (seeded(3, 4), seeded(4, seed=1), seeded(4, seed=2))

    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, (4,), w, b).sin().exp()

    def derivative(fun: Any) -> Any:
        def loss(*moved: Tensor) -> Tensor:
            full = list(args)
            for index, tensor in zip(which, moved, strict=True):
                full[index] = tensor
            return fun(*full).sum()

        moved = tuple(args[index] for index in which)
        everything = tuple(range(len(which)))
        return torch.func.jvp(torch.func.grad(loss, everything), moved, moved)

    assert_close(derivative(remat(norm)), derivative(norm))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_attention_heads_by_transposition_per_example() -> None:
    """A program is mapped although examples lie in memory in another order."""

    def attend(x: Tensor) -> Tensor:
        heads = x.view(2, 6, 2, 4).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return out.transpose(1, 2).reshape(2, 6, 8).sin()

    def per_example(fun: Any) -> Tensor:
        one = torch.func.grad(lambda x: fun(x).sum())
        return torch.func.vmap(one)(seeded(3, 2, 6, 8))

    assert_close(per_example(remat(attend)), per_example(attend))


def test_a_last_view_may_be_changed_in_place() -> None:
    """An output that is a view of something dropped is the caller's own."""

    def last_view(x: Tensor) -> Tensor:
        return (x.sin() * 2).view(-1)

    def changed(fun: Any) -> Any:
        return lambda x: fun(x).add_(1).mul_(3)

    args = [seeded(2, 3)]
    assert_bitwise(
        grads(changed(remat(last_view)), args), grads(changed(last_view), args)
    )


def second(fun: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """The derivative of the sine of the first derivative."""
    first = torch.func.grad(lambda x: fun(x).sin().sum())
    return torch.func.grad(lambda x: first(x).sin().sum())


def slope(fun: Callable[..., Any]) -> Callable[[Tensor], Any]:
    """The first derivative and its tangent."""
    first = torch.func.grad(lambda x: fun(x).sin().sum())
    return lambda x: torch.func.jvp(first, (x,), (x.cos(),))


@pytest.mark.contract
def test_forward_mode_over_an_operator_that_prints_its_arguments() -> None:
    """In-place lerp is looked up by trial, which printed tensors and broke the thread."""

    def mixed(x: Tensor) -> Tensor:
        return (x * 2).lerp_(x.sin(), x.cos())

    x = seeded(3, 4)

    assert_close(slope(remat(mixed))(x), slope(mixed)(x))


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


@pytest.mark.contract
@pytest.mark.parametrize("name", ["ceil", "sign", "zeros_like"])
def test_a_derivative_that_needs_no_cotangent(name: str) -> None:
    """Where a gradient is zero whatever comes back, a cotangent of it still comes."""
    fun = getattr(torch, name)
    x = seeded(3, 4)

    def around(inner: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda x: inner(x) * x

    region: Any = remat(lambda x: fun(x) + 0 * x)
    found = second(around(region))(x)

    assert_close(found, second(around(lambda x: fun(x) + 0 * x))(x))
    bare: Any = remat(fun)
    assert_close(second(bare)(x), second(fun)(x))


@pytest.mark.contract
def test_parts_of_an_unsafe_split_share_memory() -> None:
    """What `unsafe_chunk` hands out are views, whatever its schema says."""

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        return torch.unsafe_chunk(x, 2)

    assert_bitwise(grads(remat(parts), [seeded(4, 3)]), grads(parts, [seeded(4, 3)]))


@pytest.mark.contract
@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("cotangent", [-2.0, float("inf")])
def test_the_derivative_of_the_largest(name: str, cotangent: float) -> None:
    """Zeros are zeros whatever their sign, or an infinite cotangent, would make of them."""
    fun = getattr(torch, name)
    args, cotangents = [seeded(3, 4).round()], [torch.tensor(cotangent).double()]

    assert_bitwise(grads(remat(fun), args, cotangents), grads(fun, args, cotangents))


@pytest.mark.contract
def test_forward_mode_beside_a_gradient_that_is_zero() -> None:
    """A formula's zeros without memory are given memory when they leave."""
    x = seeded(3, 4)

    assert_close(slope(remat(torch.sgn))(x), slope(torch.sgn)(x))


@pytest.mark.contract
def test_the_trace_of_each_example() -> None:
    """A value for each example is filled in beside the values of the others."""
    x = seeded(3, 4, 4)

    def per_example(fun: Callable[..., Tensor]) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda x: fun(x).sin()))(x)

    assert_close(per_example(remat(torch.trace)), per_example(torch.trace))


@pytest.mark.contract
@pytest.mark.parametrize("derive", [second, slope])
def test_statistics_from_outside_of_a_transform(derive: Callable[..., Any]) -> None:
    """Running statistics that no transform has wrapped are written, and once."""
    x = seeded(5, 3)

    def after(wrap: Callable[..., Any]) -> tuple[Any, ...]:
        mean, var = torch.zeros(3).double(), torch.ones(3).double()
        norm = wrap(lambda x, m, v: F.batch_norm(x, m, v, training=True))
        return derive(lambda x: norm(x, mean, var))(x), mean, var

    def itself(fun: Callable[..., Any]) -> Callable[..., Any]:
        return fun

    assert_close(after(remat), after(itself))


@pytest.mark.contract
def test_forward_mode_over_attention_with_a_mask_to_learn() -> None:
    """Which kernel runs depends on what requires grad, also inside forward mode."""
    mask = seeded(6, 6)

    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    def moved(fun: Callable[..., Any]) -> Any:
        first = torch.func.grad(lambda x, m: fun(x, m).sin().sum(), (0, 1))
        return torch.func.jvp(first, (x, mask), (x.cos(), mask.cos()))

    x = seeded(2, 1, 6, 8)

    assert_close(moved(remat(attend)), moved(attend))


@pytest.mark.contract
def test_the_second_backward_of_a_layer_for_each_example() -> None:
    """Mapped, the gradient of the bias is the cotangent itself, and still an output."""
    x, weight, bias = seeded(3, 4), seeded(2, 4), seeded(2)

    def second(layer: Callable[..., Any]) -> tuple[Tensor, ...]:
        def loss(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
            return layer(x, w, b).sin().sum()

        each: Any = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, None, 0))
        given = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        found = torch.stack([g.cos().sum() for g in each(*given, x)])
        return torch.autograd.grad(found.sum(), given)

    assert_close(second(remat(F.linear)), second(F.linear))


@pytest.mark.contract
def test_a_strided_copy_of_each_example() -> None:
    """Its derivative writes to a strided view, for which torch's vmap has no rule."""
    x = seeded(3, 4)

    def per_example(fun: Callable[..., Any]) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda x: fun(x).sin().sum()))(x)

    for size, stride in (((), ()), ((2, 2), (2, 1))):
        fun = functools.partial(torch.as_strided_copy, size=size, stride=stride)
        assert_close(per_example(remat(fun)), per_example(fun))


@pytest.mark.contract
def test_a_function_that_runs_again_for_each_example() -> None:
    """It is run as torch runs it there, and takes apart what vmap has no rule for."""
    x, start = seeded(3, 4), torch.tensor(1)

    def per_example(fun: Callable[..., Any]) -> Tensor:
        one = torch.func.grad(lambda x: fun(x, 0, start, 2).sin().sum())
        return torch.func.vmap(one)(x)

    again = remat(torch.narrow, engine="rerun")

    assert_close(per_example(again), per_example(torch.narrow))


@pytest.mark.contract
def test_a_cotangent_that_is_a_constant() -> None:
    """No derivative by it is traced: some backwards have none, and need none."""
    table = seeded(5, 3)

    def bag(table: Tensor) -> Tensor:
        words = torch.tensor([[0, 2, 2], [4, 1, 0]])
        return F.embedding_bag(words, table.exp(), mode="max")

    def curved(fun: Callable[..., Any]) -> Tensor:
        first = torch.func.grad(lambda x: fun(x).sum())
        return torch.func.grad(lambda x: first(x).sin().sum())(table)

    assert_close(curved(remat(bag)), curved(bag))


@pytest.mark.contract
def test_a_captured_output_under_an_unusual_cotangent() -> None:
    """A captured tensor that is returned as it is is known when a backward is traced."""
    weight = seeded(3, seed=1).requires_grad_()

    def fun(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + x, weight

    def gradient(fun: Callable[..., Any]) -> Any:
        x = seeded(2, 3).requires_grad_()
        outputs = fun(x)
        cotangents = [seeded(3, 2).mT, seeded(6)[::2]]
        return torch.autograd.grad(outputs, [x, weight], cotangents)

    assert_bitwise(gradient(remat(fun)), gradient(fun))


@pytest.mark.contract
def test_forward_mode_per_example_beside_a_parameter() -> None:
    """Tangents that are zeros without memory are added to others under two vmaps."""
    weight = seeded(3, seed=1).requires_grad_()

    def fun(x: Tensor) -> Tensor:
        return (x * weight).sin()

    def gradient(fun: Callable[..., Any]) -> Any:
        found = torch.func.vmap(torch.func.jacfwd(fun))(seeded(4, 2, 3))
        return found, torch.autograd.grad(found.cos().sum(), weight)

    assert_close(gradient(remat(fun)), gradient(fun))


def cut_in_two(x: Tensor) -> tuple[Tensor, ...]:
    """Its argument and a value, and what is detached of both."""
    y = x.sin()
    return x.mT, x.detach(), x.detach().mT, y, y.mT.detach()


def in_halves(x: Tensor) -> tuple[Tensor, ...]:
    """The same after a change in place, of parts."""
    y = x.sin().mul_(2)
    return y, y.detach().chunk(2)[0], y.chunk(2)[1]


@pytest.mark.contract
@pytest.mark.parametrize("fun", [cut_in_two, in_halves])
def test_what_is_detached_has_no_tangent(fun: Callable[..., Any]) -> None:
    """In a region that a parameter keeps from running plainly, too."""
    weight = seeded(3, seed=1).requires_grad_()

    def both(x: Tensor) -> tuple[Tensor, ...]:
        return *fun(x), weight.sin()

    x = seeded(2, 3)

    assert_close(
        torch.func.jvp(remat(both), (x,), (x.cos(),)),
        torch.func.jvp(both, (x,), (x.cos(),)),
    )


@pytest.mark.contract
def test_forward_mode_over_an_output_that_no_example_moves() -> None:
    """It is repeated over the batch, without room for a tangent of each example."""
    weight = seeded(3, seed=1).requires_grad_()

    def fun(x: Tensor) -> Tensor:
        return weight.cumsum(0)

    def within(fun: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: fun(x) * x

    def pushed(fun: Callable[..., Tensor]) -> Any:
        x = seeded(2, 3)
        return torch.func.jvp(torch.func.vmap(within(fun)), (x,), (x.cos(),))

    assert_close(pushed(remat(lambda x: remat(fun)(x))), pushed(fun))


@pytest.mark.contract
def test_one_batch_norm_twice() -> None:
    """Its running statistics are written by both calls, the second upon the first."""
    norms = [nn.BatchNorm1d(2, dtype=torch.float64) for _ in range(2)]
    x = seeded(3, 2).requires_grad_()
    remat(lambda x: norms[0](norms[0](x)), rng="preserve")(x).sum().backward()
    norms[1](norms[1](x.detach()))

    assert_bitwise(dict(norms[0].named_buffers()), dict(norms[1].named_buffers()))


@pytest.mark.contract
@pytest.mark.parametrize("is_outer_region", [False, True])
def test_a_batch_norm_in_and_outside_of_a_region(is_outer_region: bool) -> None:
    """Statistics are written as torch's kernel writes them: who saved them does not mind."""

    def gradient(inner: Callable[..., Any], outer: Callable[..., Any]) -> Tensor:
        norm = nn.BatchNorm1d(3, dtype=torch.float64)
        again = inner(lambda x: norm(x), rng="preserve")
        x = seeded(2, 3).requires_grad_()
        whole = outer(lambda x: again(norm(x)).sin(), rng="preserve")
        return torch.autograd.grad(whole(x).sum(), x)[0]

    def plain(fun: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return fun

    outer = remat if is_outer_region else plain

    assert_bitwise(gradient(remat, outer), gradient(plain, plain))


@pytest.mark.contract
@pytest.mark.parametrize("is_training", [True, False])
def test_a_batch_norm_of_channels_that_come_last(is_training: bool) -> None:
    """The kernel lays its output out anew, and views that follow rely on it."""
    norm = nn.BatchNorm1d(3, dtype=torch.float64).train(is_training)
    linear = nn.Linear(3, 2, dtype=torch.float64)

    def fun(x: Tensor) -> Tensor:
        return linear(norm(x.transpose(1, 2)).transpose(1, 2))

    x = seeded(4, 5, 3)
    assert_bitwise(grads(remat(fun), (x,)), grads(fun, (x,)))


def attention(**options: Any) -> Callable[..., Tensor]:
    """Asks whether query, key and value are one tensor, and computes accordingly."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    return lambda q, k, v: module(q, k, v, **options)[0]


SHARED: dict[str, Callable[..., Tensor]] = {
    "attention": attention(),
    "attention_without_weights": attention(need_weights=False),
    "branch": lambda a, b, c: (a.sin() if a is b else a.cos()) * (c + (b is c)).sin(),
}


@pytest.mark.contract
@pytest.mark.parametrize("name", SHARED)
def test_a_tensor_that_is_given_twice_is_one(name: str) -> None:
    """In this call and in no other; recognized calls keep them apart too."""
    plain, region = SHARED[name], remat(SHARED[name])
    x, y = seeded(2, 3, 8), seeded(2, 3, 8, seed=1)

    def both(fun: Callable[..., Tensor]) -> list[Any]:
        calls: list[Callable[[Tensor, Tensor], Tensor]] = [
            lambda x, _: fun(x, x, x),
            lambda x, y: fun(x, y, y),
            lambda x, y: fun(x, y, x),
            lambda x, y: fun(x, y, y.clone()),
        ]
        return [grads(call, (x, y)) for call in calls * 2]

    assert_bitwise(both(region), both(plain))


@pytest.mark.contract
def test_a_tensor_that_is_given_twice_is_held_once() -> None:
    """Under the name that it has first."""
    x = seeded(3).requires_grad_()
    region: Any = remat(lambda a, b: (a * b).sin().sin())

    assert [row.path for row in region.saved_residuals(x, x)] == ["a"]
    assert [row.path for row in region.saved_residuals(x, x * 1)] == ["a", "b"]


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
    with pytest.raises(TraceError, match=r"test_law_01_found\.py") as error:
        remat(in_place)(seeded(3, 4).requires_grad_(), torch.tensor(1))

    assert "the result of `x[i]`, where `i` is a tensor, is changed in place" in str(
        error.value
    )
    assert "Write x[i] = ..., or x[i] += ..." in str(error.value)


@pytest.mark.contract
def test_the_callers_saved_tensor_hooks_see_no_stand_in() -> None:
    """They see what the region saves, and are there again after the trace."""
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    x = seeded(3).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        found = grads(remat(lambda x: torch.sin(x).sin()), (x,))
        traced = len(seen)
        x.exp()

    assert_bitwise(found, grads(lambda x: torch.sin(x).sin(), (x,)))
    assert traced == 1
    assert len(seen) == 2
    assert {type(tensor) for tensor in seen} == {Tensor}


@pytest.mark.parametrize("num_classes", [4, 6])
def test_forward_mode_over_a_class_of_each_row(num_classes: int) -> None:
    """Routing by `F.one_hot` has second derivatives of every order of modes."""

    def routed(x: Tensor) -> Tensor:
        weight, expert = x.softmax(-1).max(-1)
        chosen = F.one_hot(expert, num_classes=num_classes).to(x.dtype)
        return (chosen * weight[:, None] * x.sin().sum()).square().sum()

    x = seeded(3, 4)
    for derive in (torch.func.hessian, slope, second):
        assert_close(derive(remat(routed))(x), derive(routed)(x))


class Reversed(torch.autograd.Function):
    """A view of its argument, with the gradient turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -gradient


class Auxiliary(torch.autograd.Function):
    """Its first argument as it is, with a loss hung on it, as for the balance of experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, torch.full_like(ctx.saved_tensors[0], 3.0)


def with_loss(x: Tensor, w: Tensor) -> Tensor:
    return Auxiliary.apply(x, (x @ w).square().sum())  # pyright: ignore[reportReturnType]


def beside_its_base(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    return h, Reversed.apply(h)


def view_of_it(x: Tensor, w: Tensor) -> Any:
    return cast("Tensor", Reversed.apply(x)).T, x @ w


def hooked_view(x: Tensor, w: Tensor) -> Any:
    rows = x.view(-1)
    rows.register_hook(lambda gradient: gradient * 2)
    return rows, x @ w


def hooked_argument(x: Tensor, w: Tensor) -> Any:
    x.register_hook(lambda gradient: gradient * 2)
    return x.view(-1), x @ w


@pytest.mark.parametrize(
    "fun", [with_loss, beside_its_base, view_of_it, hooked_view, hooked_argument]
)
def test_what_shares_memory_may_have_a_derivative_of_its_own(
    fun: Callable[..., Any],
) -> None:
    """It is no view of the argument, or of the other output, to autograd."""
    args = seeded(4, 5), seeded(5, 5, seed=1)

    assert_bitwise(run(remat(fun), args), run(fun, args))


def test_a_loss_on_an_argument_without_a_gradient() -> None:
    """The output needs a gradient although what it shares its memory with needs none."""
    x, w = seeded(4, 5), seeded(5, 5, seed=1).requires_grad_()

    (found,) = torch.autograd.grad(remat(with_loss)(x, w).sum(), w)

    assert torch.equal(found, torch.autograd.grad(with_loss(x, w).sum(), w)[0])


def test_only_a_derivative_of_its_own_costs_a_copy() -> None:
    """Views that a user's function stands far from are views."""

    def upstream(x: Tensor) -> tuple[Tensor, Tensor]:
        h = cast("Tensor", Reversed.apply(x.sin())).exp()
        return h, h.T

    h, transposed = remat(upstream)(seeded(4, 5).requires_grad_())

    assert transposed.data_ptr() == h.data_ptr()


_aten: Any = torch.ops.aten
TWO_LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softplus": lambda g, x: _aten.softplus_backward(g, x, 1, 20),
    "elu": lambda g, x: _aten.elu_backward(g, 1, 1, 1, False, x),
    "hardtanh": lambda g, x: _aten.hardtanh_backward(g, x, -1, 1),
    "hardswish": lambda g, x: _aten.hardswish_backward(g, x),
    "hardsigmoid": lambda g, x: _aten.hardsigmoid_backward(g, x),
    "logit": lambda g, x: _aten.logit_backward(g, x),
    "bce": lambda g, x: _aten.binary_cross_entropy_backward(g, x, x),
    "mse": lambda g, x: _aten.mse_loss_backward(g, x, x, 0),
    "mean_mse": lambda g, x: _aten.mse_loss_backward(g.sum(), x, x, 1),
    "smooth_l1": lambda g, x: _aten.smooth_l1_loss_backward(g, x, x, 0, 1.0),
    "huber": lambda g, x: _aten.huber_loss_backward(g, x, x, 0, 1.0),
    "log_softmax": lambda g, x: _aten._log_softmax_backward_data(g, x, 1, g.dtype),
    "power": lambda g, _: torch.pow(2, g),
    "relu": lambda g, x: _aten.threshold_backward(g, x, 0),
    "leaky_relu": lambda g, x: _aten.leaky_relu_backward(g, x, 0.1, False),
    "log_sigmoid": lambda g, x: _aten.log_sigmoid_backward(g, x, g.new_empty(x.shape)),
}


@pytest.mark.contract
@pytest.mark.parametrize("function", TWO_LAYOUTS.values(), ids=TWO_LAYOUTS)
def test_a_trace_knows_how_kernels_lay_out_what_they_return(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Where inputs are laid out in two ways torch's own fake tensors had other strides."""
    x = seeded(2, 3, 4).sigmoid()
    orders = itertools.permutations(range(3))
    laid_out = [
        torch.empty_permuted(x.shape, order, dtype=x.dtype).copy_(x) for order in orders
    ]

    mode: Any = fakes.fake_mode(torch.device("cpu"), None)
    for pair in itertools.product([*laid_out, x[:, :1].expand(x.shape)], repeat=2):
        with mode:
            known = function(*map(mode.from_tensor, pair))
        assert known.stride() == function(*pair).stride()


@pytest.mark.contract
@pytest.mark.parametrize(
    "activation", [F.softplus, F.elu, F.hardtanh, F.hardswish, F.hardsigmoid]
)
def test_a_gradient_laid_out_like_another_tensor_is_viewed(
    activation: Callable[[Tensor], Tensor],
) -> None:
    """The view was laid out for another gradient, and the backward ended in torch's error."""

    def fun(x: Tensor) -> Tensor:
        return activation(x.view(2, 3, 4)).transpose(1, 2)

    x, cotangent = seeded(2, 12).requires_grad_(), seeded(2, 4, 3, seed=1)

    found, right = (
        torch.autograd.grad(each(x), x, cotangent) for each in (remat(fun), fun)
    )
    assert_bitwise(found, right)


def _into(y: Tensor) -> Tensor:
    """Writes what is laid out one way to a tensor that is laid out in another."""
    with torch.no_grad():
        found = torch.empty(y.shape, dtype=y.dtype)
        torch.mul(y, 2, out=found)
    return found


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda y: y.cumsum_(0),
    "fill": lambda y: y.masked_fill_(y > 0.5, 0.5),
    "scatter": lambda y: y.scatter_add_(0, torch.zeros(2, 4).long(), _ones(2, 4)),
    "index": lambda y: y.index_add_(0, torch.tensor([1]), _ones(1, 4)),
    "triangle": lambda y: y.tril_(),
    "matmul": lambda y: y.addmm_(_ones(3, 2), _ones(2, 4)),
    "alias": lambda y: (y.view_as(y).cumsum_(1), y)[1],
    "part": lambda y: (y[1:].cumsum_(1), y)[1],
    "list": lambda y: (_aten._foreach_mul_([y], 2.0), y.cumsum_(0))[1],
    "out": _into,
}


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


@pytest.mark.contract
@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
def test_an_operator_in_place_leaves_the_strides(
    write: Callable[[Tensor], Tensor],
) -> None:
    """Of what it writes to, for whoever views it next; the pure operator chooses others."""

    def fun(x: Tensor) -> tuple[Tensor, Tensor]:
        written = write(x.t() * 1)
        return written, x.sin() * written.t().reshape(x.shape)

    x = seeded(4, 3).requires_grad_()
    (right, after), (found, then) = fun(x), remat(fun)(x)

    assert found.stride() == right.stride()
    assert_bitwise(found, right)
    assert_bitwise(then, after)
    assert_bitwise(
        torch.autograd.grad(then.sum(), x), torch.autograd.grad(after.sum(), x)
    )
