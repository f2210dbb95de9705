"""Lines of the user's code: behind a value, a warning, or an error."""

import contextlib
import copy
import inspect
import re
import threading
import traceback
import warnings
from collections.abc import Hashable
from concurrent import futures
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import fx

from remat._errors import RematWarning, explain

# With the slash, or torch_geometric's would be among them.
_TORCH_FILES = torch.__path__[0] + "/"
_TORCHS_MODULES = _TORCH_FILES + "nn/"
_OWN_FILES = __file__.rpartition("/")[0] + "/"
_LIBRARIES = (
    *(_TORCH_FILES, _OWN_FILES, futures.__path__[0] + "/", "<"),
    *(contextlib.__file__, copy.__file__, threading.__file__),
)
# What is typed at a prompt or written in a docstring; other such names are of generated code.
_TYPED = ("<stdin>", "<python-input-", "<ipython-input-", "<doctest ")

# The line behind the step of a graph that is running.
_of_step: ContextVar[str] = ContextVar("_of_step", default="")
_said: set[Hashable] = set()
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def user_line() -> str:
    """The innermost "file.py:line" outside torch and of this package."""
    if _of_step.get():
        return _of_step.get()
    frame, _ = _user_frame()
    if frame is None:
        return ""
    return _shown_line(frame.f_code.co_filename, frame.f_lineno)


class WithLines(fx.Interpreter):
    """Runs a graph of Dynamo so that `user_line` finds the lines that Dynamo noted."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # or it would write into the text of errors

    def run_node(self, n: fx.Node) -> Any:
        frames: list[tuple[str, str]] = _FRAME.findall(n.stack_trace or "")
        lines = [_shown_line(*frame) for frame in frames if _is_users_file(frame[0])]
        token = _of_step.set(lines[-1] if lines else "")
        try:
            return super().run_node(n)
        finally:
            _of_step.reset(token)


def _shown_line(filename: str, line: int | str) -> str:
    return f"{filename.rpartition('/')[2]}:{line}"


def _is_users_file(filename: str) -> bool:
    return not _hides_its_lines(filename) and "/einops/" not in filename


def _hides_its_lines(filename: str) -> bool:
    return filename.startswith(_LIBRARIES) and not filename.startswith(_TYPED)


def warn(
    *, where: str, what: str, why: str, do: str, category: type[Warning] = RematWarning
) -> None:
    """Warns at the user's line, however deep in this package the reason is found."""
    _, num_calls = _user_frame()
    text = explain(where=where, what=what, why=why, do=do)
    warnings.warn(text, category, stacklevel=num_calls + 1)


def warn_once(key: Hashable, *, where: str, what: str, why: str, do: str) -> None:
    """Warns, unless it has done so for an equal key: of what, and of which matter."""
    if key not in _said:
        _said.add(key)
        warn(where=where, what=what, why=why, do=do)


def _user_frame() -> tuple[FrameType | None, int]:
    """The innermost frame of the user's code, and how many calls it is above the caller."""
    # A local name for this function's own frame would be a cycle, and hold its caller.
    frame: FrameType | None = getattr(inspect.currentframe(), "f_back", None)
    num_calls = 0
    while frame is not None and not _is_users_file(frame.f_code.co_filename):
        frame, num_calls = frame.f_back, num_calls + 1
    return frame, num_calls


def is_called_by_torch() -> bool:
    """Whether torch's own Python code has called what this package has come between."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH_FILES)


def _asking_frame() -> FrameType | None:
    """What called the function that `__torch_function__` was called for."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    return frame and frame.f_back


def is_asked_by_package() -> bool:
    """Whether `__torch_function__` was called for this package's code, be it through torch's."""
    asked = _asking_frame()
    while asked is not None and asked.f_code.co_filename.startswith(_TORCH_FILES):
        asked = asked.f_back
    return asked is not None and asked.f_code.co_filename.startswith(_OWN_FILES)


def is_asked_by_user() -> bool:
    """Whether what `__torch_function__` was called for stands in code that is the user's."""
    asked = _asking_frame()
    return asked is not None and _is_users_file(asked.f_code.co_filename)


def line_of(error: Exception) -> str:
    """The innermost "file.py:line" outside torch and of this package that raised.

    Where none is, as in a region that is a module of torch's, that in `torch.nn`.
    """
    frames = _frames_of_error(error)
    users = [frame for frame in frames if not _hides_its_lines(frame[0])]
    found = users or [frame for frame in frames if frame[0].startswith(_TORCHS_MODULES)]
    return _shown_line(*found[-1]) if found else ""


def line_that_goes_on(error: Exception) -> str:
    """Where the function is, or was at its end, that caught an error; "" if that is lost."""
    trace = error.__traceback__
    if trace is None or _hides_its_lines(trace.tb_frame.f_code.co_filename):
        return ""
    return _shown_line(trace.tb_frame.f_code.co_filename, trace.tb_frame.f_lineno)


def came_through(error: Exception, path: str | tuple[str, ...]) -> bool:
    """Whether an error came through a file whose path begins so, or in one of these ways."""
    return any(name.startswith(path) for name, _ in _frames_of_error(error))


def _frames_of_error(error: Exception) -> list[tuple[str, int]]:
    """The files and lines that an error came through, the outermost first."""
    steps = traceback.walk_tb(error.__traceback__)
    return [(frame.f_code.co_filename, line) for frame, line in steps]
