"""What peers get wrong about sharding, through the drop-ins; `test_shard.py` runs it."""

import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard as Placed

from remat import NotReplicatedError, remat
from remat._regions import prefetch
from remat.interop import deepspeed, megatron, transformer_engine
from remat.interop.deepspeed import _Current
from tests.storage.parallel import (
    assert_same,
    block,
    gathers,
    gradient,
    parameters,
    parts_in,
    step,
)
from tests.storage.tokens import curve, tokens

Checkpoint = Callable[..., Any]


@contextmanager
def partitioning(**options: Any) -> Iterator[None]:
    """DeepSpeed's configuration, put back at the end."""
    before = _Current.value
    group = dist.group.WORLD
    mpu = types.SimpleNamespace(get_model_parallel_group=lambda: group)
    deepspeed.configure(mpu, partition_activations=True, **options)
    try:
        yield
    finally:
        _Current.value = before


def _transformer_engine(use_reentrant: bool) -> Checkpoint:
    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        return transformer_engine.checkpoint(
            function,
            *args,
            distribute_saved_activations=True,
            tp_group=dist.group.WORLD,
            use_reentrant=use_reentrant,
            **kwargs,
        )

    return checkpoint


def _megatron(function: Any, *args: Any) -> Any:
    return megatron.checkpoint(function, True, *args)


TE = _transformer_engine(True)
EACH: list[Checkpoint] = [
    TE,
    _transformer_engine(False),
    _megatron,
    deepspeed.checkpoint,
]
SIZES = [1, 2, 7, 16]  # below t, below t * t, uneven, even


def each(check: Callable[[Checkpoint, Any], None]) -> Callable[[Any], None]:
    """A check of every drop-in."""

    def run(mesh: Any) -> None:
        for checkpoint in EACH:
            torch.manual_seed(0)
            with partitioning():
                check(checkpoint, mesh)

    return run


def compare(checkpoint: Checkpoint, x: Tensor, size: int) -> None:
    """What waits, that `x + checkpoint(x)` is right, and that x stays itself."""
    leaf, twin = (x.clone().requires_grad_() for _ in range(2))
    y = checkpoint(curve, leaf)
    assert [part.numel() for part in parts_in(y)] == [math.ceil(x.numel() / size)]
    (leaf + y).square().sum().backward()
    (twin + curve(twin)).square().sum().backward()
    assert_same([y, leaf, gradient(leaf)], [curve(twin), twin, gradient(twin)])


@each
def check_peers_shard_any_size(checkpoint: Checkpoint, mesh: Any) -> None:
    for size in SIZES:
        compare(checkpoint, torch.randn(size), mesh.size())
    compare(checkpoint, torch.randn(3, 1, 5, dtype=torch.float64), mesh.size())


@each
def check_peers_blocks_are_those_without_sharding(
    checkpoint: Checkpoint, mesh: Any
) -> None:
    params, x = parameters(mesh), tokens()

    def layer(params: dict[str, Tensor], y: Tensor) -> Tensor:
        return checkpoint(lambda y: block(params, y), y)

    assert_same(step(layer, params, x), step(remat(block), params, x))


@each
def check_peers_leave_the_callers_tensor(checkpoint: Checkpoint, mesh: Any) -> None:
    x = torch.randn(3, 5)
    before, memory = x.clone(), x.untyped_storage().data_ptr()
    with torch.no_grad():
        y = checkpoint(curve, x)
    leaf = x.requires_grad_()
    z = checkpoint(curve, leaf)

    assert_same([x, y, z], [before, curve(before), curve(before)])
    assert x.untyped_storage().data_ptr() == memory
    assert x.untyped_storage().nbytes() == x.nbytes


@each
def check_peers_keep_numbers_in_their_dtype(checkpoint: Checkpoint, mesh: Any) -> None:
    x = torch.randn(9, dtype=torch.float32, requires_grad=True)
    (part,) = parts_in(checkpoint(curve, x))

    assert part.dtype is torch.float32


@each
def check_peers_leave_masks_and_parameters(checkpoint: Checkpoint, mesh: Any) -> None:
    mask, scale = torch.tensor([1, 0, 1]), nn.Parameter(torch.randn(3))
    # Not replicated, and reached in two ways: neither is an activation.
    own = torch.full((3,), float(mesh.get_local_rank()))
    order = torch.arange(3).roll(mesh.get_local_rank())

    def masked(mask: Tensor, x: Tensor, scale: Tensor, order: Tensor) -> Tensor:
        return (torch.sin(x) * mask * scale * own)[order].sin()

    x = torch.randn(3, requires_grad=True)
    y = checkpoint(masked, mask, x, scale, order)

    assert [part.numel() for part in parts_in(y)] == [math.ceil(3 / mesh.size())]
    assert mask.tolist() == [1, 0, 1]
    expected = torch.autograd.grad(masked(mask, x, scale, order).sum(), (x, scale))
    y.sum().backward()
    assert_same([gradient(x), gradient(scale)], expected)


@each
def check_peers_shard_what_containers_hold(checkpoint: Checkpoint, mesh: Any) -> None:
    x, y = (torch.randn(5, requires_grad=True) for _ in range(2))

    def held(first: list[Tensor], rest: dict[str, Tensor]) -> Tensor:
        return torch.sin(first[0]) * torch.sin(rest["y"])

    out = checkpoint(held, [x], {"y": y})

    assert [part.numel() for part in parts_in(out)] == [math.ceil(5 / mesh.size())] * 2
    out.sum().backward()
    expected = torch.autograd.grad(held([x], {"y": y}).sum(), (x, y))
    assert_same([gradient(x), gradient(y)], expected)


