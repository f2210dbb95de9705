"""The errors and the warning that this package raises.

Each message has four parts, in this order: where (value, shape, dtype, the user's
file:line), what happened, why that is refused, and what to do. `explain` joins them, so
that no message loses one; `RematError.of`, and `refusal` for Python's own errors, makes an
error of them. Each class also derives from the built-in exception that a caller would catch
without knowing this package.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Self, SupportsFloat, TypeVar

import torch
from torch import Tensor

_MOST_SHOWN = 200
_E = TypeVar("_E", bound=Exception)


class RematError(Exception):
    """The root of every error that this package raises on purpose."""

    @classmethod
    def of(cls, *, where: str, what: str, why: str, do: str) -> Self:
        """The error with the four parts of its message."""
        return cls(explain(where=where, what=what, why=why, do=do))


class TraceError(RematError, RuntimeError):
    """A function could not be traced to a graph."""


class CapturedTensorError(RematError, RuntimeError):
    """A function reaches a tensor in a way that cannot be followed at the next call."""


class ImplicitRandomnessError(RematError, RuntimeError):
    """A function draws from a generator although its randomness must come from keys."""


class PolicyError(RematError, TypeError):
    """A policy gave an invalid answer, or policies were combined in an invalid way."""


class StaticArgumentError(RematError, TypeError):
    """An argument can be neither traced nor compared from call to call."""


class MutationError(RematError, RuntimeError):
    """A function changes a differentiable argument in place."""


class SideEffectError(RematError, RuntimeError):
    """A function changed state outside itself while it was traced."""


class SavedTensorModifiedError(RematError, RuntimeError):
    """A tensor that the backward needs was changed in place before it ran."""


class SecondDerivativeError(RematError, RuntimeError):
    """A gradient that was taken under `first_order()` is differentiated again."""


class RecomputationError(RematError, RuntimeError):
    """A recomputed value differs from the one that the forward computed."""


class BudgetError(RematError, ValueError):
    """No choice of saved values fits the budget."""


class ScheduleError(RematError, ValueError):
    """A schedule cannot be carried out: an argument or an action is not valid."""


class CarryError(RematError, TypeError):
    """The carry of a scan, or its `xs`, has a wrong structure, shape or dtype."""


class TileError(RematError, ValueError):
    """A function cannot run tile by tile as its pattern says."""


class NotReplicatedError(RematError, RuntimeError):
    """Ranks that should hold the same value hold different ones."""


class KeyReuseError(RematError, ValueError):
    """A random key was consumed twice."""


class RematWarning(UserWarning):
    """Something that was requested has no effect, or not the intended one."""


def explain(*, where: str, what: str, why: str, do: str) -> str:
    """Joins the four parts of a message, each a phrase or a sentence, into one text."""
    return f"{where}: {what} {why} {do}"


def refusal(
    kind: Callable[[str], _E], *, where: str, what: str, why: str, do: str
) -> _E:
    """An error of a kind, with the four parts of its message."""
    return kind(explain(where=where, what=what, why=why, do=do))


def show_type(dtype: torch.dtype | str, shape: Iterable[int]) -> str:
    """What a tensor holds, as messages and reports show it: "float32[8, 16]"."""
    return f"{str(dtype).removeprefix('torch.')}{[*shape]}"


def shown(answer: object) -> str:
    """What was passed, as a message shows it: a tensor without its numbers, nothing at length."""
    if isinstance(answer, Tensor):
        return f"a tensor {show_type(answer.dtype, answer.shape)}"
    text = f"the class {answer.__name__}" if isinstance(answer, type) else repr(answer)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def require_choice(
    name: str, value: object, choices: tuple[object, ...], of: str = "remat"
) -> None:
    """Refuses a value that an option cannot have."""
    # An array has no truth by which it could be looked for.
    if getattr(value, "ndim", 0) or value not in choices:
        listed = ", ".join(map(repr, choices))
        raise refusal(
            ValueError,
            where=f"{of}({name}={shown(value)})",
            what="is not a value of this option.",
            why=f"It can be {listed}.",
            do="Choose one of these.",
        )


def require_type(
    argument: str, answer: object, expected: type | tuple[type, ...], *, wanted: str
) -> None:
    """Raises TypeError unless `answer` is of the expected type; a bool is not an int.

    The argument is named as in `Quantize(bits=...)`; `wanted` says what to pass instead.
    """
    is_stray_bool = isinstance(answer, bool) and expected is int
    if isinstance(answer, expected) and not is_stray_bool:
        return
    why = "Arguments are not converted: options are compared, hashed and printed."
    do = f"Pass {wanted}."
    if isinstance(answer, type) and issubclass(answer, expected):
        why = "It is the class, not a value of it."
        do = f"Call it: `{answer.__name__}(...)`."
    what = f"got {shown(answer)}, of type {type(answer).__name__}."
    raise refusal(TypeError, where=argument, what=what, why=why, do=do)


def refuse(argument: str, answer: object, *, why: str, do: str) -> ValueError:
    """The error for an argument of the right type, whose value makes no sense."""
    what = f"got {shown(answer)}."
    return refusal(ValueError, where=argument, what=what, why=why, do=do)


def require_hash(argument: str, answer: object) -> None:
    """Raises TypeError unless `answer` can be hashed."""
    try:
        hash(answer)
    except TypeError as error:
        raise refusal(
            TypeError,
            where=argument,
            what=f"got {shown(answer)}, which cannot be hashed.",
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


def require_number(argument: str, answer: object) -> None:
    """Raises TypeError unless `answer` is one number: of Python, numpy or a 0-d tensor."""
    if isinstance(answer, (int, float)):
        return
    is_one = isinstance(answer, SupportsFloat) and not isinstance(answer, type)
    if not is_one or getattr(answer, "shape", ()):
        require_type(argument, answer, float, wanted="a number")


def takes(function: Callable[..., object], count: int) -> bool:
    """Whether a function can be called with so many arguments by position, if that can be told."""
    try:
        signature = inspect.signature(function)
    except (NameError, TypeError, ValueError):  # no signature, or none before it is run
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def require_callable(argument: str, answer: object) -> None:
    """Raises TypeError unless `answer` can be called."""
    if not callable(answer):
        raise refusal(
            TypeError,
            where=argument,
            what=f"got {shown(answer)}, of type {type(answer).__name__}.",
            why="It is what is called, with the arguments that are passed apart.",
            do="Pass a function or a module, not what it returns.",
        )
