"""What must hold of `Shard` on each rank of a world; `test_shard.py` runs it."""

import gc
import math
import tempfile
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard as Placed,
    distribute_tensor,
)

from remat import NotReplicatedError, checkpoint_name, policies, remat, report
from remat._regions import prefetch
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

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
    torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (3,), (8,), (2, 0, 3), (1, 5, 3), (4, 7, 2), (2, 3, 2, 3)]
BATCH, SEQ = 2, 7


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    """What all ranks hold."""
    return torch.randn(BATCH, SEQ, WIDTH, dtype=dtype)


def curve(x: Tensor) -> Tensor:
    """Needs its input in the backward, and the sine of it."""
    return torch.sin(checkpoint_name(torch.sin(x) * 2, "mid")).cos()


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
    value = torch.randn(5, 7, 3)
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


def check_one_gather_for_each_dtype(mesh: Any) -> None:
    def mix(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return torch.sin(torch.sin(a) * b) * torch.sin(c.to(a.dtype)) * d

    region = remat(mix, saved_inputs=Shard(mesh))
    a, b = (torch.randn(5, requires_grad=True) for _ in range(2))
    c, d = torch.randn(5, dtype=torch.float64), torch.arange(5)
    expected = torch.autograd.grad(mix(a, b, c, d).sum(), (a, b))
    with gathers() as log:
        out = region(a, b, c, d)
        assert log.sizes == []
        out.sum().backward()
    length = math.ceil(5 / mesh.size())
    assert sorted(log.sizes) == [2 * 4 * length, 8 * length, 8 * length]
    assert_same([gradient(a), gradient(b)], expected)


def check_no_collective_without_gradients(mesh: Any) -> None:
    region = remat(curve, saved_inputs=Shard(mesh))
    with gathers() as log, torch.no_grad():
        region(torch.randn(5, requires_grad=True))
    with gathers() as other:
        region(torch.randn(5))
    assert (log.sizes, log.num_checks) == ([], 0)
    assert (other.sizes, other.num_checks) == ([], 0)


def check_checks_come_in_the_first_calls_only(mesh: Any) -> None:
    function = lambda x: torch.sin(x).sin()  # noqa: E731
    for shard, expected in ((Shard(mesh), 8), (Shard(mesh, replicated="trust"), 0)):
        region = remat(function, saved_inputs=shard)
        with gathers() as log:
            for size in (3, 4, 3, 4, 5, 3, 3, 3, 3, 3, 6):
                region(torch.randn(size, requires_grad=True))
        assert log.num_checks == expected


def check_ranks_that_differ_raise_everywhere(mesh: Any) -> None:
    rank, last = mesh.get_local_rank(), mesh.size() - 1
    odd = {
        "numbers": torch.ones(6) + 1e-7 * (rank == last),
        "shape": torch.ones(6 + (rank == last)),
        "dimensions": torch.ones(6).view((6,) if rank else (2, 3)),
        "dtype": torch.ones(6, dtype=torch.float64 if rank == last else torch.float32),
        "zero": torch.zeros(6) * (-1 if rank == last else 1),
    }
    for what, value in odd.items():
        # One function for each: its first calls are what is checked.
        function = eval("lambda x: x.sin().sin()", {"what": what})
        region = remat(function, saved_inputs=Shard(mesh))
        with pytest.raises(
            NotReplicatedError, match=f"rank {last} of|rank 1 of"
        ) as caught:
            region(value.requires_grad_())
        assert "float32" in str(caught.value)
        for start in ("Each rank would", "Make the ranks' inputs equal"):
            assert start in str(caught.value)
    trusting = Shard(mesh, replicated="trust")
    x = (torch.ones(6) + rank).requires_grad_()
    remat(curve, saved_inputs=trusting)(x).sum().backward()


def check_a_call_whose_ranks_differ_is_not_counted(mesh: Any) -> None:
    x = (torch.ones(6) + mesh.get_local_rank()).requires_grad_()
    named = policies.save_only_these_names("mid").stored(Shard(mesh))
    inputs = remat(lambda x: curve(x), saved_inputs=Shard(mesh))
    values = remat(lambda x: curve(x), policy=named)
    for region in (inputs, values):
        for _ in range(10):
            with pytest.raises(NotReplicatedError, match="holds other numbers"):
                region(x)


def check_a_rank_that_traces_anew_meets_the_others(mesh: Any) -> None:
    region = remat(lambda x: x.sin().cos().sin(), saved_inputs=Shard(mesh))
    for _ in range(3):
        region(torch.ones(6, requires_grad=True)).sum().backward()
    size = 7 if mesh.get_local_rank() == 1 else 6

    with pytest.raises(NotReplicatedError, match=r"float32\[7\] on rank 1 of the mesh"):
        region(torch.ones(size, requires_grad=True))


def check_a_saved_value_that_differs_raises_everywhere(mesh: Any) -> None:
    policy = policies.save_only_these_names("mid").stored(Shard(mesh))
    x = (torch.ones(6) + mesh.get_local_rank()).requires_grad_()
    region = remat(lambda x: curve(x), policy=policy)
    with pytest.raises(NotReplicatedError, match="holds other numbers"):
        region(x)


def check_an_error_in_the_forward_leaves_nothing(mesh: Any) -> None:
    params, x = parameters(mesh), tokens()
    plain = step(remat(block), params, x)
    layer = remat(block, saved_inputs={"x": Shard(mesh)})
    held: list[Any] = []

    def fails(params: dict[str, Tensor], y: Tensor) -> Tensor:
        held.append(layer(params, y))
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            step(fails, params, x)
        if mesh.get_local_rank():
            held.clear()  # one rank may forget what another still holds
        assert_same(step(layer, params, x), plain)


def check_an_error_in_the_backward_leaves_nothing(mesh: Any) -> None:
    params, x = parameters(mesh), tokens()
    plain = step(remat(block), params, x)
    layer = remat(block, saved_inputs={"x": Shard(mesh)})

    def hooked(params: dict[str, Tensor], y: Tensor) -> Tensor:
        out = layer(params, y)
        out.register_hook(lambda grad: 1 / 0)
        return out

    layers = iter([layer, hooked, layer])
    with pytest.raises(ZeroDivisionError):
        step(lambda params, y: next(layers)(params, y), params, x)
    layer(*leaves(params, x))
    assert not prefetch._thread.flights

    assert_same(step(layer, params, x), plain)
    assert not prefetch._thread.flights


def check_a_backward_of_a_part_leaves_nothing(mesh: Any) -> None:
    x = torch.randn(6, requires_grad=True)
    layer = remat(curve, saved_inputs=Shard(mesh))
    y = layer(x)
    z = layer(y)

    torch.autograd.grad(z.sum(), y, retain_graph=True)

    assert not prefetch._thread.flights
    (ours,) = torch.autograd.grad(z.sum(), x)
    assert_same([ours], torch.autograd.grad(curve(curve(x)).sum(), x))


def check_the_gather_is_ahead(mesh: Any) -> None:
    layers = [remat(curve, saved_inputs=Shard(mesh)) for _ in range(8)]
    x = torch.randn(64, requires_grad=True)

    def backward(delay_s: float) -> tuple[float, Any]:
        y = x
        for layer in layers:
            y = y + layer(y)
        with gathers(delay_s) as log:
            start = time.monotonic()
            y.sum().backward()
            return time.monotonic() - start, log

    def fastest(delay_s: float) -> float:
        # Of three: others use the machine too.
        times: list[float] = []
        for _ in range(3):
            dist.barrier()
            elapsed, log = backward(delay_s)
            assert (len(log.sizes), log.most_pending, log.pending) == (8, 2, 0)
            times.append(elapsed)
        return min(times)

    undelayed, delayed = fastest(0.0), fastest(0.05)
    assert delayed < 0.7 * (undelayed + 8 * 0.05), (delayed, undelayed)


def check_every_rank_gathers_in_the_same_order(mesh: Any) -> None:
    layer = remat(curve, saved_inputs=Shard(mesh))
    x = torch.randn(24, requires_grad=True)
    # Two branches of unlike sizes, and a region that nothing follows.
    left = layer(layer(x[:6]))
    right = layer(layer(x[4:21]))
    with gathers() as log:
        (layer(left.sum() + right) * right).sum().backward()
    every: list[Any] = [None] * mesh.size()
    dist.all_gather_object(every, log.sizes)
    assert all(sizes == every[0] for sizes in every)
    assert len(log.sizes) == 5


def check_distributed_tensors(mesh: Any) -> None:
    whole = torch.randn(4, 5)
    region = remat(curve, saved_inputs=Shard(mesh))
    for placement, num_elements in (
        (Replicate(), math.ceil(20 / mesh.size())),
        (Placed(0), None),
    ):
        x = DTensor.from_local(whole, mesh, [placement]).requires_grad_()
        y = region(x)
        found = [part.numel() for part in parts_in(y)]
        assert found == ([] if num_elements is None else [num_elements])
        y.sum().backward()
        plain = x.detach().requires_grad_()
        curve(plain).sum().backward()
        grad: Any = gradient(x)
        assert isinstance(grad, DTensor)
        assert grad.placements == (placement,)
        assert_same([grad.to_local()], [gradient(plain).to_local()])  # type: ignore[attr-defined]
    partial = DTensor.from_local(whole, mesh, [Partial()]).requires_grad_()
    with pytest.raises(
        NotReplicatedError, match="is partial: each rank holds one term"
    ):
        region(partial)


def check_other_storages_take_this_ranks_part_of_a_distributed_tensor(
    mesh: Any,
) -> None:
    length = 2 * mesh.size() - 1  # parts of unlike sizes, none of them empty
    for cut in (Replicate(), Placed(0), Placed(1)):
        whole = distribute_tensor(torch.randn(length, length).relu(), mesh, [cut])
        count = whole.to_local().numel()
        kept = math.ceil(count / mesh.size()) if cut.is_replicate() else count
        for chain, num_elements in (
            (Quantize(8), count),
            (Quantize(8) >> Shard(mesh), kept),
            (Shard(mesh, "a (tp b)") >> Quantize(8), None),
            (Sparse(0), None),
            (Cast(torch.bfloat16) >> Shard(mesh), kept),
        ):
            x = whole.detach().requires_grad_()
            for given in (x, x.t()):  # what lies in memory waits
                y = remat(lambda x: x.sin(), saved_inputs=chain)(given)
                if num_elements is not None:
                    assert parts_in(y)[0].numel() == num_elements
                grads: list[Any] = [
                    *torch.autograd.grad(y.sum(), x, retain_graph=True),
                    *torch.autograd.grad(y.sum(), x),
                    *torch.autograd.grad(given.sin().sum(), x),
                ]
                grad, again, plain = grads
                assert grad.placements == plain.placements
                ours, theirs = grad.to_local(), plain.to_local()
                bound = 0.0 if chain.is_exact else 0.05
                torch.testing.assert_close(ours, theirs, atol=bound, rtol=0.0)
                assert_same([ours], [again.to_local()])


def check_a_distributed_tensors_mesh_is_known_by_its_ranks(mesh: Any) -> None:
    """Not by the name of a dimension: a mesh may have none, or another."""
    size = mesh.size()
    nameless = init_device_mesh("cpu", (size,))
    grid = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "row"))
    own = torch.ones(2, 3) * mesh.get_local_rank()
    region = remat(lambda x: x.sin().sin(), saved_inputs=Shard(mesh, None, "trust"))
    for given, cut in (
        (DTensor.from_local(own, nameless, [Placed(0)]), False),
        (DTensor.from_local(own, grid, [Replicate(), Placed(1)]), False),
        (DTensor.from_local(own * 0, nameless, [Replicate()]), True),
        (DTensor.from_local(own * 0, grid, [Placed(0), Replicate()]), True),
    ):
        x = given.requires_grad_()
        y = region(x)
        assert [each.numel() for each in parts_in(y)] == [math.ceil(6 / size)] * cut
        grad: Any = torch.autograd.grad(y.sum(), x)[0]
        plain: Any = torch.autograd.grad(x.sin().sin().sum(), x)[0]
        assert_same([grad.to_local()], [plain.to_local()])
    partial = DTensor.from_local(own, nameless, [Partial()]).requires_grad_()
    with pytest.raises(NotReplicatedError, match="is partial"):
        region(partial)


