"""What must hold of `Shard` on each rank of a world; `test_shard.py` runs it."""

import gc
import math
import tempfile
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from remat import policies, remat
from remat._torch import tensors
from remat.reporting._demo.gpt import GPTShape
from remat.storage import Cast, Keep, Offload, Place, Quantize, Shard, Sparse
from tests.benchmarks.storage import measured
from tests.storage.parallel import (
    WIDTH,
    assert_same,
    block,
    gathers,
    gradient,
    leaves,
    parameters,
    parts_in,
    step,
    waiting_in,
)
from tests.storage.tokens import BATCH, SEQ, curve, tokens

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
    torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (3,), (8,), (2, 0, 3), (1, 5, 3), (4, 7, 2), (2, 3, 2, 3)]


def check_round_trips_of_every_dtype_and_shape(mesh: Any) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            count = math.prod(shape)
            value = torch.randint(0, 100, shape).to(dtype)
            stored = Shard(mesh).store(value)

            (part,) = stored.tensors
            assert part.numel() == math.ceil(count / mesh.size())
            back = stored.restore()
            assert back.dtype == value.dtype
            assert back.shape == value.shape
            assert tensors.same_bits(back, value), (dtype, shape)
            assert tensors.same_bits(stored.restore(), value), (dtype, shape)


def check_inputs_of_any_layout(mesh: Any) -> None:
    numbers, pairs = torch.randn(64), torch.randn(3, 5, dtype=torch.complex64)
    layouts = {
        "one number of a row": numbers[::64],
        "one of a table": numbers.view(8, 8)[:1, :1],
        "0-d": numbers.view(8, 8)[3, 3],
        "conjugate": pairs.conj(),
        "conjugate and transposed": pairs.mH,
        "imaginary part of a conjugate": pairs.conj().imag,
        "one such part": pairs[:1, :1].conj().imag,
    }
    for how in (Shard(mesh), Sparse(0) >> Shard(mesh)):
        region = remat(lambda x: (x.sin() * x.cos()).abs(), saved_inputs=how)
        for what, value in layouts.items():
            x = value.detach().requires_grad_()
            (expected,) = torch.autograd.grad((x.sin() * x.cos()).abs().sum(), x)
            (found,) = torch.autograd.grad(region(x).sum(), x)
            assert torch.equal(found, expected), (how, what)


def check_bits_that_no_number_has_come_back(mesh: Any) -> None:
    bits = torch.tensor([0x7FC00001, -1, -(2**31), 0x7F800001, 3], dtype=torch.int32)

    back = Shard(mesh).store(bits.view(torch.float32)).restore()

    assert torch.equal(back.view(torch.int32), bits)


def check_patterns_cut_the_axis_that_they_name(mesh: Any) -> None:
    value = torch.randn(3, 7, 5)
    t = mesh.size()
    for pattern, count in {
        "batch (tp seq) d": 3 * math.ceil(7 / t) * 5,
        "batch (seq tp) d": 3 * math.ceil(7 / t) * 5,
        "(tp batch) ...": math.ceil(3 / t) * 7 * 5,
        "... (tp d)": 3 * 7 * math.ceil(5 / t),
        "batch tp d": 3 * math.ceil(7 / t) * 5,
    }.items():
        stored = Shard(mesh, pattern).store(value)

        assert stored.tensors[0].numel() == count
        assert torch.equal(stored.restore(), value)
    first = Shard(mesh, "batch (tp seq) d").store(value).tensors[0]
    rank, length = mesh.get_local_rank(), math.ceil(7 / t)
    expected = value[:, rank * length :][:, :length]
    assert torch.equal(first[:, : expected.shape[1]], expected)


def check_a_pattern_of_other_dimensions_is_refused(mesh: Any) -> None:
    with pytest.raises(
        ValueError, match=r"It has 2 axes, and the value .* has 3: float32"
    ):
        Shard(mesh, "(tp seq) d").store(torch.ones(2, 3, 4))


