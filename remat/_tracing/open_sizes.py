"""One trace for every size: `dynamic_shapes=True`.

A trace with *open* sizes runs on fake tensors whose sizes are symbols (torch's `ShapeEnv`).
Its graphs are kept as *templates*: each number that depends on a size is a hole, and one
generated function computes what fills the holes from the sizes of a call, or says that the
trace does not hold for them. A filled template is, a view here and there aside, the graph that a
trace of just these sizes would have given, so that all that follows (policies, programs,
kernels) knows the sizes exactly, and runs as fast.

What a template holds for is checked at every use: the given sizes and strides are those that
its symbols say, and every comparison comes out as it did in the trace.

Inside such a trace, sizes look like numbers to the user's code: `isinstance(size, int)` is true,
and `size > 4` is True or False. The text of a size is that of its number, and an array of it
holds its number; the trace then fixes the size. The symbol's own text would be a wrong key, or a
wrong result, without an error. Torch and this package still meet symbols. Obsolete when torch's
symbols behave so.
"""

import contextlib
import dataclasses
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Generator, Hashable, Sequence
from types import FrameType
from typing import Any, cast, final

import torch

from remat._errors import TraceError
from remat._graph.joint import Joint, View
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph, Value
from remat._torch import sizes as torch_sizes
from remat._torch.attributes import attributes_as
from remat._torch.sizes import PLAIN, SYMBOLIC, number
from remat._torch.tracer import one_trace_at_a_time, unrecorded
from remat._tracing.importing import Computed
from remat._tracing.trace import Request, Traced, sizes_of, trace

Fixed = tuple[tuple[bool, ...], ...]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Hole:
    """Stands for a whole number that depends on sizes."""

    index: int


_Leaf = Callable[[Any], Any]


# The fields that have numbers in them.
_FIELDS = {
    Value: ("args", "kwargs", "meta"),
    TensorMeta: ("shape", "stride"),
    Graph: ("values",),
    View: ("path",),
}


def _resized(tree: Any, leaf: _Leaf) -> Any:
    """A tree with other sizes in it: graphs, values, metadata, views, containers."""
    match tree:
        case Value() | TensorMeta() | Graph() | View():
            fields = _FIELDS[type(tree)]
            mapped = {name: _resized(getattr(tree, name), leaf) for name in fields}
            return dataclasses.replace(tree, **mapped)
        case torch.Size():
            return torch.Size(_resized(tuple(tree), leaf))
        case tuple():
            return tuple(
                [_resized(each, leaf) for each in cast("tuple[Any, ...]", tree)]
            )
        case list():
            return [_resized(each, leaf) for each in cast("list[Any]", tree)]
        case _:
            return leaf(tree)


def _map_joints(joints: tuple[Joint, ...], leaf: _Leaf) -> tuple[Joint, ...]:
    """The joints of one trace, which share their graph, with other numbers in them."""
    graph = _resized(joints[0].graph, leaf)
    views = _resized(joints[0].views, leaf)
    return tuple(
        dataclasses.replace(
            joint, graph=graph, views=views, layout=_resized(joint.layout, leaf)
        )
        for joint in joints
    )


@final
class Template:
    """The joint graphs of a trace with open sizes, and static results beside them."""

    def __init__(
        self, joints: tuple[Joint, ...], statics: Any, sizes: torch_sizes.OpenSizes
    ) -> None:
        numbers: dict[str, int] = {}

        def hole(number: Any) -> Any:
            if isinstance(number, Computed):
                return Computed(number.op, _resized(number.args, hole))
            if not isinstance(number, SYMBOLIC):
                return number
            return _Hole(numbers.setdefault(sizes.text(number), len(numbers)))

        def static(number: Any) -> Any:
            is_symbolic = isinstance(number, SYMBOLIC)
            if is_symbolic and not torch_sizes.is_whole(number.node):
                return PLAIN[type(number)](number)
            return hole(number)

        self._joints = _map_joints(joints, hole)
        self._statics = _resized(statics, static)
        self._numbers = _numbers_from_sizes(sizes, list(numbers))
        #: (operand, dimension) whose size the trace needed as a number.
        self.fixed = sizes.fixed_dimensions()

    def at(self, metas: Sequence[TensorMeta]) -> tuple[tuple[Joint, ...], Any] | None:
        """Graphs and static results for operands of this metadata; None if it does not hold."""
        try:
            numbers = self._numbers(sizes_of(metas))
        except ArithmeticError:
            return None  # a condition that has no value for such sizes does not hold
        if numbers is None:
            return None
        found: tuple[int, ...] = numbers

        def fill(hole: Any) -> Any:
            if type(hole) is _Hole:
                return found[hole.index]
            if type(hole) is Computed:
                return hole.op(*_resized(hole.args, fill))
            return hole

        return _map_joints(self._joints, fill), _resized(self._statics, fill)


