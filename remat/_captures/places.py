"""Places: where a value is in a user's objects, and how to read, write and name it.

A `Step` is a pair (kind, key): from an owner to one value that it holds, such as `("cell", 1)` or
`("parameter", "weight")`. All that differs between the kinds stands in the table `KINDS`.

This module also says what a *simple* value is: one that is compared by what it is, and
that a baked trace may hold on to without keeping anything of the user's alive.
"""

import contextvars
import enum
import functools
import inspect
import numbers
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from gc import get_referents
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from remat._captures.library import (
    cached_weakly,
    is_standard,
    module_of,
    user_bases,
    users_hooks,
)

Step: TypeAlias = tuple[str, Hashable]

# Steps into a list or a dict. Keys that are not simple, and what is under them, go by order.
ITEMS = frozenset({"item", "key", "value"})

# What is found where nothing stands.
MISSING = object()

_BY_VALUE = frozenset(
    {int, float, complex, str, bytes, range, slice}
    | {torch.Size, torch.device, torch.finfo, torch.iinfo}
)
_BY_IDENTITY = frozenset(
    {type(None), bool, type(...), type(NotImplemented)}
    | {torch.dtype, torch.layout, torch.memory_format}
    | {types.CodeType, types.WrapperDescriptorType, types.MethodDescriptorType}
)


class Unset(enum.Enum):
    """The value of a context variable that is not set and has no default."""

    UNSET = enum.auto()


# The types whose instances are simple whatever they hold: the quick test of the walk.
SIMPLE_TYPES = _BY_VALUE | _BY_IDENTITY
# Operators of torch are values of their own, not objects with attributes to watch.
_OPERATORS = ("torch._ops", "torch._library.custom_ops")
# A frozen class of this package has this attribute if == compares all that it holds.
COMPARES_AS_A_WHOLE = "__remat_compares_as_a_whole__"


def value_in_words(value: object) -> str:
    """A value for a message: simple ones as written, others by their type."""
    if value is MISSING:
        return "not there"
    if is_simple(value):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"an object of type {type(value).__qualname__}"


def is_simple(value: object) -> bool:
    """Whether the value at a place is compared by what it is; tuples count if all in them does."""
    kind = type(value)
    if kind in SIMPLE_TYPES or isinstance(value, (enum.Enum, type, str, bytes)):
        return True
    if hasattr(kind, COMPARES_AS_A_WHOLE):
        return True
    if kind is tuple or kind is frozenset:
        items = cast("tuple[object, ...] | frozenset[object]", value)
        return all(is_simple(item) for item in items)
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__  # of an autograd.Function's `apply`, the user's class
        is_shared = isinstance(owner, (types.ModuleType, type, types.NoneType))
        return is_shared and not (isinstance(owner, type) and user_bases(owner))
    if kind.__module__ in _OPERATORS or isinstance(value, numbers.Number):
        return True
    return _is_value_class(kind) or numpy_scalar(value) is not None


def numpy_scalar(value: Any) -> Hashable | None:
    """What tells a scalar of numpy from all others, to the bit; None for anything else."""
    kind = cast("type[object]", type(value))
    is_numpys = kind.__module__ == "numpy" and hasattr(kind, "__array_interface__")
    if not is_numpys or hasattr(kind, "__setitem__"):
        return None
    return (kind, value.dtype.str, value.tobytes())


def is_plain(value: object) -> bool:
    """Whether `value` is simple and its class has no methods that the user wrote."""
    kind = type(value)
    if kind in SIMPLE_TYPES:
        return True
    if kind is tuple:
        return all(map(is_plain, cast("tuple[object, ...]", value)))
    return is_simple(value) and not user_bases(kind)


@cached_weakly
def _is_value_class(kind: type) -> bool:
    """Whether a class of the standard library says by == and hash all there is: a date, a path.

    What is called or iterated holds other things, of which equality may not tell.
    """
    if not is_standard(module_of(kind)):
        return False
    compares = kind.__eq__ is not object.__eq__
    is_plain = not {"__call__", "__iter__"}.intersection(dir(kind))
    return compares and kind.__hash__ not in {None, object.__hash__} and is_plain


