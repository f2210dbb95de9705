"""Values that policies are asked about."""

from typing import Any

import torch

from remat import policies, storage
from remat.policies import Save, Value
from remat.storage import Offload

ATEN = torch.ops.aten


def value(
    op: Any = None,
    *names: str,
    shape: tuple[int, ...] = (8, 1024),
    size_bytes: int = 32768,
    function: str = "",
    is_result: bool = True,
) -> Value:
    """A value of float32 that the user made at model.py:41."""
    source = "model.py:41"
    return Value(
        *(op, names, shape, torch.float32, size_bytes, 0, source, function),
        is_result=is_result,
    )


def is_small(value: Value) -> bool:
    return value.size_bytes < 1024


def offload_mlp(value: Value) -> bool | Save:
    return "mlp" in value.names and Save(Offload())


NAMESPACE = {**vars(policies), **vars(storage), "is_small": is_small, "offload_mlp": offload_mlp}  # fmt: skip
