"""Sizes that are symbols of a trace.

Obsolete when torch.export's shape environment is public.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._torch.frames import caller


def shape_env_of(numbers: Iterable[int]) -> Any:
    """The shape environment of the first symbol among some numbers, None without one."""
    for number in numbers:
        if isinstance(number, torch.SymInt):
            return node_of(number).shape_env
    return None


#: The numbers of a trace that depend on open sizes.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class OpenSizes:
    """The symbols for sizes and strides in one trace, and the conditions that it assumed.

    Sizes that happen to be equal do not share a symbol. 0 and 1 are constants, as
    everywhere in torch. Obsolete when torch.export's shape environment is public.

    Attributes:
        env: torch's shape environment.
        given: for each size and stride that was opened, in order, the Python text of what
            stands for it: a symbol, a product of symbols, or a constant.
    """

    def __init__(self) -> None:
        symbolic: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        printers: Any = importlib.import_module("torch.utils._sympy.printers")
        self._torch = symbolic
        self._text: Callable[[Any], str] = printers.PythonPrinter().doprint
        self._symbols: list[Any] = []
        self._ranks: list[int] = []
        self.given: list[str] = []
        self.env: Any = _shape_env()(
            allow_scalar_outputs=False,
            allow_dynamic_output_shape_ops=False,
            assume_static_by_default=False,
            duck_shape=False,
        )

    def open(
        self, shape: Sequence[int], stride: Sequence[int], fixed: Sequence[bool]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides of one tensor as symbols, those of `fixed` dimensions aside."""
        dynamic = self._torch.DimDynamic
        context = self._torch.StatelessSymbolicContext(
            dynamic_sizes=[
                dynamic.STATIC if each else dynamic.DYNAMIC for each in fixed
            ]
        )
        sources: Any = importlib.import_module("torch._dynamo.source")
        like = torch.empty_strided(
            [hint(size) for size in shape],
            [hint(step) for step in stride],
            device="meta",
        )
        sizes, strides, _ = self.env.create_symbolic_sizes_strides_storage_offset(
            like,
            sources.ConstantSource(f"given_{len(self.given)}"),
            symbolic_context=context,
        )
        self._ranks.append(len(sizes))
        for number in (*sizes, *strides):
            self._symbols.append(expression_of(number))
            self.given.append(self._text(expression_of(number)))
        return tuple(sizes), tuple(strides)

    def symbol(self, place: int) -> str | None:
        """The symbol that stands for exactly this number; None for an expression of others."""
        found = self._symbols[place]
        return self.given[place] if getattr(found, "is_Symbol", False) else None

    def fixed_dimensions(self) -> tuple[tuple[int, int], ...]:
        """(tensor, dimension) whose size was a symbol, and which the trace needed as a number."""
        found: list[tuple[int, int]] = []
        start = 0
        for tensor, rank in enumerate(self._ranks):
            for dim in range(rank):
                known = self._symbols[start + dim]
                is_symbol = self.symbol(start + dim) is not None
                if is_symbol and not self.env.replace(known).free_symbols:
                    found.append((tensor, dim))
            start += 2 * rank
        return tuple(found)

    def conditions(self) -> list[str]:
        """The conditions, in Python, under which the trace holds for other sizes."""
        found = [self._text(guard.expr) for guard in self.env.guards]
        for symbol, other in self.env.replacements.items():
            found.append(f"{symbol} == {self._text(other)}")
        for symbol in self._symbols:
            if getattr(symbol, "is_Symbol", False):
                bounds = self.env.var_to_range[symbol]
                found.append(f"{symbol} >= {int(bounds.lower)}")
                if bounds.upper < sys.maxsize - 1:
                    found.append(f"{symbol} <= {int(bounds.upper)}")
        return list(dict.fromkeys(found))

    def text(self, number: Any) -> str:
        """A number of the trace, in Python."""
        return self._text(number.node.expr)

    @contextlib.contextmanager
    def like_numbers(self) -> Generator[None]:
        """Inside, these symbols look like numbers to code outside torch and this package.

        `isinstance(size, int)` is true, and `size > 4` is True or False. The text of a size
        is that of its number, and an array of it holds its number; the trace then fixes the
        size. The symbol's own text would be a wrong key, or a wrong result, without an error.
        Obsolete when torch's symbols behave so.
        """
        with _lock:
            if not _answering:
                for kind, name, hook in _answers():
                    setattr(kind, name, hook)
            _answering.append(self.env)
        try:
            yield
        finally:
            with _lock:
                _answering.remove(self.env)
                if not _answering:
                    for kind, name, _ in _answers():
                        _restore(kind, name)


@functools.cache
def _shape_env() -> type[Any]:
    symbolic: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")

    class Env(symbolic.ShapeEnv):
        """Fixes the sizes behind a rounded number when that number is needed.

        Torch itself evaluates an expression whose terms it may have reordered, and gets
        other bits.
        """

        def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
            is_whole = sym_node.pytype is int and _is_whole(sym_node.expr)
            if is_whole or sym_node.pytype is bool or sym_node.hint is None:
                torchs: Any = super()
                return torchs.evaluate_sym_node(sym_node, *args, **kwargs)
            for symbol in sym_node.expr.free_symbols:
                self.evaluate_expr(symbol)
            return sym_node.hint

    return Env


# The shape environments whose symbols look like numbers, and the lock of the list.
_answering: list[Any] = []


_lock = threading.Lock()