def is_same_value(value: object, const: object) -> bool:
    """Whether simple values are one by type and bits: 1, 1.0, True differ; a NaN is itself."""
    if value is const:
        return True
    if type(value) is not type(const):
        return False
    scalar = numpy_scalar(const)
    if scalar is not None:
        return numpy_scalar(value) == scalar
    if isinstance(const, (float, complex)):
        return repr(value) == repr(const)
    if type(const) is tuple:
        pair = cast("tuple[tuple[object, ...], tuple[object, ...]]", (value, const))
        return len(pair[0]) == len(pair[1]) and all(map(is_same_value, *pair))
    if type(const) is slice:
        left, right = cast("tuple[slice[Any], slice[Any]]", (value, const))
        ends = (left.start, left.stop, left.step), (right.start, right.stop, right.step)
        return is_same_value(*ends)
    # Enumerations and classes were told by identity.
    return not isinstance(const, (enum.Enum, type)) and bool(value == const)


def attributes(owner: object) -> dict[str, object]:
    """The instance dictionary of `owner`, read so that no recording notes it."""
    if isinstance(owner, type):
        return cast("dict[str, object]", type.__dict__["__dict__"].__get__(owner))
    if isinstance(owner, threading.local):
        # This thread's own. A subclass has one for all threads besides, which stays empty.
        return threading.local.__getattribute__(owner, "__dict__")
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}


def in_context(variable: contextvars.ContextVar[object]) -> object:
    try:
        return variable.get()
    except LookupError:
        return Unset.UNSET


def held_bytes(owner: Any) -> tuple[object, ...]:
    """What an array of numpy's or of the standard library holds, its shape and format."""
    view = memoryview(owner)
    return view.tobytes(), view.shape, view.format


def is_kept_property(kind: type, name: str) -> bool:
    given = inspect.getattr_static(kind, name, None)
    return isinstance(given, functools.cached_property)


class Kind(NamedTuple):
    """How one kind of step is taken, written as code, and named."""

    holder: str  # an expression of the owner `{}`
    item: str  # what follows it, of the key
    label: str  # the text that the step adds
    prefix: str | None = None  # the first word, if the label starts anew here


KINDS = {
    "root": Kind("{}", "[{}]", "{}", ""),
    "item": Kind("{}", "[{}]", "[{!r}]"),
    "key": Kind("(*{},)", "[{}]", ".keys()[{!r}]"),
    "value": Kind("(*{}.values(),)", "[{}]", ".values()[{!r}]"),
    "attr": Kind("{}", ".{}", ".{}"),
    "var": Kind("{}.__dict__", "[{}]", ".{}"),
    "parameter": Kind("{}.__dict__['_parameters']", "[{}]", ".{}"),
    "buffer": Kind("{}.__dict__['_buffers']", "[{}]", ".{}"),
    "child": Kind("{}.__dict__['_modules']", "[{}]", ".{}"),
    "cell": Kind("{}.__closure__", "[{}].cell_contents", "{}", "closure variable"),
    "global": Kind("{}.__globals__", "[{}]", "{}", "global"),
    "default": Kind("{}.__defaults__", "[{}]", "{}", "default of"),
    "kwdefault": Kind("{}.__kwdefaults__", "[{}]", "{}", "default of"),
    "arg": Kind("{}.args", "[{}]", "{}", "partial argument"),
    "keyword": Kind("{}.keywords", "[{}]", "{}", "partial argument"),
    "inherited": Kind("type({})", ".{}", ".{}"),
    "import": Kind("__import__('sys').modules", "[{}]", "{}", "import"),
    "variable": Kind("in_context({})", "", "{}", "context variable"),
    "referent": Kind("{}()", "", "()"),
    "reduced": Kind("{}.__reduce__()", "", ""),
    "behind": Kind("get_referents({})", "[{}]", ""),
    "members": Kind("frozenset({})", "", ""),
    "bytes": Kind("held_bytes({})", "", ""),
    "type": Kind("type({})", "", "{}", "class"),
    "base": Kind("{}.__mro__", "[{}]", "{}", "base class"),
    "hooks": Kind("(*users_hooks(),)", "", "{}", ""),
}


# What the expressions of `KINDS` refer to.
SPACE = {
    each.__name__: each for each in (get_referents, held_bytes, in_context, users_hooks)
}


def _compiled_holder(holder: str) -> Callable[[Any], Any]:
    """The function that an expression for a holder stands for, unseen by a recording."""
    text = holder.replace("{}.__dict__", "attributes({})").format("owner")
    return eval(f"lambda owner: {text}", {**SPACE, "attributes": attributes})