def check_patterns_are_of_the_users_axes(mesh: Any) -> None:
    x = torch.randn(SEQ, BATCH, WIDTH).transpose(0, 1).requires_grad_()
    region = remat(curve, saved_inputs=Shard(mesh, "batch (tp seq) d"))

    y = region(x)

    (part,) = parts_in(y)
    assert part.numel() == BATCH * math.ceil(SEQ / mesh.size()) * WIDTH
    y.sum().backward()
    plain = x.detach().requires_grad_()
    curve(plain).sum().backward()
    assert_same([gradient(x)], [gradient(plain)])


def check_a_blocks_gradients_are_those_without_sharding(mesh: Any) -> None:
    params, x = parameters(mesh), tokens()
    plain = step(remat(block), params, x)
    torch.testing.assert_close(step(block, params, x), plain, rtol=1e-4, atol=1e-4)
    for shard in (Shard(mesh), Shard(mesh, "batch (tp seq) d", replicated="trust")):
        for _ in range(2):
            assert_same(step(remat(block, saved_inputs={"x": shard}), params, x), plain)
        policy = policies.save_only_these_names("mid").stored(shard)
        both = remat(block, policy=policy, saved_inputs={"x": shard})
        assert_same(step(both, params, x), plain)


def check_what_waits_is_one_part(mesh: Any) -> None:
    size = mesh.size()
    lengths: dict[str | None, int] = {None: math.ceil(BATCH * SEQ * WIDTH / size)}
    lengths["batch (tp seq) d"] = BATCH * math.ceil(SEQ / size) * WIDTH
    for pattern, count in lengths.items():
        shard = Shard(mesh, pattern)
        params, x = leaves(parameters(mesh), tokens())

        y = remat(block, saved_inputs={"x": shard})(params, x)
        assert [part.numel() for part in parts_in(y)] == [count]

        policy = policies.save_only_these_names("mid").stored(shard)
        y = remat(block, policy=policy, saved_inputs={"x": shard})(params, x)
        assert [part.numel() for part in parts_in(y)] == [count, count]


def check_sizes_around_the_mesh(mesh: Any) -> None:
    for count in range(1, 2 * mesh.size() + 2):
        x = torch.randn(count, requires_grad=True)
        y = remat(curve, saved_inputs=Shard(mesh))(x)
        y.sum().backward()
        plain = x.detach().requires_grad_()
        curve(plain).sum().backward()
        assert_same([gradient(x)], [gradient(plain)])


def check_the_callers_tensor_is_left_alone_and_let_go(mesh: Any) -> None:
    x = torch.randn(12)
    before, memory = x.clone(), x.untyped_storage().data_ptr()
    leaf = x.clone().requires_grad_()
    hidden = leaf * 1
    y = remat(curve, saved_inputs=Shard(mesh))(hidden)
    with torch.no_grad():
        remat(curve, saved_inputs=Shard(mesh))(x)

    (part,) = parts_in(y)
    assert part.untyped_storage().data_ptr() != hidden.untyped_storage().data_ptr()
    assert part.untyped_storage().nbytes() == part.nbytes
    assert hidden.shape == (12,)
    assert torch.equal(hidden, before)
    assert x.untyped_storage().data_ptr() == memory
    memory_of_x = weakref.ref(hidden.untyped_storage())
    del hidden
    gc.collect()
    assert memory_of_x() is None
    y.sum().backward()


def check_parts_are_freed_by_the_backward(mesh: Any) -> None:
    x = torch.randn(12, requires_grad=True)
    y = remat(curve, saved_inputs=Shard(mesh))(x)
    parts = [weakref.ref(part) for part in parts_in(y)]

    y.sum().backward()

    assert [part() for part in parts] == [None]


