"""Sharding: each rank keeps its part of a value that all ranks of a mesh hold.

Megatron-LM names it distributed saved activations [1]; ZeRO-R names it partitioned
activation checkpointing [2]. It is worth its place where a value is the same on all
ranks, as an input of a tensor-parallel layer is.

References:
    [1] Reducing Activation Recomputation in Large Transformer Models. V. Korthikanti et
    al., 2022. https://arxiv.org/abs/2205.05198, section 5.
    [2] ZeRO: Memory Optimizations Toward Training Trillion Parameter Models.
    S. Rajbhandari et al., 2020. https://arxiv.org/abs/1910.02054, section 6.1.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, final

from torch import Tensor

from remat._errors import explain
from remat.storage._check import refuse, require_type
from remat.storage._contract import AbstractStorage
from remat.storage._stored import FIRST, Place, Stored

if TYPE_CHECKING:  # a torch built without distributed has no such module
    from torch.distributed.device_mesh import DeviceMesh

_REPLICATED = ("check", "trust")


@final
@dataclass(frozen=True, slots=True)
class Shard(AbstractStorage):
    """Keeps one rank's part of a replicated value, and gathers it back.

    Laws: exact where the value is the same on all ranks of the mesh.

    Args:
        mesh: a mesh of one dimension, as in `mesh["tp"]`.
        pattern: the value's axes as einops writes them, one of them named as the mesh's
            dimension, as in `"batch (tp seq) d"`; None flattens the value and pads it.
        replicated: `"check"` compares the ranks' values first; `"trust"` does not.

    Raises:
        TypeError: `mesh` is no device mesh, or `pattern` no text.
        ValueError: the mesh has more dimensions than one, the pattern does not name its
            dimension, or `replicated` is another word.

    Example:
        >>> import torch.distributed as dist
        >>> from remat import storage
        >>> alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        >>> dist.init_process_group("gloo", **alone)
        >>> mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> storage.Shard(mesh["tp"], "batch (tp seq) d").replicated
        'check'
        >>> dist.destroy_process_group()
    """

    mesh: "DeviceMesh"
    pattern: str | None = None
    replicated: Literal["check", "trust"] = "check"

    is_available: ClassVar[bool] = False
    is_exact: ClassVar[bool] = True

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        """Comes with a later release."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        """Checks the arguments."""
        _check_mesh(self.mesh)
        if self.pattern is not None:
            _check_pattern(self.pattern, self.mesh.mesh_dim_names)
        if self.replicated not in _REPLICATED:
            raise refuse(
                "Shard(replicated=...)",
                self.replicated,
                why="A value is only sharded where all ranks hold the same one.",
                do='Pass "check" to compare the ranks, or "trust" to trust them.',
            )


def _check_mesh(mesh: object) -> None:
    num_dimensions = getattr(mesh, "ndim", None)
    if num_dimensions is None or not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(
            explain(
                where="Shard(mesh=...)",
                what=f"got {mesh!r}, of type {type(mesh).__name__}.",
                why="The ranks that share a value are those of a device mesh.",
                do='Pass `init_device_mesh(...)["tp"]` of `torch.distributed`.',
            )
        )
    if num_dimensions != 1:
        raise refuse(
            "Shard(mesh=...)",
            mesh,
            why=f"It has {num_dimensions} dimensions, and a value is cut along one.",
            do='Pick the dimension by its name, as in `mesh["tp"]`.',
        )


def _check_pattern(pattern: object, names: tuple[str, ...] | None) -> None:
    argument = "Shard(pattern=...)"
    require_type(argument, pattern, str, wanted='a text such as "batch (tp seq) d"')
    name = names[0] if names else None
    if name is None:
        raise refuse(
            argument,
            pattern,
            why="The mesh's dimension has no name, so that no axis can be meant.",
            do="Make the mesh with `mesh_dim_names=...`, or pass None.",
        )
    if re.findall(r"\w+", str(pattern)).count(name) != 1:
        raise refuse(
            argument,
            pattern,
            why=f'The mesh\'s dimension is "{name}", and one axis must have that name.',
            do=f'Name the axis that is cut, as in "batch ({name} seq) d".',
        )