_HOLDERS = {name: _compiled_holder(kind.holder) for name, kind in KINDS.items()}


# What `read_place` raises where nothing stands.
NOT_THERE = (AttributeError, LookupError, TypeError, ValueError)


def read_place(owner: object, step: Step) -> object:
    """The value one step from `owner`; raises one of `NOT_THERE` where nothing stands."""
    kind, key = step
    if step == ("attr", "__dict__"):
        return attributes(owner)
    if kind == "attr":
        return object.__getattribute__(owner, cast("str", key))
    holder = _HOLDERS[kind](owner)
    if kind == "inherited":
        return getattr(holder, cast("str", key))
    if not KINDS[kind].item:
        return holder
    return holder[key].cell_contents if kind == "cell" else holder[key]


def read_place_or_missing(owner: object, step: Step) -> object:
    """The value one step from `owner`; `MISSING` if nothing stands there."""
    try:
        return read_place(owner, step)
    except NOT_THERE:
        return MISSING


def write_place(owner: Any, step: Step, value: object) -> None:
    """Writes `value` one step from `owner`, past any `__setattr__`; `MISSING` empties the place.

    Raises one of `NOT_THERE` if it cannot be written.
    """
    kind, key = cast("tuple[str, Any]", step)
    base: Any = type if issubclass(type(owner), type) else object
    if value is MISSING and read_place_or_missing(owner, step) is MISSING:
        return  # who put a value there has taken it away again
    if kind in {"attr", "cell"} or (kind == "var" and base is type):
        if kind == "cell":
            owner, key = owner.__closure__[key], "cell_contents"
        if value is MISSING:
            base.__delattr__(owner, key)
        else:
            base.__setattr__(owner, key, value)
    elif value is MISSING:
        del _HOLDERS[kind](owner)[key]
    else:
        _write_item(owner, kind, key, value)


def _write_item(owner: Any, kind: str, key: Any, value: Any) -> None:
    match kind:
        case "default":
            defaults = [*owner.__defaults__]
            defaults[key] = value
            owner.__defaults__ = tuple(defaults)
        case "value":
            owner[[*owner][key]] = value
        case "variable" if value is Unset.UNSET:
            raise LookupError("only who set a context variable can make it unset again")
        case "variable":
            owner.set(value)
        case "hooks":
            raise TypeError("who has registered a hook removes it")
        case "members":
            refill(owner, value)
        case "bytes":
            memoryview(owner).cast("B")[:] = value[0]
        case _:
            _HOLDERS[kind](owner)[key] = value


def refill(owner: Any, items: Any) -> None:
    """Makes a container hold these items, past any method of its class."""
    # An ordered one keeps its order beside: dict's own methods would spoil it.
    bases: tuple[Any, ...] = list, deque, set, OrderedDict, dict
    base = next(base for base in bases if isinstance(owner, base))
    base.clear(owner)
    grow = "extend" if base in {list, deque} else "update"
    getattr(base, grow)(owner, items)


class Label(NamedTuple):
    """The words for a place: the kind of name that it starts from, and the rest."""

    prefix: str
    body: str

    def __str__(self) -> str:
        """Such as: self.attn.weight, global `W`, closure variable `scale`."""
        return f"{self.prefix} `{self.body}`" if self.prefix else self.body

    def then(self, owner: Any, step: Step) -> "Label":
        """The label of the place one step on, where `owner` stands at this one."""
        kind = KINDS[step[0]]
        if step == ("attr", "__self__"):
            return Label("", "self")
        if kind.prefix is None:
            return Label(self.prefix, self.body + kind.label.format(step[1]))
        return Label(kind.prefix, _first_word_of_label(owner, step))


_FUNCTIONS = (types.FunctionType, types.MethodType)


def _first_word_of_label(owner: Any, step: Step) -> str:
    kind, key = step
    if kind == "root":
        root = owner[key]
        return root.__name__ if isinstance(root, _FUNCTIONS) else "self"
    if kind == "cell":
        return owner.__code__.co_freevars[key]
    if kind == "default":
        code = owner.__code__
        first = code.co_argcount - len(owner.__defaults__)
        return code.co_varnames[first + cast("int", key)]
    if kind == "variable":
        return owner.name
    if kind in {"type", "base"}:
        return cast("type", read_place(owner, step)).__qualname__
    return str(key)
