"""Policies without parameters: one object each, known by its public name; the constant two."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from remat.policies._contract import AbstractPolicy, Stored, Value
from remat.storage import AbstractStorage


@final
@dataclass(frozen=True, eq=False, repr=False)
class ParameterFreePolicy(AbstractPolicy):
    """A policy without parameters; made by `parameter_free`.

    Laws: it is equal to itself only, prints as its name, and copies and pickles to the
    same object. Its rule is a function at the top of its module.
    """

    rule: Callable[[Value], bool]

    def __post_init__(self) -> None:
        """Takes the rule's name, module and documentation, as `functools.wraps` does."""
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            object.__setattr__(self, name, getattr(self.rule, name))

    def __call__(self, value: Value, /) -> bool:
        return self.rule(value)

    def __repr__(self) -> str:
        return self.rule.__name__

    def __reduce__(self) -> str:
        """The name under which pickle finds this object in its module."""
        return self.rule.__name__


def parameter_free(rule: Callable[[Value], bool]) -> AbstractPolicy:
    """Makes the policy of a rule; stands as a decorator above it."""
    return ParameterFreePolicy(rule)


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


def saves_nothing(policy: AbstractPolicy) -> bool:
    """Whether a policy is meant to save nothing, in whatever storage."""
    bare = policy.policy if isinstance(policy, Stored) else policy
    return bare is nothing_saveable
