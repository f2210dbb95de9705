"""A function that runs or is traced once more: what it raises only then, and what it uses up."""

from collections.abc import Callable, Mapping
from typing import Any

from remat._errors import RecomputationError, RematError, StaticArgumentError
from remat._user_lines import line_of

#: What torch raises in a trace, and inside of a function for which a transform has no rule.
OF_TORCH = (RuntimeError, AssertionError, NotImplementedError, TypeError)


def call_once_more(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Calls a function that has returned before; what it raises by itself is due to a change."""
    try:
        return function(*args, **kwargs)
    except (RematError, Warning, *OF_TORCH):
        raise
    except Exception as error:
        first = str(error).partition("\n")[0].rstrip(". ")
        raise RecomputationError.of(
            where=line_of(error) or "the function",
            what=f"the function raises for a derivative ({type(error).__name__}: {first}), "
            "and did not in the forward.",
            why="It runs once more for that, and reads what has changed since: an iterator that "
            "is used up, or state that hides from remat, as in a library's closure.",
            do="Pass what it reads as an argument, or change that after the backward.",
        ) from error


def advances(which: str, by: str) -> StaticArgumentError:
    """The error for an iterator that the function takes from, and would take other things next."""
    return StaticArgumentError.of(
        where=which,
        what=f"is an iterator, and was advanced by {by}.",
        why="The function runs once more, and would get what comes after.",
        do="Pass what it yields as an argument, or keep it in a tuple, a list or a dict.",
    )
