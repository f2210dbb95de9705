"""Schedules of `torch.distributed.pipelining` over stages with regions."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from remat import modules, policies
from tests.distributed.models import (
    ACTIVATION_BYTES,
    Block,
    a_model,
    assert_equal,
    batches,
    gradients,
)

MICRO_BATCHES = 4


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def stages(mesh: Any, per_rank: int, **options: Any) -> list[PipelineStage]:
    """This rank's stages of two blocks each."""
    size, rank = mesh.size(), mesh.get_local_rank()
    count = size * per_rank
    blocks = [*a_model(2 * count).blocks]
    found: list[PipelineStage] = []
    for index in range(rank, count, size):
        part = nn.Sequential(*blocks[2 * index : 2 * index + 2])
        if options:
            modules.apply(part, Block, **options)
        found.append(PipelineStage(part, index, count, torch.device("cpu")))
    return found


def step(mesh: Any, kind: Any, **options: Any) -> dict[str, Tensor]:
    is_interleaved = kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
    made = stages(mesh, 2 if is_interleaved else 1, **options)
    schedule = kind(made if is_interleaved else made[0], MICRO_BATCHES, loss_fn=loss)
    x, target = torch.cat(batches(0, 4)), torch.cat(batches(1, 4))
    rank, last = mesh.get_local_rank(), mesh.size() - 1
    found: dict[str, Tensor] = {}
    for turn in range(2):
        losses: list[Tensor] = []
        arguments = (x,) if rank == 0 else ()
        wanted = {"target": target, "losses": losses} if rank == last else {}
        schedule.step(*arguments, **wanted)
        found |= {f"loss {turn} {i}": each.detach() for i, each in enumerate(losses)}
    for index, stage in enumerate(made):
        found |= {f"{index} {n}": g for n, g in gradients(stage.submod).items()}
    return found


def check_gpipe(mesh: Any) -> None:
    compare(mesh, ScheduleGPipe)


def check_one_forward_one_backward(mesh: Any) -> None:
    compare(mesh, Schedule1F1B)


def check_interleaved(mesh: Any) -> None:
    compare(mesh, ScheduleInterleaved1F1B)


def check_zero_bubble(mesh: Any) -> None:
    compare(mesh, ScheduleInterleavedZeroBubble)


def compare(mesh: Any, kind: Any) -> None:
    plain = step(mesh, kind)
    for options in ({"policy": policies.save_attention_outputs}, {"engine": "rerun"}):
        assert_equal(step(mesh, kind, **options), plain)


class _Held:
    """A tensor that autograd has saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Saved(saved_tensors_hooks):
    """Counts what autograd holds, parameters apart; the numbers of a view are its own."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {key_of(each)[0] for each in model.parameters()}
        self._held: weakref.WeakSet[_Held] = weakref.WeakSet()
        self.peak = 0
        super().__init__(self._pack, lambda held: held.tensor)

    def _pack(self, tensor: Tensor) -> _Held:
        held = _Held(tensor.detach())
        self._held.add(held)
        self.peak = max(self.peak, self.now)
        return held

    @property
    def now(self) -> int:
        found = {key_of(each.tensor): each.tensor.nbytes for each in self._held}
        return sum(size for key, size in found.items() if key[0] not in self._own)


def key_of(tensor: Tensor) -> tuple[int, Any, Any]:
    """The same for two tensors that hold the same numbers in memory."""
    place = tensor.untyped_storage()._cdata
    return place, tensor.storage_offset(), tensor.numel()


def check_bytes_of_micro_batches_in_flight(mesh: Any) -> None:
    size, rank = mesh.size(), mesh.get_local_rank()
    last = rank == size - 1
    x, target = torch.cat(batches(0, 4)), torch.cat(batches(1, 4))
    for options in ({}, {"policy": policies.nothing_saveable}):
        (stage,) = stages(mesh, 1, **options)
        alone = batches(0)[0].requires_grad_(rank > 0)
        saved = Saved(stage.submod)
        with saved:
            y = stage.submod(alone)
            if last:
                y = loss(y, torch.zeros_like(y))
            each = saved.now
            y.sum().backward()
        if options:
            # Two blocks hold their inputs, and the loss what it squares.
            assert each == (2 + last) * ACTIVATION_BYTES
        for kind, in_flight in (
            (ScheduleGPipe, MICRO_BATCHES),
            (Schedule1F1B, min(MICRO_BATCHES, size - rank)),
        ):
            (stage,) = stages(mesh, 1, **options)
            schedule = kind(stage, MICRO_BATCHES, loss_fn=loss)
            given: dict[str, Any] = {"target": target} if last else {}
            saved = Saved(stage.submod)
            with saved:
                schedule.step(*((x,) if rank == 0 else ()), **given)
            assert saved.peak == in_flight * each, (kind, saved.peak, in_flight, each)
