"""DistributedDataParallel and `fully_shard` over models with regions."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from remat import TraceError, modules, policies, remat
from tests.distributed.models import (
    ACTIVATION_BYTES,
    WIDTH,
    Block,
    Model,
    a_model,
    assert_equal,
    batches,
    gradients,
    held_bytes,
)
from tests.support import OperatorCounter

POLICIES = (policies.nothing_saveable, policies.save_matmul_outputs)
WRAPPERS: tuple[dict[str, Any], ...] = (
    {"static_graph": True},
    {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    {"bucket_cap_mb": 0.001},
)


def ddp_gradients(
    model: Model, rank: int, *, count: int = 1, sync_all: bool = True, **options: Any
) -> dict[str, Tensor]:
    """The gradients of a step of `count` micro-batches; only the last is synchronized."""
    wrapped = DistributedDataParallel(model, **options)
    *first, last = batches(rank, count)
    for x in first:
        with contextlib.nullcontext() if sync_all else wrapped.no_sync():
            wrapped(x).square().sum().backward()
    wrapped(last).square().sum().backward()
    return gradients(model)


def check_distributed_data_parallel(mesh: Any) -> None:
    rank = mesh.get_local_rank()
    for options in WRAPPERS:
        plain = ddp_gradients(a_model(), rank, **options)
        for policy in POLICIES:
            ours = modules.apply(a_model(), Block, policy=policy)
            assert_equal(ddp_gradients(ours, rank, **options), plain)


def check_micro_batches_without_synchronization(mesh: Any) -> None:
    rank = mesh.get_local_rank()
    plain = ddp_gradients(a_model(), rank, count=3, sync_all=False)
    for engine in ("trace", "rerun"):
        ours = modules.apply(a_model(), Block, engine=engine)
        assert_equal(ddp_gradients(ours, rank, count=3, sync_all=False), plain)


def check_distributed_data_parallel_all_reduces_as_often(mesh: Any) -> None:
    counts: list[int] = []
    for model in (a_model(), modules.apply(a_model(), Block)):
        ddp_gradients(model, mesh.get_local_rank())
        with OperatorCounter() as counter:
            ddp_gradients(model, mesh.get_local_rank(), count=3, sync_all=False)
        counts.append(counter.counts["c10d.allreduce_"])
    assert counts[0] == counts[1] > 0


def regions_first(mesh: Any, **options: Any) -> Any:
    return sharded(mesh, modules.apply(a_model(), Block, **options))


def sharded_first(mesh: Any, **options: Any) -> Any:
    return modules.apply(sharded(mesh), Block, **options)


def sharded(mesh: Any, model: Model | None = None) -> Any:
    """The blocks sharded, and the root."""
    model = a_model() if model is None else model
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp_step(model: Model, rank: int) -> dict[str, Tensor]:
    model.zero_grad()
    (x,) = batches(rank)
    model(x).square().sum().backward()
    return gradients(model)


def check_fully_shard(mesh: Any) -> None:
    rank = mesh.get_local_rank()
    plain = fsdp_step(sharded(mesh), rank)
    for options in ({}, {"policy": POLICIES[1]}, {"engine": "rerun"}):
        for make in (regions_first, sharded_first):
            model = make(mesh, **options)
            # In its first step an engine finds out what there is.
            for _ in range(2):
                assert_equal(fsdp_step(model, rank), plain)


def check_blocks_that_refer_to_the_model(mesh: Any) -> None:
    """A region waits for the gradients of what its outputs rest on, not of all it sees."""
    rank = mesh.get_local_rank()

    def steps(model: Any) -> list[dict[str, Tensor]]:
        for block in model.blocks:
            # No submodule, as a back reference must not be one.
            block.__dict__["model"] = [model]
        found: list[dict[str, Tensor]] = []
        for _ in range(2):
            # What is gathered ahead is seen as plain parameters by earlier blocks.
            for block in model.blocks:
                block.unshard()
            found.append(fsdp_step(model, rank))
        return found

    plain = steps(sharded(mesh))
    for make in (regions_first, sharded_first):
        for found, each in zip(steps(make(mesh, engine="rerun")), plain, strict=True):
            assert_equal(found, each)


class Spare(Block):
    """A block with a parameter that nothing reads, and one whose output is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Parameter(torch.ones(WIDTH))
        self.dropped = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.with_dropped(x)[0]

    def with_dropped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x * self.dropped