def check_a_part_that_a_policy_saves_inside_raises(mesh: Any) -> None:
    """With "trust", with numbers that were equal at first, and after the checked calls."""
    own = torch.randn(2, 3)
    policy = policies.save_only_these_names("mid").stored(Shard(mesh, None, "trust"))
    region = remat(curve, policy=policy)
    for _ in range(9):
        x = DTensor.from_local(own, mesh, [Replicate()]).requires_grad_()
        grad, plain = (
            torch.autograd.grad(each(x).sum(), x)[0] for each in (region, curve)
        )
        assert_same([grad.to_local()], [plain.to_local()])  # type: ignore[attr-defined]

    own = own * 0
    for number in range(10):
        cut = DTensor.from_local(
            own + number // 9 * mesh.get_local_rank(), mesh, [Placed(0)]
        )
        if number < 9:
            region(cut.requires_grad_()).sum().backward()
            continue
        with pytest.raises(NotReplicatedError, match="holds other numbers on rank 1"):
            region(cut.requires_grad_())


def check_a_report_foretells_the_parts(mesh: Any) -> None:
    """Of inputs and of saved values, by every way of cutting."""
    x = tokens()
    for shard in (
        Shard(mesh),
        Shard(mesh, "batch (tp seq) d"),
        Cast(torch.bfloat16) >> Shard(mesh),
    ):
        policy = policies.save_only_these_names("mid").stored(shard)
        region = remat(curve, policy=policy, saved_inputs=shard)

        (row,) = report(lambda x, region=region: region(x * 2).sum(), x).regions

        assert row.held_bytes == row.predicted_held_bytes
        assert row.held_bytes < 2 * x.nbytes
        assert row.elsewhere_bytes == row.predicted_elsewhere_bytes == 0


def check_a_rank_outside_of_the_mesh_is_told_so(mesh: Any) -> None:
    first = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    if mesh.get_local_rank() == 0:
        return
    with pytest.raises(ValueError, match=r"This rank is not in the mesh"):
        Shard(first).store(torch.ones(3))
