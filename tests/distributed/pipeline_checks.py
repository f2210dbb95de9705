"""Schedules of `torch.distributed.pipelining` over stages with regions."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from remat import modules, policies
from tests.distributed.models import Block, a_model, assert_equal, batches, gradients

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
