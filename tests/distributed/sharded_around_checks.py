"""Regions around modules of `fully_shard`, beside no checkpoint and torch's own."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from remat import SecondDerivativeError, TraceError, modules, remat
from tests.distributed.models import (
    ACTIVATION_BYTES,
    Block,
    Model,
    a_model,
    assert_equal,
    batches,
    gradients,
    held_bytes,
)
from tests.support import OperatorCounter

GATHERS, REDUCTIONS = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
HALVES = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Around(Model):
    """Its forward calls its blocks through a function."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x)
        return torch.tanh(self.head(x))


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def region(block: Any, x: Tensor) -> Tensor:
    around: Any = remat(block, engine="rerun")
    return around(x)


def held_by_torch(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def a_sharded(mesh: Any, call: Callable[..., Tensor], **options: Any) -> Any:
    torch.manual_seed(0)
    model = Around(call)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


class Step(NamedTuple):
    """What a step came to, with this rank's part of each gradient."""

    loss: Tensor
    gradients: dict[str, Tensor]
    forward: Counter[str]
    backward: Counter[str]


def step(
    model: Any, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None
) -> Step:
    model.zero_grad()
    with OperatorCounter() as counter:
        loss = (forward or model)(x).square().sum()
    gathered = collectives(counter)
    for block in model.blocks:
        assert all(isinstance(each, DTensor) for each in block.parameters())
    with OperatorCounter() as counter:
        loss.backward()
    for block in model.blocks:
        assert all(isinstance(each, DTensor) for each in block.parameters())
    return Step(loss.detach(), gradients(model), gathered, collectives(counter))


def collectives(counter: OperatorCounter) -> Counter[str]:
    counts = counter.counts.items()
    return Counter({key: n for key, n in counts if key.startswith("c10d")})


def assert_same(ours: Step, theirs: Step) -> None:
    assert torch.equal(ours.loss, theirs.loss)
    assert_equal(ours.gradients, theirs.gradients)
    assert ours[2:] == theirs[2:]


def check_around_a_sharded_block(mesh: Any) -> None:
    """Numbers and collectives are those of no checkpoint, and of both of torch's."""
    (x,) = batches(mesh.get_local_rank())
    for options in ({}, {"mp_policy": HALVES}):
        expected = step(a_sharded(mesh, plain, **options), x)
        assert expected.forward == {GATHERS: 4}
        assert expected.backward == {GATHERS: 3, REDUCTIONS: 4}
        for call in (region, held_by_torch, reentrant):
            model = a_sharded(mesh, call, **options)
            # In its first step the engine finds out what there is.
            for _ in range(2):
                assert_same(step(model, x), expected)


def check_around_all_sharded_blocks(mesh: Any) -> None:
    """Once in the root's hooks, once around them, and with regions inside."""
    (x,) = batches(mesh.get_local_rank())
    expected = step(a_sharded(mesh, plain), x)
    model = a_sharded(mesh, plain)
    for _ in range(2):
        around: Any = remat(model, engine="rerun")
        found = step(model, x, around)
        assert_equal(found.gradients, expected.gradients)
        assert found.forward == expected.forward
        assert found.backward == expected.backward
    for make in (plain, region):
        model = modules.apply(a_sharded(mesh, make), "", engine="rerun")
        for _ in range(2):
            assert_same(step(model, x), expected)
        # Policies and names work inside.
        model = a_sharded(mesh, region)
        assert_same(step(modules.apply(model, Block), x), expected)


def check_around_a_block_holds_its_input(mesh: Any) -> None:
    (x,) = batches(mesh.get_local_rank())
    model = a_sharded(mesh, region)
    assert held_bytes(model(x), model) == 3 * ACTIVATION_BYTES


def check_around_modules_that_gather_ahead(mesh: Any) -> None:
    """Blocks gathered by hand, and blocks that gather their neighbors in advance."""
    (x,) = batches(mesh.get_local_rank())
    found: list[list[Step]] = []
    for call in (plain, region):
        model = a_sharded(mesh, call)
        first, second, third = model.blocks
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_forward_prefetch([third])
        third.set_modules_to_backward_prefetch([second])
        steps: list[Step] = []
        for is_by_hand in (False, True):
            if is_by_hand:
                for block in model.blocks:
                    block.unshard()
            steps.append(step(model, x))
        found.append(steps)
    for ours, theirs in zip(*found, strict=True):
        assert_same(ours, theirs)


def check_around_blocks_in_micro_batches(mesh: Any) -> None:
    micro = batches(mesh.get_local_rank(), 3)
    found: list[tuple[dict[str, Tensor], Counter[str]]] = []
    for call in (plain, region):
        model = a_sharded(mesh, call)
        with OperatorCounter() as counter:
            for index, x in enumerate(micro):
                model.set_requires_gradient_sync(index == len(micro) - 1)
                model(x).square().sum().backward()
        found.append((gradients(model), collectives(counter)))
    assert_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def check_around_frozen_blocks_and_ignored_parameters(mesh: Any) -> None:
    """What is not sharded has its edge; what is frozen has no gradient."""
    (x,) = batches(mesh.get_local_rank())
    found: list[list[Tensor | None]] = []
    for call in (plain, region):
        torch.manual_seed(0)
        model: Any = Around(call)
        first, second, third = model.blocks
        second.requires_grad_(requires_grad=False)
        spared = {first.norm_1.weight}
        for block in (first, second, third):
            fully_shard(block, mesh=mesh, ignored_params=spared)
        y = x.clone().requires_grad_()
        (by_call,) = torch.autograd.grad(model(y).square().sum(), [*spared])
        model(y).square().sum().backward()
        grads = [each.grad for each in model.parameters()]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        found.append([y.grad, by_call, *local])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def check_around_blocks_autograd_grad_leaves_parameters_alone(mesh: Any) -> None:
    """As without a region; with reentrant checkpoint it raises."""
    (x,) = batches(mesh.get_local_rank())
    x.requires_grad_()
    found: list[Tensor] = []
    for call in (plain, region):
        model = a_sharded(mesh, call)
        found += torch.autograd.grad(model(x).square().sum(), [x])
        assert all(each.grad is None for each in model.parameters())
    assert torch.equal(*found)


def check_around_a_block_that_is_called_twice(mesh: Any) -> None:
    """Each region reduces its own gradients, so that sums are equal to rounding."""
    (x,) = batches(mesh.get_local_rank())
    found: list[list[Step]] = []
    for call in (plain, region):
        model = a_sharded(mesh, lambda block, x, call=call: call(block, call(block, x)))
        found.append([step(model, x) for _ in range(2)])
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(ours.loss, theirs.loss)
        torch.testing.assert_close(ours.gradients, theirs.gradients)
        assert ours.backward[GATHERS] == theirs.backward[GATHERS]


def check_around_a_sharded_module_under_a_transform(mesh: Any) -> None:
    (x,) = batches(mesh.get_local_rank())
    block: Any = fully_shard(a_model().blocks[0], mesh=mesh)
    around: Any = remat(block, engine="rerun")
    for transformed in (torch.func.grad, torch.func.vmap):
        with pytest.raises(
            TraceError, match=r"a FSDPBlock: is called inside .*without a transform"
        ):
            transformed(lambda x: around(x).sum())(x)
    x.requires_grad_()
    (first,) = torch.autograd.grad(around(x).square().sum(), [x], create_graph=True)
    with pytest.raises(SecondDerivativeError, match="calls a module of fully_shard"):
        first.sum().backward()
    y = around(x)
    many = torch.ones(2, *y.shape)
    with pytest.raises(TraceError, match="whose backward is not one of"):
        torch.autograd.grad(y, [x], many, is_grads_batched=True)


class Paired(Around):
    """It calls its first two blocks together, or one by one."""

    apart = False

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        pair = [first, second] if self.apart else [nn.Sequential(first, second)]
        x = self.embed(x)
        for each in pair:
            x = self.call(each, x)
        return torch.tanh(self.head(third(x)))


def check_around_a_group_of_modules(mesh: Any) -> None:
    (x,) = batches(mesh.get_local_rank())
    found: list[list[Step]] = []
    model: Any = None
    for call in (plain, region):
        torch.manual_seed(0)
        model = Paired(call)
        first, second, third = model.blocks
        fully_shard([first, second], mesh=mesh)
        fully_shard(third, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found.append([step(model, x) for _ in range(2)])
    for theirs, ours in zip(*found, strict=True):
        assert_same(ours, theirs)

    model.apart = True
    with pytest.raises(TraceError, match="others of its group are not"):
        model(x)
    model.apart = False
    model.reset_iter_state()
    assert_same(step(model, x), found[0][0])
