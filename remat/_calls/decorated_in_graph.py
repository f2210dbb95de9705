"""`remat` called inside of what torch.compile traces.

Dynamo follows options to where they were made, and has no whole value for those that are
made in there. What it traces here finds a kind of regions by such options; what makes a
region outside of the graph is handed in.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch.compiler import is_dynamo_compiling

from remat._calls import torch_compile
from remat._calls.decorated import is_of_module, kind_of
from remat._calls.options import Settings, settings_of
from remat._errors import RematError, explain
from remat._torch import dynamo


@dynamo.unseen_by_dynamo
def with_options(
    remat: Callable[..., Any], options: dict[str, Any], fun: Any
) -> Callable[..., Any]:
    """What `remat` makes of a function inside of a graph of torch.compile."""
    if isinstance(options["saved_inputs"], Mapping):
        dynamo.end_graph(_MADE_OUTSIDE)
    why = _why_made_outside(**options)
    if why:
        dynamo.end_graph(why)
    kind = _graph_kind(is_of_module(fun), **options)
    return _made_in_graph(kind, functools.partial(remat, **options), fun)


def with_settings(
    decorate: Callable[..., Any], settings: Settings, fun: Any
) -> Callable[..., Any]:
    """What `remat(...)`, called outside of the graph, makes of a function in there."""
    kind = _graph_kind(is_of_module(fun), settings)
    return _made_in_graph(kind, functools.partial(decorate, settings=settings), fun)


def _made_in_graph(kind: str, make: Callable[..., Any], fun: Any) -> Callable[..., Any]:
    """A function in a graph as a region of a kind; `make` makes it outside of the graph."""
    if not callable(fun) or isinstance(fun, type):
        dynamo.end_graph(_MADE_OUTSIDE)
    return functools.partial(_call_decorated_in_graph, kind, make, fun)


@dynamo.unseen_by_dynamo
def _call_decorated_in_graph(
    kind: str,
    make: Callable[..., Any],
    fun: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if is_dynamo_compiling():
        return torch_compile.call(kind, fun, args, kwargs)
    return make(fun)(*args, **kwargs)


@dynamo.constant_for_dynamo
def _why_made_outside(**options: Any) -> str:
    """Why a graph ends in front of a call of `remat`, if it does; else empty."""
    if not all(map(_has_its_attributes, options.values())):
        return _MADE_OUTSIDE
    try:
        settings_of(**options)
    except (RematError, TypeError, ValueError) as error:
        return str(error)  # which is raised outside of the graph
    return ""


def _has_its_attributes(value: object) -> bool:
    """Whether an object has its attributes, which one that Dynamo makes has not yet.

    Obsolete when a constant function of Dynamo's refuses what is not a constant.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(hasattr(value, field.name) for field in dataclasses.fields(value))
    sets_some = type(value).__init__ is not object.__init__
    return not sets_some or getattr(value, "__dict__", None) != {}


@dynamo.constant_for_dynamo
def _graph_kind(
    is_of_module: bool, settings: Settings | None = None, **options: Any
) -> str:
    settings = settings or settings_of(**options)
    rng = settings.rng or ("preserve" if is_of_module else "keys")
    return kind_of(dataclasses.replace(settings, rng=rng), "remat(...)")


_MADE_OUTSIDE = explain(
    where="remat(...)",
    what="is called under torch.compile with an option that is made there, or with "
    "what is not a function.",
    why="Python objects that a compiled function makes do not exist yet when it is "
    "compiled.",
    do="Make policies and storages, or the region itself, outside the compiled "
    "function; or compile without fullgraph=True: the region then runs between two "
    "graphs.",
)
