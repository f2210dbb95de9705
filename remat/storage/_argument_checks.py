"""Checks of arguments, with messages in four parts, shared by the options and the storage values."""

from remat._errors import refusal


def require_type(
    argument: str, answer: object, expected: type | tuple[type, ...], *, wanted: str
) -> None:
    """Raises TypeError unless `answer` is of the expected type; a bool is not an int.

    The argument is named as in `Quantize(bits=...)`; `wanted` says what to pass instead.
    """
    is_stray_bool = isinstance(answer, bool) and expected is int
    if isinstance(answer, expected) and not is_stray_bool:
        return
    raise refusal(
        TypeError,
        where=argument,
        what=f"got {answer!r}, of type {type(answer).__name__}.",
        why="Options are compared, hashed and printed, so they are not converted.",
        do=f"Pass {wanted}.",
    )


def refuse(argument: str, answer: object, *, why: str, do: str) -> ValueError:
    """The error for an argument of the right type, whose value makes no sense."""
    what = f"got {answer!r}."
    return refusal(ValueError, where=argument, what=what, why=why, do=do)


def require_hash(argument: str, answer: object) -> None:
    """Raises TypeError unless `answer` can be hashed."""
    try:
        hash(answer)
    except TypeError as error:
        raise refusal(
            TypeError,
            where=argument,
            what=f"got {answer!r}, which cannot be hashed.",
            why="Traced programs are looked up by their options.",
            do="Give its class `__hash__` beside `__eq__`, as a frozen dataclass has.",
        ) from error


def require_count(argument: str, answer: int, *, at_least: int) -> None:
    """Raises unless `answer` is an int, no bool, and not below `at_least`."""
    require_type(argument, answer, int, wanted=f"an int of at least {at_least}")
    if answer < at_least:
        raise refuse(
            argument,
            answer,
            why=f"A count below {at_least} has no meaning here.",
            do=f"Pass an int of at least {at_least}.",
        )
