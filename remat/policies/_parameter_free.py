"""Policies without parameters: one object each, known by its public name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from remat.policies._contract import AbstractPolicy, Value


@final
@dataclass(frozen=True, eq=False, repr=False)
class ParameterFreePolicy(AbstractPolicy):
    """A policy without parameters; made by `parameter_free`.

    Laws: it is equal to itself only, prints as its name, and copies and pickles to the
    same object.

    Args:
        rule: says of a value whether it is saved; a function at the top of its module.
    """

    rule: Callable[[Value], bool]

    def __post_init__(self) -> None:
        """Takes the rule's name, module and documentation, as `functools.wraps` does."""
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            object.__setattr__(self, name, getattr(self.rule, name))

    def __call__(self, value: Value, /) -> bool:
        """Decides about one value."""
        return self.rule(value)

    @property
    def globs(self) -> tuple[str, ...]:
        """None: these policies look at no names."""
        return ()

    def __repr__(self) -> str:
        """The public name."""
        return self.rule.__name__

    def __reduce__(self) -> str:
        """The name under which pickle finds this object in its module."""
        return self.rule.__name__


def parameter_free(rule: Callable[[Value], bool]) -> AbstractPolicy:
    """Makes the policy of a rule; stands as a decorator above it."""
    return ParameterFreePolicy(rule)