def _numbers_from_sizes(
    sizes: torch_sizes.OpenSizes, numbers: Sequence[str]
) -> Callable[[Sequence[int]], tuple[int, ...] | None]:
    """Writes the function from the given sizes and strides to the numbers of a trace."""
    bound = dict[str, int]()  # by symbol, the first place where it is given
    conditions: list[str] = []
    for place, text in enumerate(sizes.given):
        if sizes.symbol(place) is None or bound.setdefault(text, place) != place:
            conditions.append(f"given[{place}] == {text}")
    conditions += sizes.conditions()
    lines = [f"{symbol} = given[{place}]" for symbol, place in bound.items()]
    lines += [f"if not ({each}): return None" for each in conditions]
    lines.append(f"return ({''.join(f'{text}, ' for text in numbers)})")
    body = "".join(f"    {line}\n" for line in lines)
    namespace: dict[str, Any] = {"torch": torch, "math": math}
    exec(compile(f"def numbers(given):\n{body}", "<remat sizes>", "exec"), namespace)
    return namespace["numbers"]


def opened(request: Request, fixed: Fixed, sizes: torch_sizes.OpenSizes) -> Request:
    """Opens the sizes of a request, those of `fixed` dimensions aside."""

    def open_(meta: TensorMeta, place: int) -> TensorMeta:
        known = fixed[place] if place < len(fixed) else ()
        if len(known) != len(meta.shape):
            # A derived region's operand, which may have one dimension more.
            known = (bool(known) and all(known),) * len(meta.shape)
        shape, stride = sizes.open(meta.shape, meta.stride, known)
        return dataclasses.replace(meta, shape=shape, stride=stride)

    operands = tuple(open_(meta, place) for place, meta in enumerate(request.operands))
    cotangents = request.cotangents and tuple(
        meta and open_(meta, len(fixed)) for meta in request.cotangents
    )
    return dataclasses.replace(
        request, operands=operands, cotangents=cotangents, sizes=sizes
    )


#: What comes up where a trace cannot go on with a symbol. Nothing is lost by a wide net: the
#: trace is made again, of one size, and raises again what is the function's own.
#: RuntimeError: operators that need numbers, and comparisons that symbols do not decide.
#: TypeError, AttributeError: what an int can do and a symbol cannot: be a key of a dict, be
#: given to numpy, divmod or Fraction, `.real`, `.to_bytes`. ArithmeticError: in torch's formulas,
#: as for the variance of one element. AssertionError: torch's own checks, and a trace that
#: does not hold for its own call. ValueError, LookupError: the function's, of such values.
CANNOT_OPEN = (
    *(RuntimeError, TypeError, ValueError, AssertionError),
    *(ArithmeticError, AttributeError, LookupError),
)


