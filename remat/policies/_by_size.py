"""The policy that looks at the size of a value."""

from dataclasses import dataclass
from typing import final

from remat._errors import refusal
from remat.policies._contract import AbstractPolicy, Value
from remat.policies._sizes import parse_size


@final
@dataclass(frozen=True, slots=True, repr=False)
class BySize(AbstractPolicy):
    """What `by_size` makes."""

    min_bytes: int | None
    max_bytes: int | None

    def __call__(self, value: Value, /) -> bool:
        is_large = self.min_bytes is None or value.size_bytes >= self.min_bytes
        is_small = self.max_bytes is None or value.size_bytes <= self.max_bytes
        return is_large and is_small

    def __repr__(self) -> str:
        bounds = {"min_bytes": self.min_bytes, "max_bytes": self.max_bytes}
        given = (f"{key}={bound}" for key, bound in bounds.items() if bound is not None)
        return f"by_size({', '.join(given)})"


def by_size(
    min_bytes: int | str | None = None, max_bytes: int | str | None = None
) -> AbstractPolicy:
    """Saves the values whose size is within bounds, both included.

    Args:
        min_bytes: the smallest size that is saved, in bytes or as in `"512KiB"`; None
            for no bound.
        max_bytes: the largest size that is saved, in the same way.

    Returns:
        The policy.

    Raises:
        PolicyError: a bound is neither an int, nor a string, nor None.
        ValueError: no bound is given, a bound is negative or cannot be read, or no
            size lies between them.

    Example:
        >>> from remat import policies
        >>> policies.by_size(max_bytes="512KiB")
        by_size(max_bytes=524288)
    """
    low, high = (
        None if size is None else parse_size(size, f"by_size({name}=...)")
        for name, size in (("min_bytes", min_bytes), ("max_bytes", max_bytes))
    )
    if low is None and high is None:
        raise refusal(
            ValueError,
            where="by_size()",
            what="got no bound.",
            why="Every value would be saved.",
            do="Pass `min_bytes`, `max_bytes` or both, or use everything_saveable.",
        )
    if low is not None and high is not None and low > high:
        raise refusal(
            ValueError,
            where="by_size(min_bytes=..., max_bytes=...)",
            what=f"got {low} and {high} bytes.",
            why="No size lies between them, so nothing would be saved.",
            do="Swap the two.",
        )
    return BySize(low, high)
