"""Sizes in bytes: how they are shown to people, and how people write them."""

import re
from fractions import Fraction

from remat._errors import PolicyError, refusal, shown

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def show_size(size_bytes: int) -> str:
    """Returns a size as people read it, in the largest unit that it reaches: "32.0 KiB"."""
    name, unit = unit_of(size_bytes)
    return f"{size_bytes} B" if unit == 1 else f"{size_bytes / unit:.1f} {name}"


def unit_of(size_bytes: int) -> tuple[str, int]:
    """Returns the largest unit that a size reaches, and its bytes."""
    reached = [each for each in _UNITS.items() if size_bytes >= each[1]]
    return reached[-1] if reached else ("B", 1)


def parse_budget(
    size: object, where: str, error: type[Exception] = ValueError
) -> int | float:
    """A size in bytes, or a float in (0, 1] for a fraction of what is held without remat."""
    if not isinstance(size, float):
        return parse_size(size, where)
    if 0.0 < size <= 1.0:
        return size
    raise refusal(
        error,
        where=where,
        what=f"the fraction {size} is not in (0, 1].",
        why="A float is a fraction of what is held without recomputation.",
        do='Pass a fraction, an int in bytes, or a string like "512MiB".',
    )


def parse_size(size: object, where: str) -> int:
    """A size in bytes, rounded down; `where` names the argument in the message.

    It is an int, or a string such as `"512KiB"` or `"1.5 MiB"`, in powers of 1024, or
    `"20MB"`, in powers of 1000.
    """
    units = _UNITS | _DECIMAL
    if isinstance(size, str):
        found = _SIZE.fullmatch(size.strip())
        if found is None or found[2] not in units:
            raise refusal(
                ValueError,
                where=where,
                what=f"the size {size!r} cannot be read.",
                why=f"A size is a number and one of the units {', '.join(units)}.",
                do='Write it like "512KiB", or pass a number of bytes.',
            )
        return int(Fraction(found[1]) * units[found[2]])
    if isinstance(size, bool) or not isinstance(size, int):
        raise PolicyError.of(
            where=where,
            what=f"got {shown(size)}, of type {type(size).__name__}.",
            why="A size is an int in bytes, or a string with a unit.",
            do='Pass, for example, 524288 or "512KiB".',
        )
    if size < 0:
        raise refusal(
            ValueError,
            where=where,
            what=f"the size {size} is negative.",
            why="No value has fewer than zero bytes.",
            do="Pass zero or more bytes.",
        )
    return size
