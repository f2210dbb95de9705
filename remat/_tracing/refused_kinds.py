"""The errors of tensors whose class or layout a trace has no stand-in for."""

from typing import Any

from torch import Tensor

from remat._errors import TraceError
from remat._user_lines import user_line

#: The remedy of most refusals.
RERUN = 'engine="rerun", which runs the function again in the backward'


def overriding(kind: type[Tensor]) -> TraceError:
    return TraceError.of(
        where=f"a tensor of the class {kind.__qualname__}",
        what="has a `__torch_function__` of its own, and cannot be traced.",
        why="It would run with the region's programs, in the forward and again in "
        "the backward, but not in the trace that they are made from.",
        do=f"Pass `x.as_subclass(torch.Tensor)`, or use {RERUN}.",
    )


def becomes(kind: type[Tensor]) -> TraceError:
    return TraceError.of(
        where=f"`as_subclass({kind.__name__})` at {user_line()}",
        what="makes a tensor of a subclass.",
        why="A trace runs on tensors of a class of its own.",
        do=f"Leave it out, or use {RERUN}.",
    )


def unknown_parts(func: Any) -> TraceError:
    return TraceError.of(
        where=f"`.{func.__name__}()` of a sparse tensor at {user_line()}",
        what="asks how much the tensor holds.",
        why="That depends on numbers, and a trace has none.",
        do=f"Use torch.nonzero_static, which fixes how much; or {RERUN}.",
    )
