"""A region as a part of a graph of torch.compile.

Dynamo, torch.compile's first half, traces the region's function like any other code. It
guards the Python state that the function reads, and makes each tensor that it reaches an
argument. Around the resulting graph it leaves an opaque call. AOTAutograd, the second half,
makes that call when it records forward and backward. The region is then a region around
Dynamo's graph: it is traced and cut as usual, and its programs are recorded, both under
plain autograd and inside torch.func transforms.

A region that cannot be recorded in this way stays out: the graph ends before its call. Of
some kinds this is known in advance. For the others it turns out when the call is recorded;
Dynamo then traces the frame again, with that knowledge.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, fx

from remat._calls.entry import Entry
from remat._errors import RematError
from remat._switches.blocks import is_disabled
from remat._torch import dynamo, levels, sizes
from remat._user_lines import WithLines

_Regions = weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]]
_Around = Callable[[Callable[..., Any]], Callable[..., Any]]


@final
@dataclasses.dataclass(frozen=True)
class _Kind:
    """Regions that are handled alike."""

    where: str  # what messages call them
    around: _Around  # makes one around a function
    why_apart: str  # why none of them can be in a graph; empty if some can
    #: Those around Dynamo's graphs, and functions that none holds.
    known: _Regions = dataclasses.field(default_factory=_Regions)


# By a string, which Dynamo guards by its value: equal layers share a graph.
_kinds: dict[str, _Kind] = {}
# Why a region stays apart in the frame that is being compiled, by name.
_apart_here = weakref.WeakKeyDictionary[object, dict[str, str]]()


class _NotRecordable(RematError):
    """A region that cannot be part of a graph, though it runs outside one."""


def register(key: str, where: str, around: _Around, why_apart: str) -> None:
    """Makes a kind of region known to graphs; `why_apart`: why it can be in none."""
    _kinds.setdefault(key, _Kind(where, around, why_apart))


def _why_apart(key: str, name: str) -> str:
    """Why a region ends the graph in front of it, if it does; else empty."""
    here: Any = _apart_here.get(dynamo.compilation(), {})
    return _kinds[key].why_apart or here.get(name, "")


dynamo.constant_for_dynamo(_why_apart)


def call(
    key: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    part: str = "",
) -> Any:
    """What Dynamo traces where a region of a kind, around a function, is called.

    `part` tells apart those of its kind that may stay apart by themselves.
    """
    # Dynamo cannot trace a question about inference mode, but grad mode is off there too.
    if is_disabled() or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    name = key + part
    why = _why_apart(key, name)
    if why:
        dynamo.end_graph(why)
    dynamo.take_floats_for_constants()
    recorded = functools.partial(_recorded, key, name)
    return dynamo.call_unseen(recorded, function, *args, **kwargs)


def _recorded(key: str, name: str, module: Callable[..., Any]) -> Callable[..., Any]:
    """The region around a graph of Dynamo's, for AOTAutograd to record.

    A backend without AOTAutograd calls it as it runs. Where a graph ends inside the function
    (`nested_graph_breaks`), it comes here as it is, and runs outside of any graph.
    """
    kind = _kinds[key]
    region = kind.known.get(module)
    is_graph = isinstance(module, fx.GraphModule)
    if region is None:
        around = _at_level(module) if is_graph else module
        region = kind.known[module] = kind.around(around)
    if not is_graph:
        return region

    def run(*args: Any) -> Any:
        compilation = dynamo.compilation()
        try:
            with levels.dual_level_told():
                return region(*[_with_fixed_sizes(kind.where, arg) for arg in args])
        except RematError as error:
            if compilation is None:
                raise
            _apart_here.setdefault(compilation, {})[name] = str(error)
            raise dynamo.trace_again() from error

    return run


def _at_level(module: fx.GraphModule) -> Callable[..., Any]:
    return lambda *args: WithLines(levels.at_current_level(module)).run(*args)


def _with_fixed_sizes(where: str, argument: Any) -> Any:
    """The argument with sizes that are numbers: the graph then holds for these alone."""
    if not isinstance(argument, Tensor):
        return _size_in_graph(where, argument)
    for layer in levels.layers(argument):
        for size in layer.shape:
            _size_in_graph(where, size)
    return sizes.settled(argument)


def _size_in_graph(where: str, symbol: Any) -> Any:
    why = sizes.why_open(symbol)
    if why:
        raise _not_recordable(
            where,
            f"depends on {why}.",
            "A graph with a region is specialized to its sizes; other sizes compile another "
            "graph.",
            "Remove the mark, or use torch._dynamo.maybe_mark_dynamic; or compile",
        )
    return sizes.number(symbol)


def require_recordable(entry: Entry, where: str) -> None:
    """Refuses a trace whose region draws from a tracker, or stores values, as no graph can."""
    if entry.streams:
        raise _not_recordable(
            where,
            f"draws from the state {min(entry.streams)!r} of a registered tracker.",
            "A compiled graph draws only from torch's own generators.",
            "Draw from keys (remat.random), or compile",
        )
    storages = [*entry.region.inputs.values(), *entry.stages.storages]
    others = [each for each in storages if not each.keeps]
    if others:
        raise _not_recordable(
            where,
            f"stores values in {others[0]!r}.",
            "A compiled graph cannot contain what a storage does between forward and backward.",
            "Compile",
        )


def _not_recordable(where: str, does: str, why: str, do: str) -> _NotRecordable:
    """The error of a region that does what a graph cannot hold."""
    return _NotRecordable.of(
        where=where,
        what=f"is called under torch.compile, and {does}",
        why=why,
        do=f"{do} without fullgraph=True: the region then runs between two graphs.",
    )