def check_parameters_without_a_gradient(mesh: Any) -> None:
    (x,) = batches(mesh.get_local_rank())
    torch.manual_seed(0)
    first = Spare().state_dict()
    found: list[dict[str, Tensor | None]] = []
    for engine in (None, "trace", "rerun"):
        model = Spare()
        model.load_state_dict(first)
        if engine is not None:
            model.with_dropped = remat(model.with_dropped, engine=engine)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        for _ in range(2):
            wrapped(x).square().sum().backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
    plain, *ours = found
    assert plain["unread"] is None
    assert plain["dropped"] is None
    for each in ours:
        assert [n for n, g in each.items() if g is None] == ["unread", "dropped"], each
        assert_equal(
            *({k: g for k, g in e.items() if g is not None} for e in (each, plain))
        )


def check_fully_shard_gathers_as_often(mesh: Any) -> None:
    rank = mesh.get_local_rank()

    def counted(model: Model) -> Counter[str]:
        fsdp_step(model, rank)
        with OperatorCounter() as counter:
            fsdp_step(model, rank)
        return Counter(
            {k: n for k, n in counter.counts.items() if k.startswith("c10d")}
        )

    plain = counted(sharded(mesh))
    # A forward and a backward gather each block, and the root once.
    assert plain["c10d._allgather_base_"] == 2 * 3 + 1, plain
    assert counted(regions_first(mesh)) == plain
    assert counted(sharded_first(mesh)) == plain


def check_nothing_but_inputs_and_parts_waits(mesh: Any) -> None:
    (x,) = batches(mesh.get_local_rank())
    model = modules.apply(a_model(), Block)
    wrapped: nn.Module = DistributedDataParallel(model)
    assert held_bytes(wrapped(x), model) == 3 * ACTIVATION_BYTES
    for make in (regions_first, sharded_first):
        model = make(mesh)
        y = model(x)
        for block in model.blocks:
            assert all(isinstance(each, DTensor) for each in block.parameters())
        # The gathered parameters of a block are what its region holds, without memory.
        assert held_bytes(y, model) == 3 * ACTIVATION_BYTES


def refuses(model: Callable[[Tensor], Tensor], x: Tensor, kind: str) -> None:
    with pytest.raises(
        TraceError, match=f"a {kind}: is called inside .*Put the regions"
    ):
        model(x)


def check_a_region_around_what_an_engine_drives(mesh: Any) -> None:
    rank = mesh.get_local_rank()
    (x,) = batches(rank)
    plain = fsdp_step(sharded(mesh), rank)
    whole = ddp_gradients(a_model(), rank)
    model = modules.apply(sharded(mesh), "")
    for _ in range(2):
        refuses(model, x, "FSDPBlock")
    assert_equal(fsdp_step(modules.remove(model), rank), plain)
    # Parameters that are gathered already are plain ones, which a trace could take.
    model.unshard()
    for block in model.blocks:
        block.unshard()
    refuses(modules.apply(model, ""), x, "FSDPBlock")
    for engine in ("trace", "rerun"):
        model = a_model()
        wrapped = DistributedDataParallel(model)
        refuses(remat(wrapped, engine=engine), x, "DistributedDataParallel")
        wrapped(x).square().sum().backward()
        assert_equal(gradients(model), whole)


def check_a_region_in_the_place_of_an_engines_forward(mesh: Any) -> None:
    """Its second trace was wrong without a word where the graph was said to be static."""
    (x,) = batches(mesh.get_local_rank())
    makes: tuple[Callable[[nn.Module], nn.Module], ...] = (
        lambda model: DistributedDataParallel(model, static_graph=True),
        fully_sharded_1,
    )
    for make in makes:
        for engine in ("trace", "rerun"):
            wrapped = make(a_model())
            wrapped(x).sum().backward()
            refuses(
                modules.apply(wrapped, "", engine=engine), x, type(wrapped).__name__
            )
            modules.remove(wrapped)(x).sum().backward()


def fully_sharded_1(model: nn.Module, *, use_orig_params: bool = True) -> nn.Module:
    """The older engine, which stands around each block and the model."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )


def check_fully_sharded_data_parallel(mesh: Any) -> None:
    """With parameters as the model has them, and as one flat one for each block."""
    (x,) = batches(mesh.get_local_rank())

    def losses(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[float] = []
        for _ in range(3):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    for use_orig_params in (True, False):
        shard = functools.partial(fully_sharded_1, use_orig_params=use_orig_params)
        plain = losses(shard(a_model()))
        for options in ({}, {"policy": POLICIES[1]}, {"engine": "rerun"}):
            regions: Any = functools.partial(modules.apply, where=Block, **options)
            assert losses(shard(regions(a_model()))) == plain
            assert losses(regions(shard(a_model()))) == plain


def check_nothing_stays_of_the_refusal(mesh: Any) -> None:
    seen: Any = torch.nn.modules.module._global_forward_pre_hooks
    for engine in ("trace", "rerun"):
        region = remat(nn.Linear(2, 2), engine=engine)
        region(torch.ones(2)).sum().backward()
        assert not seen
