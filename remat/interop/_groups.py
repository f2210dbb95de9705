"""Makes the storage that shards over a process group, which is what the peers take."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from remat._errors import refusal
from remat._torch import isolation, modes, trees
from remat.storage import Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def shard_over(
    group: ProcessGroup | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Shard:
    """The sharding of a call's saved inputs over a group.

    Args:
        group: whose ranks hold the same inputs; None means all ranks.
        args: the call's arguments, for their device.
        kwargs: likewise.

    Returns:
        `storage.Shard` over a mesh of that group.

    Raises:
        RuntimeError: there are no process groups.
        TypeError: it is not a group, or one to which this rank does not belong.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise refusal(
            RuntimeError,
            where="checkpoint",
            what="should shard its saved inputs, but torch.distributed is not "
            "initialized.",
            why="Each rank of a process group keeps its part.",
            do="Call torch.distributed.init_process_group(...) first, or leave the "
            "sharding off.",
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise refusal(
            TypeError,
            where="checkpoint",
            what=f"got {group!r}, of type {type(group).__name__}, as the group.",
            why="Each rank of a process group keeps its part, and this rank is "
            "not in one.",
            do="Pass a torch.distributed.ProcessGroup that this rank belongs to, such as "
            'mesh["tp"].get_group().',
        )
    devices = [tensor.device.type for tensor in trees.tensor_leaves((args, kwargs))]
    whole = dist.group.WORLD if group is None else group
    return Shard(_mesh_of(whole, devices[0] if devices else "cpu"))


@functools.lru_cache(maxsize=64)
def _mesh_of(group: Any, device_type: str) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    with isolation.isolated(), modes.without_torch_function():
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=("tp",))
