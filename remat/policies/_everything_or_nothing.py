"""The two constant policies."""

from remat.policies._contract import AbstractPolicy, Stored, Value
from remat.policies._parameter_free import parameter_free
from remat.storage import AbstractStorage


@parameter_free
def nothing_saveable(_value: Value, /) -> bool:
    """Saves nothing: everything is recomputed from the inputs. The default.

    Laws: `~nothing_saveable` saves what `everything_saveable` does;
    `nothing_saveable | p` saves what `p` does.

    Example:
        >>> from remat import policies
        >>> policies.as_policy(None) is policies.nothing_saveable
        True

    References:
        JAX has it under the same name in `jax.checkpoint_policies`.
    """
    return False


@parameter_free
def everything_saveable(_value: Value, /) -> bool:
    """Permits every value: what the backward reads is saved, as without remat.

    Laws: `everything_saveable & p` saves what `p` does, with `Keep()`.

    Example:
        >>> from remat import policies, storage
        >>> policies.everything_saveable.stored(storage.Keep())
        everything_saveable.stored(Keep())

    References:
        JAX has it under the same name in `jax.checkpoint_policies`.
    """
    return True


def idle_storage(policy: AbstractPolicy) -> AbstractStorage | None:
    """The storage of `nothing_saveable.stored(...)`, which stores nothing; else None."""
    if not isinstance(policy, Stored) or policy.storage.keeps:
        return None
    return policy.storage if policy.policy is nothing_saveable else None
