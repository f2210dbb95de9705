"""Checks of arguments, with messages in four parts, shared by the storage values."""

from remat._errors import refusal


def require_type(
    argument: str, answer: object, expected: type | tuple[type, ...], *, wanted: str
) -> None:
    """Raises TypeError unless `answer` is of the expected type; a bool is not an int.

    Args:
        argument: where the value was given, as in `Quantize(bits=...)`.
        answer: the value that was given.
        expected: the type, or types, that are taken.
        wanted: the value to pass instead, in words.
    """
    is_stray_bool = isinstance(answer, bool) and expected is int
    if isinstance(answer, expected) and not is_stray_bool:
        return
    raise refusal(
        TypeError,
        where=argument,
        what=f"got {answer!r}, of type {type(answer).__name__}.",
        why="A storage value is compared, hashed and printed, so its arguments "
        "are not converted.",
        do=f"Pass {wanted}.",
    )


def refuse(argument: str, answer: object, *, why: str, do: str) -> ValueError:
    """Returns the error for a value of the right type that makes no sense.

    Args:
        argument: where the value was given, as in `Quantize(bits=...)`.
        answer: the value that was given.
        why: the reason, a sentence.
        do: the way out, a sentence.

    Returns:
        The error, for the caller to raise.
    """
    return refusal(
        ValueError,
        where=argument,
        what=f"got {answer!r}.",
        why=why,
        do=do,
    )


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
