"""Errors that only a trace raises, and the user's code catches: on numbers it goes another way."""

import contextlib
import dataclasses
from collections.abc import Generator
from types import TracebackType
from typing import final

from remat._errors import RematError
from remat._tracing import refusals
from remat._user_lines import line_that_goes_on, user_line


@final
@dataclasses.dataclass(slots=True)
class _Noted:
    error: Exception
    line: str  # that raised
    goes_on: str = ""  # the line at which the function went on
    #: How far the error had come at that line: a `finally` may run operators on its way.
    came: TracebackType | None = None


@final
class Raised:
    """What torch functions of the user raise in a trace, on whatever thread."""

    def __init__(self) -> None:
        self._noted: list[_Noted] = []

    def note(self, error: Exception) -> None:
        """Notes an error that is about to reach the user's code."""
        self._noted.append(_Noted(error, user_line()))

    def refuse_elsewhere(self) -> None:
        """Refuses an operator on a thread that no trace follows."""
        error = refusals.on_another_thread()
        self.note(error)
        raise error

    def goes_on(self) -> None:
        """Notes where the function is, if it has just caught the last of them."""
        last = self._noted[-1] if self._noted else None
        if last is not None and last.error.__traceback__ is not last.came:
            last.came = last.error.__traceback__
            last.goes_on = line_that_goes_on(last.error)

    @contextlib.contextmanager
    def refused_if_caught(self) -> Generator[None]:
        """Refuses a function that catches what only a trace raises."""
        try:
            yield
        except Exception as error:
            is_known = any(error is each.error for each in self._noted)
            if not isinstance(error, RematError) and not is_known:
                self._require_none_of_ours()
            raise
        self._require_none_of_ours()
        self._noted.clear()

    def _require_none_of_ours(self) -> None:
        self.goes_on()
        for each in self._noted:
            found = each.error
            if not isinstance(found, RematError):
                found = refusals.of_the_users(
                    each.error, is_backward=False, where=each.line
                )
            if found is not None:
                raise refusals.caught(found, each.goes_on) from each.error
