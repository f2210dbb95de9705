"""What ranks that shard must agree on, on each rank of a world; `test_shard.py` runs it."""

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard as Placed,
    distribute_tensor,
)

from remat import NotReplicatedError, policies, remat, report
from remat._regions import prefetch
from remat.storage import Cast, Quantize, Shard, Sparse
from tests.storage.parallel import (
    assert_same,
    block,
    gathers,
    gradient,
    leaves,
    parameters,
    parts_in,
    step,
)
from tests.storage.tokens import curve, tokens


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
