"""JAX's policies that are made of others: unions and offloading, with JAX's arguments.

JAX has names for memories: `"device"`, and `"pinned_host"` and `"unpinned_host"` for
host memory. Here these are storage values. An unknown memory is refused; JAX treats it
as `"device"`, and offloads nothing.
"""

from collections.abc import Iterable

from remat._errors import PolicyError, refusal
from remat.policies._as_policy import as_policy
from remat.policies._by_kind import save_matmul_outputs_no_batch
from remat.policies._contract import AbstractPolicy
from remat.policies._names import require_globs, save_only_these_names
from remat.storage import AbstractStorage, Offload

_DESTINATIONS = {"pinned_host": Offload(pin=True), "unpinned_host": Offload(pin=False)}


def save_from_both_policies(first: object, second: object) -> AbstractPolicy:
    """Saves what either of two policies saves, in the first one's storage if it saves.

    Laws: is `first | second`.

    Args:
        first: a policy, a function of a value, or None for `nothing_saveable`.
        second: the same.

    Returns:
        The policy.

    Raises:
        PolicyError: an argument is none of these.

    Example:
        >>> from remat import policies
        >>> policies.save_from_both_policies(
        ...     policies.save_matmul_outputs, policies.save_only_these_names("attn")
        ... )
        save_matmul_outputs | save_only_these_names('attn')
    """
    where = "save_from_both_policies(...)"
    return as_policy(first, where) | as_policy(second, where)


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
    """
    saved = _listed_names(names_which_can_be_saved, "names_which_can_be_saved")
    offloaded = _listed_names(
        names_which_can_be_offloaded, "names_which_can_be_offloaded"
    )
    common = [glob for glob in saved if glob in offloaded]
    if common:
        raise refusal(
            ValueError,
            where=f"{_BOTH}(...)",
            what=f"{common} are among both the names to save and the names to offload.",
            why="A value is either kept as it is or offloaded.",
            do="Leave each name in one of the two.",
        )
    storage = _storage_at_memory(_BOTH, offload_src, offload_dst)
    there = save_only_these_names(*offloaded).stored(storage)
    return save_only_these_names(*saved) | there


def offload_dot_with_no_batch_dims(
    offload_src: str, offload_dst: str
) -> AbstractPolicy:
    """Offloads what `save_matmul_outputs_no_batch` saves.

    Laws: is `save_matmul_outputs_no_batch.stored(storage)`, with the storage that
    `offload_dst` names.

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
        >>> from remat.storage import Offload
        >>> policy = policies.offload_dot_with_no_batch_dims("device", "pinned_host")
        >>> policy == policies.save_matmul_outputs_no_batch.stored(Offload())
        True
    """
    where = "offload_dot_with_no_batch_dims"
    storage = _storage_at_memory(where, offload_src, offload_dst)
    return save_matmul_outputs_no_batch.stored(storage)


_BOTH = save_and_offload_only_these_names.__name__


def _storage_at_memory(function: str, source: str, destination: str) -> AbstractStorage:
    for argument, memory, known in (
        ("offload_src", source, ["device"]),
        ("offload_dst", destination, [*_DESTINATIONS]),
    ):
        if memory not in known:
            choices = " or ".join(f'"{name}"' for name in known)
            raise refusal(
                ValueError,
                where=f"{function}({argument}=...)",
                what=f"the memory {memory!r} is not known here.",
                why='Values move from the memory "device" to host memory.',
                do=f"Pass {choices}.",
            )
    return _DESTINATIONS[destination]


def _listed_names(names: object, argument: str) -> tuple[str, ...]:
    where = f"{_BOTH}({argument}=...)"
    if isinstance(names, Iterable) and not isinstance(names, str):
        globs: tuple[str, ...] = tuple(names)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
        require_globs(globs, where)
        return globs
    raise PolicyError.of(
        where=where,
        what=f"got {names!r}, of type {type(names).__name__}.",
        why="This argument is a list of names, as in JAX.",
        do=f"Pass `[{names!r}]`."
        if isinstance(names, str)
        else "Pass a list of strings.",
    )
