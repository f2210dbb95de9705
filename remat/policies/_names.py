"""Policies that look at the names that `checkpoint_name` gives.

A value may have several names, because all aliases of a value are one value. It has one
of "these names" if any of its names matches any of the globs.
"""

from dataclasses import dataclass
from typing import final

from remat._errors import PolicyError, shown
from remat.policies._contract import AbstractPolicy, Value


@final
@dataclass(frozen=True, slots=True, repr=False)
class ByNames(AbstractPolicy):
    """A policy by globs of names, which prints as the function that makes it."""

    maker: str
    _globs: tuple[str, ...]
    #: Whether it saves the values of these names, or those of other names.
    saves_these: bool
    #: Whether it saves values without a name.
    saves_unnamed: bool = False

    def __post_init__(self) -> None:
        require_globs(self._globs, where=f"{self.maker}(*globs)")

    def __call__(self, value: Value, /) -> bool:
        if not value.names:
            return self.saves_unnamed
        is_one_of_these = any(
            self.glob_matches(glob, name)
            for glob in self._globs
            for name in value.names
        )
        return is_one_of_these is self.saves_these

    @property
    def globs(self) -> tuple[str, ...]:
        return self._globs

    def __repr__(self) -> str:
        return show_call(self.maker, self._globs)


def save_only_these_names(*globs: str) -> AbstractPolicy:
    """Saves the values that have one of these names, and nothing else.

    Args:
        globs: names, or patterns of `fnmatch` such as `"mlp_*"`; case counts.

    Returns:
        The policy.

    Raises:
        PolicyError: a glob is not a string.

    Example:
        >>> from remat import policies
        >>> policies.save_only_these_names("attn", "mlp_*").globs
        ('attn', 'mlp_*')
    """
    return ByNames("save_only_these_names", globs, saves_these=True)


def save_any_names_but_these(*globs: str) -> AbstractPolicy:
    """Saves the values that have a name, but none of these; unnamed ones are not saved.

    Args:
        globs: names, or patterns of `fnmatch` such as `"mlp_*"`; case counts.

    Returns:
        The policy.

    Raises:
        PolicyError: a glob is not a string.

    Example:
        >>> from remat import policies
        >>> policies.save_any_names_but_these("scores")
        save_any_names_but_these('scores')
    """
    return ByNames("save_any_names_but_these", globs, saves_these=False)


def save_anything_except_these_names(*globs: str) -> AbstractPolicy:
    """Saves all values, with a name or without, except those of these names.

    Laws: saves what `~save_only_these_names(*globs)` does.

    Args:
        globs: names, or patterns of `fnmatch` such as `"mlp_*"`; case counts.

    Returns:
        The policy.

    Raises:
        PolicyError: a glob is not a string.

    Example:
        >>> from remat import policies
        >>> policies.save_anything_except_these_names("scores")
        save_anything_except_these_names('scores')

    References:
        JAX has it under the same name in `jax.checkpoint_policies`, where it has no
        effect, because JAX saves the unnamed value instead; here both are one value.
    """
    maker = "save_anything_except_these_names"
    return ByNames(maker, globs, saves_these=False, saves_unnamed=True)


def require_globs(globs: tuple[object, ...], where: str) -> None:
    """Raises PolicyError unless each of the globs is a string."""
    for glob in globs:
        if isinstance(glob, str):
            continue
        raise PolicyError.of(
            where=where,
            what=f"got {shown(glob)}, of type {type(glob).__name__}.",
            why="Each name or glob is a string and a separate argument.",
            do='Pass strings, as in `"attn", "mlp_*"`, or unpack a collection: `*names`.',
        )


def show_call(function: str, arguments: tuple[object, ...]) -> str:
    """Returns the code that makes a policy of names: a call of a function with arguments."""
    return f"{function}({', '.join(map(repr, arguments))})"
