"""Which functions may share a trace."""

import functools
import types
import weakref
from collections.abc import Hashable
from typing import cast

from torch import nn

from remat._captures.places import is_simple


def code_key(fun: object) -> Hashable:
    """What functions that may share a trace have in common.

    Values in defaults and cells are not part of it: they are checked at each call.
    """
    if isinstance(fun, types.FunctionType):
        # A weak reference keeps its hash and is one object per code, where hashing the
        # code itself goes over all its instructions each time.
        return weakref.ref(fun.__code__)
    if isinstance(fun, types.MethodType):
        return "method", code_key(fun.__func__), type(fun.__self__)
    if isinstance(fun, functools.partial):
        made = cast("functools.partial[object]", fun)
        # Their traces could be told apart by a look at each; so the look is at few.
        filled = tuple(code_key(each) if callable(each) else "" for each in made.args)
        return "partial", code_key(made.func), filled, tuple(made.keywords)
    if isinstance(fun, nn.Module):
        return "module", type(fun)
    if is_simple(fun):
        return fun
    if isinstance(fun, types.BuiltinFunctionType):
        return "method", fun.__name__, type(fun.__self__)
    kind = type(fun)
    return "object", kind, code_key(getattr(kind, "__call__", None))  # noqa: B004
