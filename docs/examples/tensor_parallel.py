"""Tensor parallelism: what all ranks hold between layers, each keeps a part of.

To be run by `torchrun --nproc-per-node 2`. torch's `parallelize_module` splits the weights of
each block over the ranks. The activations between blocks are whole on all of them: t ranks
keep them t times [1]. With `storage.Shard` each rank keeps one part of a block's input,
and the backward gathers it, the next block's while this one computes. Collectives inside a
block run again with it.

Prints, on rank 0, without regions, with regions, and with sharded inputs, what waits between
forward and backward on each rank, the peak, and the last loss. Losses are equal to the bit.

[1] V. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022,
    https://arxiv.org/abs/2205.05198
"""

import argparse
import gc

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from remat import modules, storage
from remat.reporting import LiveBytes

LAYERS, WIDTH, TIME, BATCH = 8, 64, 64, 16


class Block(nn.Module):
    """A gated perceptron, (time, batch, width) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """What the next block gets."""
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def make_model(mesh: DeviceMesh) -> nn.Sequential:
    """The blocks, each split over the ranks: the same weights whenever it is called."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    split = {
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model:
        parallelize_module(block, mesh, split)
    return model


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Something to make small."""
    return model(batch).square().mean()


def train(model: nn.Module, batch: Tensor, num_steps: int) -> list[Tensor]:
    """Takes some steps, and returns the loss before each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Tensor] = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        losses.append(loss_of(model, batch))
        losses[-1].backward()
        optimizer.step()
    return losses


def main() -> None:
    """Trains three models that differ in what waits for the backward."""
    parser = argparse.ArgumentParser(description="Inputs of blocks, sharded.")
    parser.add_argument("--steps", type=int, default=5)
    num_steps = parser.parse_args().steps

    dist.init_process_group("gloo")  # "nccl" on GPUs
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    part = storage.Shard(mesh["tp"], "(tp time) batch width")
    models = {
        "no regions": make_model(mesh),
        "regions": modules.apply(make_model(mesh), Block),
        "sharded": modules.apply(make_model(mesh), Block, saved_inputs={"x": part}),
    }
    batch = torch.randn(TIME, BATCH, WIDTH)  # after the seed: the same on all ranks
    found: list[list[Tensor]] = []
    waiting: list[int] = []
    table = ["                waits        peak  last loss"]
    for name, model in models.items():
        found.append(train(model, batch, num_steps))
        with LiveBytes() as live:
            loss = loss_of(model, batch)
            gc.collect()  # what lies in a cycle of references does not wait
            waiting.append(live.current_bytes)
            loss.backward()
        sizes = f"{waiting[-1] / 2**20:6.2f} MiB  {live.peak_bytes / 2**20:6.2f} MiB"
        table.append(f"{name:10}  {sizes}  {found[-1][-1]:.10f}")
    if dist.get_rank() == 0:
        print(*table, sep="\n")

    for losses in found[1:]:
        assert all(map(torch.equal, losses, found[0]))
    whole, inputs, parts = waiting
    assert parts < 0.7 * inputs < 0.2 * whole
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
