"""Sizes that are symbols of a trace.

Obsolete when torch.export's shape environment is public.
"""

# pyright: reportPrivateUsage=false
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# What torch knows of a symbol; torch does not type it.
node_of: Callable[[Any], Any] = operator.attrgetter("node")
#: The classes of a trace's numbers that depend on open sizes, and what they stand for.
PLAIN: dict[type[Any], Callable[[Any], Any]] = {
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
}
SYMBOLIC = tuple(PLAIN)


def shape_env_of(numbers: Iterable[int]) -> Any:
    """The shape environment of the first symbol among some numbers, None without one."""
    for number in numbers:
        if isinstance(number, torch.SymInt):
            return node_of(number).shape_env
    return None


class OpenSizes:
    """The symbols for sizes and strides in one trace, and the conditions that it assumed.

    Sizes that happen to be equal do not share a symbol. 0 and 1 are constants, as everywhere in
    torch, which broadcasts by them.
    """

    def __init__(self) -> None:
        symbolic: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        printers: Any = importlib.import_module("torch.utils._sympy.printers")
        self._torch = symbolic
        self._text: Callable[[Any], str] = printers.PythonPrinter().doprint
        self._symbols: list[Any] = []
        #: Of which (tensor, dimension) it is the size, by the place of a symbol.
        self._sizes: dict[int, tuple[int, int]] = {}
        self._num_tensors = 0
        #: For each size and stride that was opened, in order, the Python text of what stands
        #: for it: a symbol, a product of symbols, or a constant.
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
        how = self._torch.DimDynamic
        kinds = [how.STATIC if each else how.DYNAMIC for each in fixed]
        context = self._torch.StatelessSymbolicContext(dynamic_sizes=kinds)
        sources: Any = importlib.import_module("torch._dynamo.source")
        source = sources.ConstantSource(f"given_{len(self.given)}")
        layout = (tuple(map(hint, shape)), tuple(map(hint, stride)))
        like = torch.empty_strided(*layout, device="meta")
        sizes, strides, _ = self.env.create_symbolic_sizes_strides_storage_offset(
            like, source, symbolic_context=context
        )
        for dim in range(len(sizes)):
            self._sizes[len(self._symbols) + dim] = (self._num_tensors, dim)
        self._num_tensors += 1
        for number in (*sizes, *strides):
            self._symbols.append(symbol_expression(number))
            self.given.append(self._text(symbol_expression(number)))
        return tuple(sizes), tuple(strides)

    def symbol(self, place: int) -> str | None:
        """The symbol that stands for exactly this number; None for an expression of others."""
        found = self._symbols[place]
        return self.given[place] if getattr(found, "is_Symbol", False) else None

    def fixed_dimensions(self) -> tuple[tuple[int, int], ...]:
        """(tensor, dimension) whose size was a symbol, and which the trace needed as a number."""
        return tuple(
            size
            for place, size in self._sizes.items()
            if self.symbol(place) is not None
            and not self.env.replace(self._symbols[place]).free_symbols
        )

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
        return self._text(number.node.expr)


@functools.cache
def _shape_env() -> type[Any]:
    symbolic: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")

    class Env(symbolic.ShapeEnv):
        """Fixes the sizes behind a rounded number when that number is needed.

        Torch would evaluate an expression whose terms it may have reordered, and get other bits.
        """

        def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
            is_integer = sym_node.pytype is int and is_whole(sym_node)
            if is_integer or sym_node.pytype is bool or sym_node.hint is None:
                torchs: Any = super()
                return torchs.evaluate_sym_node(sym_node, *args, **kwargs)
            for symbol in sym_node.expr.free_symbols:
                self.evaluate_expr(symbol)
            return sym_node.hint

    return Env


def symbol_expression(number: Any) -> Any:
    return node_of(number).expr if isinstance(number, torch.SymInt) else number


def is_exact(number: Any) -> bool:
    """Whether a number of a trace is made of whole numbers alone.

    For other numbers torch keeps an expression whose terms it may have reordered.
    """
    if not isinstance(number, torch.SymInt):
        return False
    return not any(each.is_Float for each in symbol_expression(number).atoms())


def is_whole(node: Any) -> bool:
    """Whether nothing in the number of a symbol's node is rounded before its last step."""
    pending = [*node.expr.args]
    for each in pending:
        pending += each.args
    return all(each.is_integer for each in pending)


def hint(number: Any) -> Any:
    """A size as it was in the call that is traced; anything else as it is."""
    return int(node_of(number).hint) if isinstance(number, torch.SymInt) else number


def is_open(tensor: Tensor) -> bool:
    """Whether a size or stride of a tensor is a symbol of some trace."""
    numbers = (*tensor.shape, *tensor.stride())
    return any(isinstance(number, torch.SymInt) for number in numbers)


def number(symbol: Any) -> Any:
    """The number that a symbol of torch.compile stands for, which is then guarded.

    Anything else is returned as it is. Obsolete, like the next two functions, when graphs may hold
    for all sizes.
    """
    return PLAIN[type(symbol)](symbol) if isinstance(symbol, SYMBOLIC) else symbol


def settled(tensor: Tensor) -> Tensor:
    """The tensor with such numbers for its sizes."""
    if not any(isinstance(size, torch.SymInt) for size in tensor.shape):
        return tensor
    return tensor.expand(tuple(map(number, tensor.shape)))


def why_open(symbol: Any) -> str:
    """Says what a symbol depends on that a guard must not fix; "" if on nothing.

    That is a size that the user has marked by `torch._dynamo.mark_dynamic`, for which torch
    raises if a guard fixes it; or a number that is known only from values. Obsolete when a
    `SymInt` can be asked for its constraint.
    """
    if not isinstance(symbol, SYMBOLIC):
        return ""
    node = symbol.node
    if not node.has_hint():
        return f"{symbol}, a number that only values tell"
    for tracked in node.shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", ())
        for dim, constraint in enumerate(constraints):
            if constraint is None or constraint.warn_only:
                continue
            marked = symbol_expression(tracked.fake.shape[dim]).free_symbols
            if not marked.isdisjoint(node.expr.free_symbols):
                return f"dimension {dim} of {tracked.source.name}, marked as dynamic"
    return ""
