"""Warns, once, of what a trace has read and no later call compares: it becomes a constant."""

from collections.abc import Iterator

from torch import nn

from remat import _captures
from remat._calls.advice import advise_once
from remat._calls.signature import CallSite
from remat._torch.modules import hooks_for_all

_RERUN = 'use engine="rerun", which reads it at each call'
_OUTSIDE = f"Read it outside, and pass what it says as an argument; or {_RERUN}."


def advise_of_untold(
    site: CallSite, survey: _captures.Survey, covered: _captures.Covered, where: str
) -> None:
    """Warns of each, by its name and line, and says what to do."""
    whole = [
        (
            f"{label} is read, and what it holds is not compared from call to call.",
            f"Pass what changes as an argument, a tensor or a number; or {_RERUN}.",
        )
        for label in covered.untold
    ]
    for what, do in [*whole, *_of_arguments(site, survey), *_of_hooks()]:
        advise_once(
            (_captures.code_key(site.function), what),
            where=where,
            what=what,
            why="A trace runs the code once, and keeps what it has read as constants.",
            do=do,
        )


def _of_arguments(
    site: CallSite, survey: _captures.Survey
) -> Iterator[tuple[str, str]]:
    """What the code asks of arguments and their stand-ins in a trace do not have."""
    for name, tensor in zip(site.tensor_names, site.signature.tensors, strict=True):
        for attribute in vars(tensor):
            line = survey.line_of(attribute)
            if line:
                yield (
                    f"{line} asks for `{attribute}`, which is set on `{name}`.",
                    _OUTSIDE,
                )
        line = survey.line_of("Parameter") if isinstance(tensor, nn.Parameter) else ""
        if line:
            what = f"{line} may ask whether `{name}` is a Parameter, and is told that it is not."
            yield what, _OUTSIDE


def _of_hooks() -> Iterator[tuple[str, str]]:
    for hook in hooks_for_all():
        code = getattr(hook, "__code__", None)
        if code is not None and not _captures.is_library_file(code.co_filename):
            name = f"`{hook.__qualname__}`"
            yield (
                f"{name}, a hook for all modules, runs in the trace alone.",
                "Register it on the modules that it is for: those are watched.",
            )
