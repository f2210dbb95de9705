"""What the drop-ins share: one call of a function as a region.

The peers take a function at each call, so a region is made at each call too. That costs
microseconds: traces belong to a function's code and to the options (`_calls.decorated`), so a
lambda, a bound method or a closure that is made anew at each step reuses the trace
of the last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch.compiler import is_dynamo_compiling

from remat._calls import torch_compile
from remat._calls.decorated import DecoratedFunction, is_region, kind_of
from remat._calls.options import InputStorages, Settings, inputs_for
from remat._calls.signature import Statics
from remat._errors import SideEffectError, explain, refusal
from remat._generators.trackers import is_tracker, register_tracker
from remat._torch import dynamo
from remat._tracing.thread import is_running
from remat.policies import nothing_saveable
from remat.storage import AbstractStorage, Keep

_KEEP = Keep()


def _settings(storage: AbstractStorage) -> Settings:
    return Settings(
        nothing_saveable,
        "preserve",
        "trace",
        Statics(),
        verify=False,
        inputs=InputStorages(others=storage, activations_only=True),
    )


# What a graph of torch.compile calls these regions, where inputs wait as they are.
_KIND = kind_of(_settings(_KEEP), "checkpoint(...)")
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
    storage: AbstractStorage = _KEEP,
) -> Any:
    """Calls a function whose backward will recompute all of it.

    Generators and registered trackers are preserved. A region with `engine="rerun"` does
    that by itself, and is called as it is.

    Args:
        function: any callable, a module or a region.
        args: the call's arguments.
        kwargs: likewise.
        storage: how arguments of a floating or complex dtype wait, parameters aside.

    Returns:
        What `function` returns.

    Raises:
        ValueError: the function runs again, and its inputs would have to wait otherwise
            than as they are.
    """
    if _runs_again(function):
        inputs_for(storage, "rerun")
        return function(*args, **kwargs)
    if is_dynamo_compiling():
        return torch_compile.call(_KIND, function, args, dict(kwargs))
    return DecoratedFunction(function, _settings(storage))(*args, **kwargs)


def end_graph_for_storage(is_wanted: bool) -> None:
    """Ends a graph of torch.compile in front of a call whose inputs wait in a storage."""
    if is_wanted and is_dynamo_compiling():
        dynamo.end_graph(_WITH_STORAGE)


def _runs_again(function: Callable[..., Any]) -> bool:
    return is_region(function) and function.settings.engine == "rerun"


@dynamo.constant_for_dynamo
def preserve_that_of(module: str) -> None:
    """Registers the tracker of a project, if its module is imported."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        preserve(loaded.get_cuda_rng_tracker)


@dynamo.constant_for_dynamo
def preserve(get_tracker: Callable[[], Any]) -> None:
    """Registers a tracker for good, because a backward may come at any time.

    A registration of the user's own is left alone.

    Raises:
        SideEffectError: a region around is being traced, which must know it before.
    """
    tracker = get_tracker()
    if is_tracker(tracker):
        return
    if is_running():
        raise refusal(
            SideEffectError,
            where=f"a checkpoint inside a region, with a {type(tracker).__name__}",
            what="meets this tracker while the region around it is traced.",
            why="The trace must know all trackers when it begins.",
            do="Call random.register_tracker(tracker) before the region.",
        )
    register_tracker(tracker)
