"""JAX's way to write the union of two policies."""

from dataclasses import dataclass
from typing import final

from remat.policies._as_policy import as_policy
from remat.policies._contract import (
    AbstractPolicy,
    Pair,
    Recompute,
    Save,
    Value,
    decide,
)


@final
@dataclass(frozen=True, slots=True, repr=False)
class SaveFromBothPolicies(Pair):
    """What `save_from_both_policies` makes."""

    def __call__(self, value: Value, /) -> Save | Recompute:
        """Decides about one value."""
        return decide(self.left | self.right, value)

    def __repr__(self) -> str:
        """The code that makes this policy."""
        return f"save_from_both_policies({self.left!r}, {self.right!r})"


def save_from_both_policies(first: object, second: object) -> AbstractPolicy:
    """Saves what either of two policies saves, in the first one's storage if it saves.

    Laws: answers as `first | second` does; prints and compares as itself.

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
        save_from_both_policies(save_matmul_outputs, save_only_these_names('attn'))

    References:
        JAX has it under the same name in `jax.checkpoint_policies`.
    """
    where = "save_from_both_policies(...)"
    return SaveFromBothPolicies(as_policy(first, where), as_policy(second, where))