@final
class Templates:
    """The templates of one function and of all that is derived from it."""

    def __init__(self, fixed: Fixed) -> None:
        self.fixed = fixed  # of each operand, which dimensions never vary
        #: By the keys of functions, those of which plain autograd has recorded a backward.
        self.recorded: set[Hashable] = set()
        self._kept: dict[Hashable, list[Template] | None] = {}

    def joints(self, key: Hashable, request: Request) -> tuple[Joint, ...]:
        """The joint graphs of a request, traced only if no template holds."""
        given = [*request.operands, *filter(None, request.cotangents or ())]
        asked = request.cotangents and tuple(map(bool, request.cotangents))
        kinds = [(len(x.shape), x.dtype, x.device, x.requires_grad) for x in given]
        general = (key, asked, request.gradients, request.backward_numerics, *kinds)
        kept = self._kept.setdefault(general, [])
        for template in kept or ():
            found = template.at(given)
            if found is not None:
                return found[0]
        template = None if kept is None else self._trace_template(request)
        found = None if template is None else template.at(given)
        if kept is None or template is None or found is None:
            self._kept[general] = None
            return trace(request).joints
        kept.insert(0, template)
        return found[0]

    def _trace_template(self, request: Request) -> Template | None:
        try:
            traced, sizes = trace_open(request, self.fixed)
        except CANNOT_OPEN:
            # What is derived from a function may do what the function does not.
            return None
        return Template(traced.joints, (), sizes)


def trace_open(request: Request, fixed: Fixed) -> tuple[Traced, torch_sizes.OpenSizes]:
    """Traces with open sizes, but for those of `fixed` dimensions of the operands.

    Raises:
        TraceError: an operand is a DTensor, whose parts have sizes of their own.
        And what torch raises where it cannot go on with a symbol.
    """
    if any(meta.placement is not None for meta in request.operands):
        raise TraceError("a DTensor has two sizes, the whole's and its part's.")
    sizes = torch_sizes.OpenSizes()
    with unrecorded():  # by a trace around this one
        request = opened(request, fixed, sizes)
    with _like_numbers(sizes.env):
        return trace(request), sizes


# The shape environments whose symbols look like numbers.
_answering: list[Any] = []
_INTERNAL = {"torch", "functorch", "sympy", "mpmath", "remat"}
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")

_REPR: dict[type[Any], Any] = {k: k.__repr__ for k in SYMBOLIC}


@contextlib.contextmanager
def _like_numbers(env: Any) -> Generator[None]:
    """Inside, the symbols of a shape environment look like numbers to the user's code."""
    with one_trace_at_a_time(), contextlib.ExitStack() as undo:
        for kind in () if _answering else SYMBOLIC:
            methods = {**_METHODS}
            for name in _COMPARISONS if kind is not torch.SymBool else ():
                if name in vars(kind):
                    methods[name] = _compare_like_number(vars(kind)[name])
            undo.enter_context(attributes_as(kind, **methods))
        undo.callback(_answering.remove, env)
        _answering.append(env)
        yield


def _text_like_number(symbol: Any) -> str:
    if not _is_asked_by_users(symbol):
        return _REPR[type(symbol)](symbol)
    caller: FrameType | None = getattr(inspect.currentframe(), "f_back", None)
    if caller is not None and caller.f_globals.get("__name__") == "json.encoder":
        # It asks because a symbol is no number to it: `default=str` would write "4".
        raise TypeError("json writes a size as an object of another class")
    return repr(number(symbol))


def _compare_like_number(
    compare: Callable[[Any, Any], Any],
) -> Callable[[Any, Any], Any]:
    """A comparison that gives the user's code True or False, which the trace then assumes."""

    def compared(symbol: Any, other: Any) -> Any:
        answer = compare(symbol, other)
        return number(answer) if _is_asked_by_users(symbol) else answer

    return compared


def _array_like_number(symbol: Any, *args: Any, **kwargs: Any) -> Any:
    """The array that numpy asks for; otherwise it would make an array of objects."""
    numpy: Any = importlib.import_module("numpy")
    return numpy.asarray(number(symbol), *args, **kwargs)


def _format_like_number(symbol: Any, how: str) -> str:
    is_users = _is_asked_by_users(symbol)
    return format(number(symbol), how) if is_users else object.__format__(symbol, how)


def _attribute_like_number(symbol: Any, name: str) -> Any:
    # `isinstance` looks at the type first, then at `__class__`.
    if name == "__class__" and _is_asked_by_users(symbol):
        return PLAIN[type(symbol)]
    return object.__getattribute__(symbol, name)


_METHODS: dict[str, Callable[..., Any]] = {
    "__repr__": _text_like_number,
    "__format__": _format_like_number,
    "__getattribute__": _attribute_like_number,
    "__array__": _array_like_number,
}


def _is_asked_by_users(symbol: Any) -> bool:
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
