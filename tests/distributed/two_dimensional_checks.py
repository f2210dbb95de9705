"""`fully_shard` over one dimension of a mesh, tensor parallelism over the other."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from remat import modules, storage
from remat._regions.waiting import Waiting
from tests.distributed.models import (
    ACTIVATION_BYTES,
    BATCH,
    LENGTH,
    WIDTH,
    Block,
    Model,
    a_model,
    assert_equal,
    batches,
    gradients,
)
from tests.distributed.tensor_parallel_checks import tensor_parallel
from tests.storage.parallel import block as local_block, parameters


class LocalBlock(nn.Module):
    """A block whose parameters are this rank's slices, which sums by itself."""

    def __init__(self, tp: Any) -> None:
        super().__init__()
        slices = parameters(tp)
        self.slices = nn.ParameterDict({k: nn.Parameter(v) for k, v in slices.items()})

    def forward(self, x: Tensor) -> Tensor:
        return local_block(dict(self.slices.items()), F.layer_norm(x, (WIDTH,)))


def both(mesh: Any) -> Any:
    """A mesh of two dimensions of the same ranks."""
    sizes = (mesh.size() // 2, 2)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))


def sharded(model: Any, blocks: Any, mesh: Any) -> Any:
    for block in blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def step(model: nn.Module, mesh: Any) -> dict[str, Tensor]:
    """All ranks of a tensor-parallel group see one batch."""
    model.zero_grad()
    (x,) = batches(mesh["dp"].get_local_rank())
    model(x).square().sum().backward()
    return gradients(model)


def check_fully_shard_over_distributed_tensors(mesh: Any) -> None:
    mesh = both(mesh)

    def made(model: Model) -> Model:
        model = tensor_parallel(mesh["tp"], model, by_sequence=True)
        return sharded(model, model.blocks, mesh)

    plain = step(made(a_model()), mesh)
    for engine in ("trace", "rerun"):
        first = made(modules.apply(a_model(), Block, engine=engine))
        second = modules.apply(made(a_model()), Block, engine=engine)
        for model in (first, second):
            for _ in range(2):
                assert_equal(step(model, mesh), plain)


def check_inputs_wait_in_parts_over_the_other_dimension(mesh: Any) -> None:
    mesh = both(mesh)
    shard = storage.Shard(mesh["tp"], "batch (tp length) width")

    def made(**options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(LocalBlock(mesh["tp"]) for _ in range(3)))
        if options:
            modules.apply(model, LocalBlock, **options)
        return sharded(model, model, mesh)

    plain = step(made(), mesh)
    model = made(saved_inputs={"x": shard})
    for _ in range(2):
        assert_equal(step(model, mesh), plain)
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    parts = waiting(model(x))
    assert [each.nbytes for each in parts] == [ACTIVATION_BYTES // 2] * 3


def waiting(output: Tensor) -> list[Tensor]:
    """The parts that regions hold, the last region's first."""
    found: list[Tensor] = []
    node: Any = output.grad_fn
    while node is not None:
        for each in getattr(node, "saved_tensors", ()):
            if type(each) is Waiting:
                found += each.stored.tensors
        node = node.next_functions[0][0] if node.next_functions else None
    return found