def check_keywords_and_containers(mesh: Any) -> None:
    def keyed(x: Tensor, *, other: Tensor) -> Tensor:
        return torch.sin(x) * torch.sin(other)

    def held(batch: dict[str, Tensor]) -> Tensor:
        return torch.sin(batch["tokens"]) * torch.sin(batch["mask"])

    for call in (
        lambda x, y: remat(keyed, saved_inputs={"other": Shard(mesh)})(x, other=y),
        lambda x, y: remat(held, saved_inputs={"batch.tokens": Shard(mesh)})(
            {"mask": x, "tokens": y}
        ),
    ):
        x, y = (torch.randn(5, requires_grad=True) for _ in range(2))
        out = call(x, y)
        assert [part.numel() for part in parts_in(out)] == [math.ceil(5 / mesh.size())]
        out.sum().backward()
        expected = torch.autograd.grad((torch.sin(x) * torch.sin(y)).sum(), (x, y))
        assert_same([gradient(x), gradient(y)], expected)


def check_an_integer_first_argument_stays_itself(mesh: Any) -> None:
    def masked(mask: Tensor, x: Tensor) -> Tensor:
        return torch.sin(torch.sin(x) * mask)

    mask, x = torch.tensor([1, 0, 1]), torch.randn(3, requires_grad=True)
    out = remat(masked, saved_inputs=Shard(mesh))(mask, x)
    out.sum().backward()

    assert mask.tolist() == [1, 0, 1]
    plain = torch.autograd.grad(masked(mask, x).sum(), x)
    assert_same([gradient(x)], plain)


def check_parameters_stay_whole_unless_named(mesh: Any) -> None:
    linear = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)

    def apply(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(x @ w).sin()

    out = remat(apply, saved_inputs=Shard(mesh))(x, linear.weight)
    assert [each.shape for each in waiting_in(out)] == [x.shape]
    out = remat(apply, saved_inputs={"w": Shard(mesh)})(x, linear.weight)
    assert [each.shape for each in waiting_in(out)] == [linear.weight.shape]


def check_a_second_backward(mesh: Any) -> None:
    params, x = leaves(parameters(mesh), tokens())
    layer = remat(block, saved_inputs={"x": Shard(mesh)})
    y = layer(params, layer(params, x))

    with gathers() as log:
        first = torch.autograd.grad(y.sum(), (x, *params.values()), retain_graph=True)
        second = torch.autograd.grad(y.sum(), (x, *params.values()))

    assert_same(first, second)
    assert len(log.sizes) == 4


def check_a_second_derivative(mesh: Any) -> None:
    def second(function: Any) -> list[Tensor]:
        x = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
        y = function(function(x))
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return [grad.detach(), *torch.autograd.grad(grad.square().sum(), x)]

    policy = policies.save_only_these_names("mid").stored(Shard(mesh))
    ours = second(remat(curve, policy=policy, saved_inputs=Shard(mesh)))

    torch.testing.assert_close(ours, second(curve))


def check_transforms(mesh: Any) -> None:
    policy = policies.save_only_these_names("mid").stored(Shard(mesh))
    region = remat(curve, policy=policy, saved_inputs=Shard(mesh))
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)

    def compare(transform: Any) -> None:
        torch.testing.assert_close(transform(region)(x), transform(curve)(x))

    compare(lambda f: torch.func.grad(lambda x: f(x).sum()))
    compare(lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum())))
    compare(lambda f: torch.func.jacrev(f))
    grad = lambda f: torch.func.grad(lambda x: f(x).sum())  # noqa: E731
    compare(lambda f: lambda x: torch.func.jvp(grad(f), (x,), (x,))[1])
    compare(lambda f: torch.func.grad(lambda x: grad(f)(x).square().sum()))


