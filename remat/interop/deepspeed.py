"""`deepspeed.checkpointing` over this engine: `checkpoint`, and what configures it.

Options that have no effect with this engine warn, and so does partitioning without an
`mpu_`, which would partition nothing. DeepSpeed is silent about these.

References:
    DeepSpeed, `deepspeed/runtime/activation_checkpointing/checkpointing.py`; "Activation
    Checkpointing" in its documentation.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast, final

from remat._errors import refusal
from remat._regions import prefetch
from remat._torch import dynamo
from remat.interop._shared import (
    call_as_region,
    preserve_tracker_of,
    shard_over,
    warn_without_effect,
)
from remat.storage import AbstractStorage, Keep, Offload, release_host_memory

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "non_reentrant_checkpoint",
    "reset",
]

_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"

# The section "activation_checkpointing" of a DeepSpeed configuration, and what `configure`
# calls each of its entries, in the order in which it takes them.
_ENTRIES = {
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}

_WITHOUT_EFFECT = {
    "contiguous_checkpointing": (
        "What waits is a tensor for each value, which torch's allocator reuses.",
        "Leave it out.",
    ),
    "num_checkpoints": (
        "It sizes the buffer of contiguous_checkpointing, and there is none.",
        "Leave it out.",
    ),
    "synchronize": (
        "The programs of a region read nothing from the device.",
        "Call torch.accelerator.synchronize() where you measure.",
    ),
    "partition_activations": (  # unless there is an `mpu_`
        "Without `mpu_` nothing says which ranks hold the same activations.",
        "Pass mpu_=..., an object with get_model_parallel_group().",
    ),
    "profile": (
        "Forward and backward programs take their time like any other operators.",
        "Use torch.profiler.",
    ),
}


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Configuration:
    """The arguments of `configure`; `mpu` knows the group to partition over, if any."""

    mpu: Any = None
    partition_activations: bool = False
    checkpoint_in_cpu: bool = False

    def storage(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractStorage:
        """How the activations among a call's arguments wait."""
        if not self.partition_activations:
            return Offload() if self.checkpoint_in_cpu else Keep()
        part = shard_over(_group_getter(self.mpu)(), args, kwargs)
        return part >> Offload() if self.checkpoint_in_cpu else part


@final
class _Current:
    """The configuration in force; None before `configure`."""

    value: _Configuration | None = None


@dynamo.unseen_by_dynamo
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function whose values are recomputed in the backward, as DeepSpeed's does.

    Laws: those of `remat`. Generators, registered trackers and, where DeepSpeed is
    imported, its own tracker are put back for the recomputation by value. Inputs wait as
    `configure` says; the caller's tensors are left alone.

    Args:
        function: a module, a function or a region, called with what follows.
        *args: its arguments; pytrees of tensors and other values.
        **kwargs: its keyword arguments.

    Returns:
        What `function` returns; as in DeepSpeed a tuple in place of a list, and the only
        element in place of a list or tuple of one.

    Raises:
        TraceError: the function cannot be traced; in its place,
            `remat(function, engine="rerun", rng="preserve")` runs it again instead.
        NotReplicatedError: arguments that are to be partitioned differ between ranks.
        RuntimeError: there are no process groups to partition over.

    Example:
        >>> import torch
        >>> from remat.interop import deepspeed
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = deepspeed.checkpoint(lambda x: x.sin().sin(), x)
        >>> y.sum().backward()
    """
    preserve_tracker_of(_CHECKPOINTING)
    configuration = _Current.value or _Configuration()
    is_stored = configuration.checkpoint_in_cpu or configuration.partition_activations
    storage = functools.partial(configuration.storage, args, kwargs)
    returned = call_as_region(function, args, kwargs, storage if is_stored else None)
    if type(returned) not in (tuple, list):
        return returned
    outputs = tuple(returned)
    return outputs[0] if len(outputs) == 1 else outputs


# Both of DeepSpeed's variants are one here.
non_reentrant_checkpoint = checkpoint


def configure(  # noqa: PLR0917  DeepSpeed's own order
    mpu_: Any = None,
    deepspeed_config: Mapping[str, Any] | str | Path | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Says how the inputs of all later calls of `checkpoint` wait.

    Each call starts from DeepSpeed's defaults, all of them off, and from the last `mpu_`.
    An option that is on and has no effect warns, and says why.

    Args:
        mpu_: has `get_tensor_model_parallel_group()` or `get_model_parallel_group()`; None
            leaves the one of an earlier call.
        deepspeed_config: a DeepSpeed configuration, or the path of its JSON file; its
            section "activation_checkpointing" is read.
        partition_activations: whether each rank of the model-parallel group keeps its part
            of the arguments of a floating dtype, as `storage.Shard` does.
        contiguous_checkpointing: has no effect.
        num_checkpoints: has no effect.
        checkpoint_in_cpu: whether they wait in host memory, as `storage.Offload` does; with
            `partition_activations` the parts do.
        synchronize: has no effect.
        profile: has no effect.

    Raises:
        TypeError: `mpu_` is needed and has neither of these, `deepspeed_config` is neither a
            mapping nor a path, or its section is no mapping.
        ValueError: the section has an entry that DeepSpeed does not know.

    Example:
        >>> from remat.interop import deepspeed
        >>> deepspeed.configure(checkpoint_in_cpu=False)
        >>> deepspeed.is_configured()
        True
    """
    passed = (partition_activations, contiguous_checkpointing, num_checkpoints)
    passed += (checkpoint_in_cpu, synchronize, profile)
    options = _read_section(deepspeed_config)
    named = zip(_ENTRIES.values(), passed, strict=True)
    options |= {name: each for name, each in named if each is not None}
    last = _Current.value
    mpu = last.mpu if mpu_ is None and last is not None else mpu_
    is_parted = mpu is not None and bool(options.get("partition_activations"))
    for name, (why, do) in _WITHOUT_EFFECT.items():
        if options.get(name) and not (is_parted and name == "partition_activations"):
            where = f"interop.deepspeed.configure({name}={options[name]!r})"
            warn_without_effect(where, why, do)
    if is_parted:
        _group_getter(mpu)
    in_cpu = bool(options.get("checkpoint_in_cpu"))
    _Current.value = _Configuration(mpu, is_parted, in_cpu)