_INTERNAL = {"torch", "functorch", "sympy", "mpmath", "remat"}


_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")


# The symbols' own methods.
_OWN: dict[tuple[type[Any], str], Callable[..., Any]] = {
    (kind, name): vars(kind)[name]
    for kind in SYMBOLIC
    for name in ("__repr__", *_COMPARISONS)
    if name in vars(kind)
}


def _answers() -> Iterator[tuple[type[Any], str, Callable[..., Any]]]:
    for kind in SYMBOLIC:
        yield kind, "__repr__", _text
        yield kind, "__format__", _formatted
        yield kind, "__getattribute__", _attribute
        yield kind, "__array__", _array
    for kind, name in _OWN:
        if name in _COMPARISONS and kind is not torch.SymBool:
            yield kind, name, _comparing(_OWN[kind, name])


def _restore(kind: type[Any], name: str) -> None:
    if (kind, name) in _OWN:
        setattr(kind, name, _OWN[kind, name])
    else:
        delattr(kind, name)


def _text(symbol: Any) -> str:
    if _is_users(symbol):
        asks = caller(1)
        if asks is not None and asks.f_globals.get("__name__") == "json.encoder":
            # It asks because a symbol is no number to it: `default=str` would write "4".
            raise TypeError("json writes a size as an object of another class")
        return repr(number(symbol))
    return _OWN[type(symbol), "__repr__"](symbol)


def _comparing(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A comparison that gives the user's code True or False, which the trace then assumes."""

    def compared(symbol: Any, other: Any) -> Any:
        found = compare(symbol, other)
        return number(found) if _is_users(symbol) else found

    return compared


def _array(symbol: Any, *args: Any, **kwargs: Any) -> Any:
    """The array that numpy asks for; otherwise it would make an array of objects."""
    numpy: Any = importlib.import_module("numpy")
    return numpy.asarray(number(symbol), *args, **kwargs)


def _formatted(symbol: Any, how: str) -> str:
    if _is_users(symbol):
        return format(number(symbol), how)
    return object.__format__(symbol, how)


def _attribute(symbol: Any, name: str) -> Any:
    # `isinstance` looks at the type first, then at `__class__`.
    if name == "__class__" and _is_users(symbol):
        return next(plain for kind, plain in _SYMBOLS if kind is type(symbol))
    return object.__getattribute__(symbol, name)


def _is_users(symbol: Any) -> bool:
    """Whether the user's code asks, and not a library."""
    env = getattr(node_of(symbol), "shape_env", None)
    if not any(each is env for each in _answering):
        return False
    frame, package = caller(2), ""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in sys.stdlib_module_names:
            break
        frame = frame.f_back
    return package not in _INTERNAL


def node_of(number: Any) -> Any:
    return number.node


def expression_of(number: Any) -> Any:
    return node_of(number).expr if isinstance(number, torch.SymInt) else number


def is_exact(number: Any) -> bool:
    """Whether a number of a trace is made of whole numbers alone.

    For other numbers torch keeps an expression whose terms it may have reordered.
    """
    if not isinstance(number, torch.SymInt):
        return False
    return not any(each.is_Float for each in expression_of(number).atoms())


def is_whole(number: Any) -> bool:
    """Whether nothing in a number of a trace is rounded before its last step."""
    return _is_whole(node_of(number).expr)


def _is_whole(expression: Any) -> bool:
    return all(each.is_integer for each in _below(expression))


def _below(expression: Any) -> Iterator[Any]:
    for each in expression.args:
        yield each
        yield from _below(each)


def hint(number: Any) -> Any:
    """A size as it was in the call that is traced; anything else as it is."""
    return int(node_of(number).hint) if isinstance(number, torch.SymInt) else number


def is_open(tensor: Tensor) -> bool:
    """Whether a size or stride of a tensor is a symbol of some trace."""
    return any(
        isinstance(number, torch.SymInt) for number in (*tensor.shape, *tensor.stride())
    )


def number(symbol: Any) -> Any:
    """The number that a symbol of torch.compile stands for, which is then guarded.

    Anything else is returned as it is. Obsolete, like the next function, when graphs may hold
    for all sizes.
    """
    for symbolic, plain in _SYMBOLS:
        if isinstance(symbol, symbolic):
            return plain(symbol)
    return symbol


_SYMBOLS: tuple[tuple[type[Any], Callable[[Any], Any]], ...] = (
    (torch.SymInt, int),
    (torch.SymFloat, float),
    (torch.SymBool, bool),
)


def why_open(symbol: Any) -> str:
    """Says what a symbol depends on that a guard must not fix; "" if on nothing.

    That is a size that the user has marked by `torch._dynamo.mark_dynamic`, for which torch
    raises if a guard fixes it; or a number that is known only from values. Obsolete when a
    `SymInt` can be asked for its constraint.
    """
    if not isinstance(symbol, tuple(symbolic for symbolic, _ in _SYMBOLS)):
        return ""
    node = node_of(symbol)
    if not node.has_hint():
        return f"{symbol}, a number that only values tell"
    for tracked in node.shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", ())
        for dim, constraint in enumerate(constraints):
            is_asked = constraint is not None and not constraint.warn_only
            size: Any = tracked.fake.shape[dim] if is_asked else None
            if is_asked and not node.expr.free_symbols.isdisjoint(
                expression_of(size).free_symbols
            ):
                return f"dimension {dim} of {tracked.source.name}, marked as dynamic"
    return ""
