"""JAX's policies that offload, with JAX's arguments.

JAX has names for memories: `"device"`, and `"pinned_host"` and `"unpinned_host"` for
host memory. Here these are storage values. An unknown memory is refused; JAX treats it
as `"device"`, and offloads nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from remat._errors import PolicyError, refusal
from remat.policies._by_kind import save_matmul_outputs_no_batch
from remat.policies._contract import AbstractPolicy, Recompute, Save, Value
from remat.policies._names import has_name, require_globs
from remat.storage import AbstractStorage, Offload

_SOURCES = ("device",)
_DESTINATIONS = {"pinned_host": Offload(pin=True), "unpinned_host": Offload(pin=False)}


@final
@dataclass(frozen=True, slots=True, repr=False)
class SaveAndOffloadOnlyTheseNames(AbstractPolicy):
    """What `save_and_offload_only_these_names` makes."""

    saved: tuple[str, ...]
    offloaded: tuple[str, ...]
    source: str
    destination: str

    def __post_init__(self) -> None:
        """Checks the names and the memories."""
        require_globs(self.saved, where=f"{_BOTH}(names_which_can_be_saved=...)")
        require_globs(
            self.offloaded, where=f"{_BOTH}(names_which_can_be_offloaded=...)"
        )
        _require_disjoint(self.saved, self.offloaded)
        _storage_at_memory(_BOTH, self.source, self.destination)

    def __call__(self, value: Value, /) -> Save | Recompute:
        """Decides about one value."""
        if has_name(value, self.saved):
            return Save()
        if has_name(value, self.offloaded):
            return Save(_storage_at_memory(_BOTH, self.source, self.destination))
        return Recompute()

    @property
    def globs(self) -> tuple[str, ...]:
        """The globs of the names to save, and of those to offload."""
        return self.saved + self.offloaded

    def __repr__(self) -> str:
        """The code that makes this policy."""
        return (
            f"{_BOTH}(names_which_can_be_saved={list(self.saved)}, "
            f"names_which_can_be_offloaded={list(self.offloaded)}, "
            f"offload_src={self.source!r}, offload_dst={self.destination!r})"
        )


@final
@dataclass(frozen=True, slots=True, repr=False)
class OffloadDotWithNoBatchDims(AbstractPolicy):
    """What `offload_dot_with_no_batch_dims` makes."""

    source: str
    destination: str

    def __post_init__(self) -> None:
        """Checks the memories."""
        _storage_at_memory(_DOTS, self.source, self.destination)

    def __call__(self, value: Value, /) -> bool | Save | Recompute:
        """Decides about one value."""
        storage = _storage_at_memory(_DOTS, self.source, self.destination)
        return save_matmul_outputs_no_batch.stored(storage)(value)

    def __repr__(self) -> str:
        """The code that makes this policy."""
        return f"{_DOTS}({self.source!r}, {self.destination!r})"


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Iterable[str],
    names_which_can_be_offloaded: Iterable[str],
    offload_src: str,
    offload_dst: str,
) -> AbstractPolicy:
    """Saves the values of some names, offloads those of others, and drops the rest.

    Args:
        names_which_can_be_saved: globs of the names that are kept as they are; a value
            that has names of both kinds is kept.
        names_which_can_be_offloaded: globs of the names that are offloaded.
        offload_src: the memory that values leave: `"device"`.
        offload_dst: the memory in which they wait: `"pinned_host"` or
            `"unpinned_host"`.

    Returns:
        The policy.

    Raises:
        PolicyError: names are a single string, or are not strings.
        ValueError: a glob is in both lists, or a memory is not known.

    Example:
        >>> from remat import policies
        >>> policy = policies.save_and_offload_only_these_names(
        ...     names_which_can_be_saved=["attn"],
        ...     names_which_can_be_offloaded=["mlp_*"],
        ...     offload_src="device",
        ...     offload_dst="pinned_host",
        ... )
        >>> policy.globs
        ('attn', 'mlp_*')

    References:
        JAX has it under the same name in `jax.checkpoint_policies`, without globs.
    """
    return SaveAndOffloadOnlyTheseNames(
        _names_to_offload(names_which_can_be_saved, "names_which_can_be_saved"),
        _names_to_offload(names_which_can_be_offloaded, "names_which_can_be_offloaded"),
        offload_src,
        offload_dst,
    )


def offload_dot_with_no_batch_dims(
    offload_src: str, offload_dst: str
) -> AbstractPolicy:
    """Offloads what `save_matmul_outputs_no_batch` saves.

    Laws: answers as `save_matmul_outputs_no_batch.stored(storage)` does, with the
    storage that `offload_dst` names.

    Args:
        offload_src: the memory that values leave: `"device"`.
        offload_dst: the memory in which they wait: `"pinned_host"` or
            `"unpinned_host"`.

    Returns:
        The policy.

    Raises:
        ValueError: a memory is not known.

    Example:
        >>> from remat import policies
        >>> policies.offload_dot_with_no_batch_dims("device", "pinned_host")
        offload_dot_with_no_batch_dims('device', 'pinned_host')

    References:
        JAX has it under the same name in `jax.checkpoint_policies`.
    """
    return OffloadDotWithNoBatchDims(offload_src, offload_dst)


_BOTH = save_and_offload_only_these_names.__name__
_DOTS = offload_dot_with_no_batch_dims.__name__


def _storage_at_memory(function: str, source: str, destination: str) -> AbstractStorage:
    _require_memory(f"{function}(offload_src=...)", source, _SOURCES)
    _require_memory(f"{function}(offload_dst=...)", destination, tuple(_DESTINATIONS))
    return _DESTINATIONS[destination]


def _require_memory(where: str, memory: str, known: tuple[str, ...]) -> None:
    if memory in known:
        return
    choices = " or ".join(f'"{name}"' for name in known)
    raise refusal(
        ValueError,
        where=where,
        what=f"the memory {memory!r} is not known here.",
        why='Values move from the memory "device" to host memory.',
        do=f"Pass {choices}.",
    )


def _require_disjoint(saved: tuple[str, ...], offloaded: tuple[str, ...]) -> None:
    common = [glob for glob in saved if glob in offloaded]
    if common:
        raise refusal(
            ValueError,
            where=f"{_BOTH}(...)",
            what=f"{common} are among both the names to save and the names to offload.",
            why="A value is either kept as it is or offloaded.",
            do="Leave each name in one of the two.",
        )


def _names_to_offload(names: object, argument: str) -> tuple[str, ...]:
    if isinstance(names, Iterable) and not isinstance(names, str):
        return tuple(names)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    raise refusal(
        PolicyError,
        where=f"{_BOTH}({argument}=...)",
        what=f"got {names!r}, of type {type(names).__name__}.",
        why="This argument is a list of names, as in JAX.",
        do=f"Pass `[{names!r}]`."
        if isinstance(names, str)
        else "Pass a list of strings.",
    )
