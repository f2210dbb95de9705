"""Lines of the user's code: behind a value, a warning, or an error of tracing."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import fx

from remat._errors import (
    CapturedTensorError,
    MutationError,
    RematWarning,
    TraceError,
    explain,
    refusal,
)

_TORCHS_CHECKPOINT = torch.__path__[0] + "/utils/checkpoint.py"
_TORCHS_DISTRIBUTIONS = torch.__path__[0] + "/distributions/"
_TORCHS_MODULES = torch.__path__[0] + "/nn/"
_LIBRARIES = (
    torch.__path__[0],
    __file__.rpartition("/")[0] + "/",
    contextlib.__file__,
    "<",
)
# What is typed at a prompt or written in a docstring; other such names are of generated code.
_TYPED = ("<stdin>", "<python-input-", "<ipython-input-", "<doctest ")


# The line behind the step of a graph that is running.
_of_step: ContextVar[str] = ContextVar("_of_step", default="")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def user_line() -> str:
    """The innermost "file.py:line" outside torch and of this package."""
    if _of_step.get():
        return _of_step.get()
    frame, _ = _user_frame()
    if frame is None:
        return ""
    return _shown(frame.f_code.co_filename, frame.f_lineno)


def with_lines(module: fx.GraphModule) -> Callable[..., Any]:
    """What runs a graph of Dynamo so that `user_line` finds the lines that Dynamo noted."""
    return _WithLines(module).run


class _WithLines(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # or it would write into the text of errors

    def run_node(self, n: fx.Node) -> Any:
        frames: list[tuple[str, str]] = _FRAME.findall(n.stack_trace or "")
        lines = [_shown(*frame) for frame in frames if _is_users(frame[0])]
        token = _of_step.set(lines[-1] if lines else "")
        try:
            return super().run_node(n)
        finally:
            _of_step.reset(token)


def _shown(filename: str, line: int | str) -> str:
    return f"{filename.rpartition('/')[2]}:{line}"


def _is_users(filename: str) -> bool:
    return not _is_library(filename) and "/einops/" not in filename


def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARIES) and not filename.startswith(_TYPED)


def warn(
    *,
    where: str,
    what: str,
    why: str,
    do: str,
    category: type[Warning] = RematWarning,
) -> None:
    """Warns at the user's line, however deep in this package the reason is found."""
    _, num_calls = _user_frame()
    text = explain(where=where, what=what, why=why, do=do)
    warnings.warn(text, category, stacklevel=num_calls + 1)


def _user_frame() -> tuple[FrameType | None, int]:
    """The innermost frame of the user's code, and how many calls it is above the caller."""
    own = inspect.currentframe()
    frame, num_calls = own and own.f_back, 0
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            break
        frame, num_calls = frame.f_back, num_calls + 1
    return frame, num_calls


def mutates(line: str) -> MutationError:
    """The error for an in-place change, on this line, of a differentiated argument."""
    return refusal(
        MutationError,
        where=line or "the function",
        what="an argument that is to be differentiated is changed in place.",
        why="The recomputation would start from the changed value, and the "
        "tensor belongs to the caller.",
        do="Write x = x + 1 instead of x += 1, or x = x.clone() first.",
    )


def untraceable(error: Exception) -> TraceError:
    """The error for a trace that needs the values of a tensor."""
    checks = any(name.startswith(_TORCHS_DISTRIBUTIONS) for name, _ in _frames(error))
    instead = "validate_args=False for the distribution" if checks else "torch.where"
    return refusal(
        TraceError,
        where=line_of(error) or "the function",
        what=f"the function cannot be traced ({str(error).splitlines()[0]}).",
        why="A trace sees shapes and types, not values: it cannot branch on a "
        "tensor's values, call .item(), or run a kernel that hides its work.",
        do=f'Use {instead}, or engine="rerun", which runs the function again in '
        "the backward.",
    )


def checkpointed_by_torch(error: Exception) -> TraceError | None:
    """The error for torch's own checkpoint inside a trace; None if that is not the cause."""
    if not any(name == _TORCHS_CHECKPOINT for name, _ in _frames(error)):
        return None
    return refusal(
        TraceError,
        where=line_of(error) or "the function",
        what="the function calls torch.utils.checkpoint, which cannot be traced here.",
        why="Its backward runs the Python function again, on the real tensors "
        "instead of those of the trace.",
        do="Remove it (for a model of transformers, by "
        "model.gradient_checkpointing_disable()), because the region recomputes "
        "anyway; or import checkpoint from remat.interop.torch, which makes a "
        "region inside the region.",
    )


def freed(error: Exception) -> TraceError:
    """The error for a backward inside the function that frees the graph of its forward."""
    return refusal(
        TraceError,
        where=line_of(error) or "the function",
        what="an autograd.Function differentiates a graph that its forward has kept.",
        why="A trace runs the backward for several layouts of cotangents, and the first "
        "run frees that graph.",
        do='Pass retain_graph=True there, or use engine="rerun", which runs the '
        "function again in the backward.",
    )


def reached_in_backward(error: Exception) -> CapturedTensorError:
    """What is raised where a backward of the user's reaches a tensor past the trace."""
    return refusal(
        CapturedTensorError,
        where=line_of(error) or "the function",
        what="the backward of an autograd.Function uses a tensor that its "
        "forward did not save.",
        why="It would be stale, or lose its gradient, at the next call.",
        do="Pass it to the forward, and save it with ctx.save_for_backward.",
    )


def higher_order(error: Exception) -> TraceError:
    """The error for an operator of torch that takes functions, such as `torch.cond`."""
    return refusal(
        TraceError,
        where=line_of(error) or "the function",
        what="an operator that takes functions, such as torch.cond or flex_attention, "
        "cannot be traced.",
        why="A region decides what to save value by value, and cannot look into "
        "the functions of an operator.",
        do="Use torch.where for a branch, call the operator between two regions, or use "
        'engine="rerun".',
    )


def line_of(error: Exception) -> str:
    """The innermost "file.py:line" outside torch and of this package that raised.

    Where none is, as in a region that is a module of torch's, that in `torch.nn`.
    """
    frames = [*_frames(error)]
    users = [frame for frame in frames if not _is_library(frame[0])]
    found = users or [frame for frame in frames if frame[0].startswith(_TORCHS_MODULES)]
    return _shown(*found[-1]) if found else ""


def _frames(error: Exception) -> Iterator[tuple[str, int]]:
    """The files and lines that an error came through, the outermost first."""
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame.f_code.co_filename, step.tb_lineno
        step = step.tb_next