@each
def check_peers_ranks_that_differ_raise(checkpoint: Checkpoint, mesh: Any) -> None:
    # One function for each drop-in: its first calls are what is checked.
    function = eval("lambda x: x.sin().sin()", {"which": checkpoint})
    x = (torch.ones(6) + mesh.get_local_rank()).requires_grad_()

    with pytest.raises(NotReplicatedError, match="rank 1 of the mesh than on rank 0"):
        checkpoint(function, x)


@each
def check_peers_distributed_tensors(checkpoint: Checkpoint, mesh: Any) -> None:
    whole = torch.randn(4, 5)
    for placement in (Replicate(), Placed(0)):
        x = DTensor.from_local(whole, mesh, [placement]).requires_grad_()
        checkpoint(curve, x).sum().backward()
        plain = x.detach().requires_grad_()
        curve(plain).sum().backward()
        ours, theirs = gradient(x), gradient(plain)
        assert_same([ours.to_local()], [theirs.to_local()])  # type: ignore[attr-defined]


@each
def check_peers_second_backward(checkpoint: Checkpoint, mesh: Any) -> None:
    x = torch.randn(7, requires_grad=True)
    y = checkpoint(curve, checkpoint(curve, x))

    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)

    plain = torch.autograd.grad(curve(curve(x)).sum(), x)
    assert_same([first, second], [*plain, *plain])


@each
def check_peers_gather_ahead(checkpoint: Checkpoint, mesh: Any) -> None:
    x = torch.randn(6, requires_grad=True)
    y = x
    for _ in range(4):
        y = checkpoint(curve, y)

    with gathers() as log:
        y.sum().backward()

    assert len(log.sizes) == 4
    assert log.most_pending == 2
    assert not prefetch._thread.flights


@each
def check_peers_errors_leave_nothing(checkpoint: Checkpoint, mesh: Any) -> None:
    x = torch.randn(7, requires_grad=True)
    held = checkpoint(curve, checkpoint(curve, x))
    held.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        held.sum().backward()

    (ours,) = torch.autograd.grad(checkpoint(curve, checkpoint(curve, x)).sum(), x)

    assert_same([ours], torch.autograd.grad(curve(curve(x)).sum(), x))
    assert not prefetch._thread.flights


def check_transformer_engines_keywords(mesh: Any) -> None:
    for use_reentrant in (True, False):
        checkpoint = _transformer_engine(use_reentrant)
        x, scale = (torch.randn(5, requires_grad=True) for _ in range(2))
        still = x.detach()

        def keyed(x: Tensor, *, scale: Tensor) -> Tensor:
            return torch.sin(x) * torch.sin(scale)

        out = checkpoint(keyed, x, scale=scale)
        only = checkpoint(keyed, still, scale=scale)

        length = math.ceil(5 / mesh.size())
        assert [part.numel() for part in parts_in(out)] == [length, length]
        assert only.requires_grad
        found = torch.autograd.grad(out.sum() + only.sum(), (x, scale))
        expected = keyed(x, scale=scale).sum() + keyed(still, scale=scale).sum()
        assert_same(found, torch.autograd.grad(expected, (x, scale)))


def check_parameters_of_modules_stay_whole(mesh: Any) -> None:
    layer = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh())
    x = torch.randn(3, 5, requires_grad=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(mesh.get_local_rank())  # slices of a tensor-parallel layer

    y = TE(layer, x)

    assert [part.numel() for part in parts_in(y)] == [math.ceil(15 / mesh.size())]
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def check_groups_of_some_ranks(mesh: Any) -> None:
    """Two ranks a group: the activations of one group are not those of the other."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, mesh.size(), 2)]
    number = mesh.get_local_rank() // 2
    x = (torch.arange(5.0) + number).requires_grad_()

    y = transformer_engine.checkpoint(
        curve, x, distribute_saved_activations=True, tp_group=groups[number]
    )

    assert [part.numel() for part in parts_in(y)] == [3]
    y.sum().backward()
    plain = x.detach().requires_grad_()
    curve(plain).sum().backward()
    assert_same([gradient(x)], [gradient(plain)])


def check_what_is_no_group_of_this_rank_is_refused(mesh: Any) -> None:
    alone = dist.new_group([0])
    others = [mesh, "tp", *([] if mesh.get_local_rank() == 0 else [alone])]
    for group in others:
        with pytest.raises(TypeError, match=r"as the group\..*this rank belongs to"):
            transformer_engine.checkpoint(
                curve,
                torch.ones(4, requires_grad=True),
                distribute_saved_activations=True,
                tp_group=group,
            )


def check_partitioned_activations_wait_on_the_host(mesh: Any) -> None:
    x = torch.randn(7, requires_grad=True)
    message = 'Offload.*has no effect on a value that is on "cpu" already'

    with partitioning(checkpoint_in_cpu=True), pytest.warns(Warning, match=message):
        y = deepspeed.checkpoint(curve, x)

    assert [part.numel() for part in parts_in(y)] == [math.ceil(7 / mesh.size())]


def check_contiguous_checkpointing_casts_nothing(mesh: Any) -> None:
    with (
        pytest.warns(Warning, match=r"contiguous_checkpointing=True\): has no effect"),
        partitioning(contiguous_checkpointing=True),
    ):
        compare(deepspeed.checkpoint, torch.randn(9), mesh.size())


def check_no_partition_without_gradients(mesh: Any) -> None:
    with partitioning(), gathers() as log, torch.no_grad():
        for checkpoint in EACH:
            checkpoint(curve, torch.randn(5, requires_grad=True))

    assert (log.sizes, log.num_checks) == ([], 0)