def check_patterns_leave_out_what_vmap_adds(mesh: Any) -> None:
    pattern = Shard(mesh, "(tp seq) d")
    region = remat(curve, policy=policies.save_only_these_names("mid").stored(pattern))

    def per_example(f: Any, x: Tensor, depth: int) -> Tensor:
        found = torch.func.grad(lambda x: f(x).sum())
        for dim in range(depth):
            found = torch.func.vmap(found, in_dims=dim)
        return found(x)

    for depth, shape in enumerate([(7, 3), (4, 7, 3), (2, 4, 7, 3)]):
        x = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).view(shape)
        torch.testing.assert_close(
            per_example(region, x, depth), per_example(curve, x, depth)
        )
    dotted = policies.save_only_these_names("mid").stored(Shard(mesh, "... (tp seq) d"))
    dotted_region = remat(curve, policy=dotted)
    value = torch.randn(5, 7, 3)
    batched = torch.func.grad(lambda x: torch.func.vmap(dotted_region)(x).sum())(value)
    torch.testing.assert_close(batched, per_example(curve, value, 1))
    stored = pattern.store(value, Place(order=(None, 0, 1)))
    assert stored.tensors[0].shape == (5, math.ceil(7 / mesh.size()), 3)
    assert torch.equal(stored.restore(), value)


def check_nested_regions(mesh: Any) -> None:
    inner = remat(curve, saved_inputs=Shard(mesh))
    outer = remat(lambda x: inner(inner(x)), saved_inputs=Shard(mesh))
    x = torch.randn(7, requires_grad=True)

    (ours,) = torch.autograd.grad(outer(x).sum(), x)

    assert_same([ours], torch.autograd.grad(curve(curve(x)).sum(), x))


def check_chains(mesh: Any) -> None:
    value = torch.randn(50)
    whole = Cast(torch.bfloat16).store(value).restore()
    assert torch.equal(
        (Cast(torch.bfloat16) >> Shard(mesh)).store(value).restore(), whole
    )
    chain = Shard(mesh) >> Sparse(0)
    sparse = torch.where(value > 1, value, 0.0)
    assert torch.equal(chain.store(sparse).restore(), sparse)
    near = (Shard(mesh) >> Quantize(8)).store(value)
    torch.testing.assert_close(near.restore(), value, atol=0.05, rtol=0.0)
    x = torch.randn(50, requires_grad=True)
    layers = [
        remat(curve, saved_inputs=Shard(mesh) >> Quantize(8)),
        remat(curve, saved_inputs=Quantize(8) >> Shard(mesh)),
    ]
    with gathers() as log:
        layers[1](layers[0](x)).sum().backward()
    # Numbers, steps and minima: of two dtypes; and one value as it is.
    assert len(log.sizes) == 3


def check_a_second_cut_over_the_same_ranks_is_refused(mesh: Any) -> None:
    """With "trust" its gradients were wrong without a word."""
    x = torch.randn(8, 8, requires_grad=True)
    for replicated in ("check", "trust"):
        once = Shard(mesh, replicated=replicated)
        for twice in (once >> Sparse(0) >> once, Sparse(0) >> once >> once):
            region = remat(torch.sin, saved_inputs=twice)
            with pytest.raises(ValueError, match="another `Shard` over the same ranks"):
                region(x)


def check_the_demos_gpt_trains_sharded_quantized_and_in_files(mesh: Any) -> None:
    shape = GPTShape(layers=2, width=32, heads=2, time=16, batch=2)
    with tempfile.TemporaryDirectory() as folder:
        shard = Shard(mesh)
        all_three = shard >> Quantize(8) >> Offload(path=folder)
        rows = measured(
            {
                "whole": Keep(),
                "sharded": shard,
                "all three": all_three,
            },
            6,
            shape,
        )
    plain, whole, sharded, all_three = rows

    assert plain.losses == whole.losses == sharded.losses
    assert sharded.memory_bytes * mesh.size() == whole.memory_bytes
    assert all_three.memory_bytes == 0
    assert all_three.file_bytes * 3.8 <= sharded.memory_bytes
    assert all_three.losses[-1] < all_three.losses[0]
    assert all_three.losses == pytest.approx(plain.losses, rel=0.01)
    every: list[Any] = [None] * mesh.size()
    dist.all_gather_object(every, all_three.losses)
    assert all(losses == every[0] for losses in every)