def is_configured() -> bool:
    """Whether `configure` has been called.

    Example:
        >>> from remat.interop import deepspeed
        >>> deepspeed.configure()
        >>> deepspeed.is_configured()
        True
    """
    return _Current.value is not None


def reset() -> None:
    """Frees unused host memory, and what a failed backward left behind.

    The configuration stays. Stored inputs are freed with the autograd graph to which
    they belong, even if no backward runs.

    Example:
        >>> from remat.interop import deepspeed
        >>> deepspeed.reset()
    """
    prefetch.drop()
    release_host_memory()


def _read_section(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """What a DeepSpeed configuration says of checkpointing, as options of `configure`."""
    if config is None:
        return {}
    if isinstance(config, (str, Path)):
        config = cast("Mapping[str, Any]", json.loads(Path(config).read_text()))
    _require_mapping(
        config,
        where="interop.deepspeed.configure(deepspeed_config=...)",
        why='Its section "activation_checkpointing" is read.',
        do="Pass the configuration as a dict, or the path of its JSON file.",
    )
    section: Mapping[str, Any] = config.get("activation_checkpointing", {})
    _require_mapping(
        section,
        where='deepspeed_config["activation_checkpointing"]',
        why="It maps DeepSpeed's options to their values.",
        do="Pass a dict, or leave the section out.",
    )
    unknown = sorted(set(section) - set(_ENTRIES))
    if unknown:
        raise refusal(
            ValueError,
            where='deepspeed_config["activation_checkpointing"]',
            what=f"has an entry {unknown[0]!r}.",
            why=f"DeepSpeed's are {', '.join(_ENTRIES)}.",
            do="Correct its name, or leave it out.",
        )
    return {_ENTRIES[name]: each for name, each in section.items() if each is not None}


def _require_mapping(value: object, *, where: str, why: str, do: str) -> None:
    if not isinstance(value, Mapping):
        what = f"got {value!r}, of type {type(value).__name__}."
        raise refusal(TypeError, where=where, what=what, why=why, do=do)


def _group_getter(mpu: Any) -> Callable[[], Any]:
    """The method that returns the model-parallel group; the newer name comes first."""
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, name):
            return getattr(mpu, name)
    raise refusal(
        TypeError,
        where="interop.deepspeed.configure(mpu_=...)",
        what=f"got {mpu!r}, of type {type(mpu).__name__}.",
        why="It says which ranks hold the same activations.",
        do="Pass an object with get_model_parallel_group().",
    )
