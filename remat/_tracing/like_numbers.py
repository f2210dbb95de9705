"""Inside a trace with open sizes, sizes look like numbers to the user's code.

`isinstance(size, int)` is true, and `size > 4` is True or False. The text of a size is that
of its number, and an array of it holds its number; the trace then fixes the size. The
symbol's own text would be a wrong key, or a wrong result, without an error. Torch and this
package still meet symbols. Obsolete when torch's symbols behave so.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import torch

from remat._torch.attributes import attributes_as
from remat._torch.sizes import PLAIN, SYMBOLIC, number
from remat._torch.tracer import one_trace_at_a_time

# The shape environments whose symbols look like numbers.
_answering: list[Any] = []
_INTERNAL = {"torch", "functorch", "sympy", "mpmath", "remat"}
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")

_REPR: dict[type[Any], Any] = {k: k.__repr__ for k in SYMBOLIC}


@contextlib.contextmanager
def like_numbers(env: Any) -> Generator[None]:
    """Inside, the symbols of a shape environment look like numbers to the user's code."""
    with one_trace_at_a_time(), contextlib.ExitStack() as undo:
        for kind in () if _answering else SYMBOLIC:
            methods = {**_METHODS}
            for name in _COMPARISONS if kind is not torch.SymBool else ():
                if name in vars(kind):
                    methods[name] = _comparing(vars(kind)[name])
            undo.enter_context(attributes_as(kind, **methods))
        undo.callback(_answering.remove, env)
        _answering.append(env)
        yield


def _text_like_number(symbol: Any) -> str:
    if not _is_users(symbol):
        return _REPR[type(symbol)](symbol)
    caller: FrameType | None = getattr(inspect.currentframe(), "f_back", None)
    if caller is not None and caller.f_globals.get("__name__") == "json.encoder":
        # It asks because a symbol is no number to it: `default=str` would write "4".
        raise TypeError("json writes a size as an object of another class")
    return repr(number(symbol))


def _comparing(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A comparison that gives the user's code True or False, which the trace then assumes."""

    def compared(symbol: Any, other: Any) -> Any:
        answer = compare(symbol, other)
        return number(answer) if _is_users(symbol) else answer

    return compared


def _array_like_number(symbol: Any, *args: Any, **kwargs: Any) -> Any:
    """The array that numpy asks for; otherwise it would make an array of objects."""
    numpy: Any = importlib.import_module("numpy")
    return numpy.asarray(number(symbol), *args, **kwargs)


def _format_like_number(symbol: Any, how: str) -> str:
    if _is_users(symbol):
        return format(number(symbol), how)
    return object.__format__(symbol, how)


def _attribute_like_number(symbol: Any, name: str) -> Any:
    # `isinstance` looks at the type first, then at `__class__`.
    if name == "__class__" and _is_users(symbol):
        return PLAIN[type(symbol)]
    return object.__getattribute__(symbol, name)


_METHODS: dict[str, Callable[..., Any]] = {
    "__repr__": _text_like_number,
    "__format__": _format_like_number,
    "__getattribute__": _attribute_like_number,
    "__array__": _array_like_number,
}


def _is_users(symbol: Any) -> bool:
    """Whether a symbol must look like a number: the user's code asks, and not a library."""
    env = getattr(symbol.node, "shape_env", None)
    if not any(each is env for each in _answering):
        return False
    frame, package = inspect.currentframe(), ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if module != __name__ and package not in sys.stdlib_module_names:
            break
        frame = frame.f_back
    return package not in _INTERNAL
