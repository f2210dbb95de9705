"""Dynamo and the graphs that it makes.

Obsolete when a library can tell torch.compile in public what a region is.
"""

# pyright: reportPrivateUsage=false
import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch._higher_order_ops.wrap import dynamo_bypassing_wrapper

_torch: Any = torch
_eval_frame: Any = importlib.import_module("torch._C._dynamo.eval_frame")

_P = ParamSpec("_P")
_R = TypeVar("_R")

# `call_unseen(around, function, *args)` is `around(function)(*args)`. Dynamo traces only the
# function; AOTAutograd then runs `around` on Dynamo's graph of it. Obsolete when torch.compile
# has a public way for a library to wrap a part of a graph.
call_unseen: Callable[..., Any] = dynamo_bypassing_wrapper


def unseen_by_dynamo(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hides a function, and all that it calls, from torch.compile.

    `torch.compiler.disable` does so by a wrapper, and imports Dynamo at once, which takes a
    second. Obsolete when a package can ask Dynamo to leave it alone.
    """
    skip = _eval_frame._FrameAction.SKIP
    code = cast("types.FunctionType", function).__code__
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))
    return function


@contextlib.contextmanager
def dynamo_as_before() -> Generator[None]:
    """Has Dynamo forget, at the end, the code and the backends that it meets inside.

    Even in a trace, operators that take functions, such as `torch.cond`, are compiled. Of code
    that runs under modes of ours torch 2.13 remembers not to compile it, and a backend that
    is made there holds the trace. Obsolete when neither stays.
    """
    frames, eval_frame = _torch._dynamo.convert_frame, _torch._dynamo.eval_frame
    codes, frames.input_codes = frames.input_codes, frames.Tracker()
    known = {*eval_frame.cached_backends}
    try:
        yield
    finally:
        met, frames.input_codes = frames.input_codes.seen, codes
        for code in filter(None, [each() for each in met]):
            codes.add(code)
            eval_frame.reset_code(code)
        for key in eval_frame.cached_backends.keys() - known:
            del eval_frame.cached_backends[key]


@contextlib.contextmanager
def whole_graphs_in_parts() -> Generator[None]:
    """Inside, what is compiled with `fullgraph=True` may run without a graph.

    Dynamo leaves code alone that runs under a mode of ours, and then says that it found none.
    flex attention asks for such a graph. Obsolete when a mode may ask for that.
    """
    eval_frame = _torch._dynamo.eval_frame
    before = eval_frame.set_fullgraph_compiled_frame_count(0)
    try:
        yield
    finally:
        eval_frame.set_fullgraph_compiled_frame_count(before)


def end_graph(why: str) -> None:
    """Ends the graph that Dynamo makes; with `fullgraph=True` raises an error that says why.

    Obsolete when `torch.compiler` has a public name for it.
    """
    _torch._dynamo.graph_break(msg=why)


def cannot_follow(error: Exception) -> bool:
    """Whether an error says that Dynamo does not follow a function that an operator takes.

    By its name: to import its class is to import Dynamo. Obsolete when torch.cond takes branches
    outside of graphs without it.
    """
    return type(error).__name__ == "UncapturedHigherOrderOpError"


def constant_for_dynamo(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Has Dynamo call a function as it traces, and take the result for a constant.

    `torch.compiler.assume_constant_result` does so, and imports Dynamo at once.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


# An object that identifies the compilation of one frame, all attempts of it; or None. Obsolete
# when a backend may end the graph at a node.
compilation: Callable[[], object] = _torch._guards.CompileContext.try_get


def take_floats_for_constants() -> None:
    """Lets Dynamo take each float for a constant, and guard it, to the end of the frame.

    Otherwise a float that has changed between calls becomes an input, and the second subgraph
    that reads it fails. Obsolete when a float that two `torch.utils.checkpoint` regions read
    may change under torch.compile.
    """
    _torch._dynamo.comptime.comptime(_specialize_floats)


def _specialize_floats(context: Any) -> None:
    config: Any = _torch._dynamo.config
    if config.specialize_float:
        return
    config.specialize_float = True
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    undo = functools.partial(setattr, config, "specialize_float", False)
    translator.output.add_cleanup_hook(undo)


def trace_again() -> Exception:
    """An error by which a backend makes Dynamo trace the frame again from its beginning.

    It has two base classes: the code that calls the backend lets the one pass, and Dynamo forgets
    its earlier attempt because of the other. Obsolete when a backend may end the graph at a node.
    """
    exc: Any = _torch._dynamo.exc
    kinds = (exc.UnspecializeRestartAnalysis, exc.TensorifyScalarRestartAnalysis)
    return type("TraceAgain", kinds, {})()


def traced_as(
    other: Callable[..., Any],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function that users call so that Dynamo traces another one instead.

    Outside a graph, and where the other one ends the graph, it runs itself, hidden from Dynamo.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if torch.compiler.is_dynamo_compiling():
                return other(*args, **kwargs)
            return function(*args, **kwargs)

        return unseen_by_dynamo(run)

    return decorate
