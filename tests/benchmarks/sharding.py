"""What sharding costs and saves: the demo's GPT on two ranks that hold the same activations.

Two processes over gloo on one machine train the same model, as ranks of tensor parallelism
hold the same values between the layers. The bytes are those of one rank.
"""

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from remat import storage
from tests.benchmarks.storage import STEPS, measured, table

RANKS = 2


def main(threads: int) -> None:
    """Starts the ranks, of which the first prints the table."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*launch, f"--nproc-per-node={RANKS}", "-m", "tests.benchmarks.sharding"],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        check=True,
    )


def storages(mesh: object, folder: str) -> dict[str, storage.AbstractStorage]:
    """By the name of the row."""
    shard = storage.Shard(mesh, replicated="trust")  # type: ignore[arg-type]
    file = storage.Offload(path=folder)
    return {
        "`Keep()`": storage.Keep(),
        "`Shard(mesh)`": shard,
        "`Quantize(8) >> Shard(mesh)`": storage.Quantize(8) >> shard,
        "`Shard(mesh) >> Offload(path=...)`": shard >> file,
        "`Shard(mesh) >> Quantize(8) >> Offload(path=...)`": shard
        >> storage.Quantize(8)
        >> file,
    }


def rank() -> None:
    """One rank."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))["tp"]
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(storages(mesh, folder), STEPS)
    if mesh.get_local_rank() == 0:
        threads = torch.get_num_threads()
        print(
            f"torch {torch.__version__}, {RANKS} ranks, {threads} thread(s) each, {STEPS} steps\n"
        )
        print(table(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    rank()
