"""What the drop-ins share: one call of a function as a region, and how its inputs wait.

The peers take a function at each call, so a region is made at each call too. That costs
microseconds: traces belong to a function's code and to the options (`_calls.decorated`), so a
lambda, a bound method or a closure that is made anew at each step reuses the trace of the last.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from remat._calls import torch_compile
from remat._calls.decorated import DecoratedFunction, is_region, kind_of
from remat._calls.options import InputStorages, Settings
from remat._errors import SideEffectError, explain, refusal
from remat._generators.trackers import is_tracker, register_tracker
from remat._torch import dynamo, isolation, modes, trees
from remat._tracing.thread import is_running
from remat._user_lines import warn
from remat.storage import AbstractStorage, Keep, Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_KEEP = Keep()


def _settings_of_drop_in(storage: AbstractStorage) -> Settings:
    inputs = InputStorages(others=storage, activations_only=True)
    return Settings(rng="preserve", inputs=inputs)


# What a graph of torch.compile calls these regions, where inputs wait as they are.
_KIND = kind_of(_settings_of_drop_in(_KEEP), "checkpoint(...)")
_WITH_STORAGE = explain(
    where="checkpoint(...)",
    what="is called under torch.compile, and its inputs wait in a storage.",
    why="A compiled graph cannot contain what a storage does between forward and "
    "backward.",
    do="Compile without fullgraph=True: the call then runs between two graphs.",
)


def call_as_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    storage: Callable[[], AbstractStorage] | None = None,
) -> Any:
    """Calls a function, a module or a region, whose backward will recompute all of it.

    Generators and registered trackers are preserved. A region with `engine="rerun"` does
    that by itself, and is called as it is. `storage` makes the storage in which arguments
    of a floating or complex dtype wait, parameters aside; None where they wait as they are.
    """
    if storage is not None and is_dynamo_compiling():
        dynamo.end_graph(_WITH_STORAGE)
    if is_region(function) and function.settings.engine != "trace":
        if storage is not None:
            raise refusal(
                ValueError,
                where=f"checkpoint({function!r}, ...)",
                what="should keep its arguments in parts, or in another memory "
                "(distribute_saved_activations, partition_activations, cpu_checkpointing).",
                why=f"The region has engine={function.settings.engine!r}, which the drop-in "
                "leaves to it; it holds its arguments as they are.",
                do="Leave that option off, or pass the function without `remat`.",
            )
        return function(*args, **kwargs)
    waiting = _KEEP if storage is None else storage()
    if is_dynamo_compiling():
        return torch_compile.call(_KIND, function, args, dict(kwargs))
    return DecoratedFunction(function, _settings_of_drop_in(waiting))(*args, **kwargs)


def warn_without_effect(where: str, why: str, do: str) -> None:
    """Warns of an option that has no effect with this engine."""
    warn(where=where, what="has no effect.", why=why, do=do)


@dynamo.constant_for_dynamo
def preserve_tracker_of(module: str) -> None:
    """Registers the tracker of a project, if its module is imported."""
    if module in sys.modules:
        preserve_tracker(sys.modules[module].get_cuda_rng_tracker)


@dynamo.constant_for_dynamo
def preserve_tracker(get_tracker: Callable[[], Any]) -> None:
    """Registers a tracker for good, because a backward may come at any time.

    A registration of the user's own is left alone.
    """
    tracker = get_tracker()
    if is_tracker(tracker):
        return
    if is_running():
        raise SideEffectError.of(
            where=f"a checkpoint inside a region, with a {type(tracker).__name__}",
            what="meets this tracker while the region around it is traced.",
            why="The trace must know all trackers when it begins.",
            do="Call random.register_tracker(tracker) before the region.",
        )
    register_tracker(tracker)


def shard_over(
    group: ProcessGroup | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Shard:
    """The sharding of a call's saved inputs over a process group, None for all ranks."""
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
    return Shard(_mesh_of_peer(whole, devices[0] if devices else "cpu"))


@functools.lru_cache(maxsize=64)
def _mesh_of_peer(group: Any, device_type: str) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    with isolation.isolated(), modes.unseen_by_traces():
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=("tp",))
