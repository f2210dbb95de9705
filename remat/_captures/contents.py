"""The values at an object's places: one function for each sort of object.

Each returns the values that can be reached in one step. `names` are the names that the
user's code mentions: of modules, classes and functions only these are looked at.
"""

import array
import contextlib
import contextvars
import functools
import importlib.util
import operator
import struct
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Set
from typing import Any, TypeAlias, cast

from torch import Tensor, nn

from remat._captures import library
from remat._captures.places import Step, attributes, held_bytes, is_simple, read_place
from remat._generators import trackers
from remat._torch import modules

Content: TypeAlias = dict[Step, object]

# An array is compared by what it holds up to this size: a heuristic, some microseconds.
MOST_BYTES = 2**16
# And a set up to this number of members.
MOST_MEMBERS = 2**10
_POINTER_BYTES = struct.calcsize("P")

REGISTERED = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "child"}
# Classes of the standard library whose instances hold the user's values. Others are internals,
# from which a walk (by loggers, threads) would get everywhere.
_NAMESPACES = frozenset(
    {"types.SimpleNamespace", "argparse.Namespace", "collections.ChainMap"}
    | {"collections.UserDict", "collections.UserList"}
    | {"functools._singledispatchmethod_get"}  # a bound one, from Python 3.14 on
    | {f"{threading.local.__module__}.{threading.local.__qualname__}"}
)
# Methods that run when an object is made, and the function in which Python 3.14 keeps annotations.
# Code that uses an existing object never runs them.
_CONSTRUCTION = frozenset(
    {"__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__"}
    | {"__del__", "__repr__", "__str__", "__reduce__", "__getstate__", "__setstate__"}
    | {"__annotate_func__"}
)
# Steps to a class as that of an object, whose contents are asked otherwise than a value's.
AS_CLASS = frozenset({"type", "base"})
# What a Python module has, or makes, that its namespace lacks (PEP 562).
_LENDING = "__getattr__"
# Set by a recording while it runs, and removed after it.
WATCHERS = frozenset({"__getattribute__", "__setattr__"})


def of_library_function(function: types.FunctionType, names: set[str]) -> Content:
    """Of a library's function: what the user passed to it, not its own caches.

    The functions of a `functools.singledispatch` are the user's, although a dict holds them.
    """
    cells = function.__code__.co_freevars
    return {
        step: value
        for step, value in _of_function(function, names).items()
        if step[0] != "cell"
        or not isinstance(value, (dict, list))
        or cells[cast("int", step[1])] == "registry"
    }


def _of_function(function: types.FunctionType, names: set[str]) -> Content:
    content: Content = {}
    for index, cell in enumerate(function.__closure__ or ()):
        try:
            content["cell", index] = cell.cell_contents
        except ValueError:
            continue  # not yet filled
    for index, value in enumerate(function.__defaults__ or ()):
        content["default", index] = value
    for key, value in (function.__kwdefaults__ or {}).items():
        content["kwdefault", key] = value
    if not function.__dict__:
        return content
    return content | _of_namespace(function, {*names, "__wrapped__"})


def of_user_function(function: types.FunctionType, names: set[str]) -> Content:
    """Of the user's function: cells, defaults, and the globals and imports it names."""
    content = _of_function(function, names)
    space = function.__globals__
    mentioned = library.mentions(function.__code__)
    known = sorted(mentioned.globals & space.keys())
    content |= {("global", key): space[key] for key in known}
    for dots, name in sorted(mentioned.imports):
        package: str = space.get("__package__") or ""
        full = "." * dots + name
        key = importlib.util.resolve_name(full, package) if package else full
        if key in sys.modules and not library.is_library_module(key):
            content["import", key] = sys.modules[key]
    return content


def _of_attributes(owner: object, _: set[str]) -> Content:
    content: Content = {("var", k): v for k, v in attributes(owner).items()}
    for name in slots(type(owner)):
        try:
            content["attr", name] = object.__getattribute__(owner, name)
        except AttributeError:
            continue  # an unset slot
    return content


def _of_tensor(owner: Tensor, _: set[str]) -> Content:
    return {("var", key): value for key, value in attributes(owner).items()}


def _of_object(owner: object, names: set[str]) -> Content:
    content = _of_attributes(owner, names)
    if library.user_bases(type(owner)):
        content["type", ""] = type(owner)
    return content


def _of_module(module: nn.Module, names: set[str]) -> Content:
    content = _of_object(module, names)
    for name in modules.second_places(type(module)):
        content.pop(("var", name), None)
    for holder, kind in REGISTERED.items():
        entries = cast("dict[str, object]", content.pop(("var", holder), {}))
        content |= {(kind, key): value for key, value in entries.items()}
    return content


def _of_sequence(owner: Iterable[object], names: set[str]) -> Content:
    content: Content = {("item", i): v for i, v in enumerate(owner)}
    is_plain = type(owner) in {list, tuple, deque}
    return content if is_plain else content | _of_object(owner, names)


def shows_members(owner: object) -> bool:
    """Whether a value is a set whose members are compared: a small one of simple values."""
    if not isinstance(owner, set):
        return False
    members = cast("set[object]", owner)
    return len(members) <= MOST_MEMBERS and all(map(is_simple, members))


def _of_set(owner: set[object], names: set[str]) -> Content:
    content = _of_object(owner, names)
    if shows_members(owner):
        content["members", ""] = frozenset(owner)
    return content


def _of_array(owner: Any, names: set[str]) -> Content:
    """Of an array: its bytes, up to a size, unless it holds objects."""
    content = _of_object(owner, names)
    with contextlib.suppress(ValueError):  # numpy hands out no dates
        view = memoryview(owner)
        if view.nbytes <= MOST_BYTES and "O" not in view.format:
            content["bytes", ""] = held_bytes(owner)
    return content


def _of_dict(owner: dict[Any, object], names: set[str]) -> Content:
    content: Content = {}
    for index, (key, value) in enumerate(owner.items()):
        if is_simple(key):
            content["item", key] = value
        else:
            # By their order: what is kept of a trace holds no object of the user's.
            content["key", index] = key
            content["value", index] = value
    return content if type(owner) is dict else content | _of_object(owner, names)


def _of_partial(
    owner: functools.partial[object] | functools.partialmethod[object], _: set[str]
) -> Content:
    content: Content = {("attr", "func"): owner.func}
    content |= {("arg", i): v for i, v in enumerate(owner.args)}
    return content | {("keyword", k): v for k, v in owner.keywords.items()}


def _at(*steps: Step) -> "Look":
    """The look at objects that hold what stands one of these steps away."""

    def look_at(owner: object, _: set[str]) -> Content:
        return {step: read_place(owner, step) for step in steps}

    return look_at


def _of_getter(owner: object, _: set[str]) -> Content:
    """Of what `operator` makes of simple values: its class, and these."""
    reduced = owner.__reduce__()
    return {("reduced", ""): reduced} if is_simple(reduced) else {}


# Of regions, chains and tiled functions.
_OF_WRAPPERS = frozenset(
    {"__wrapped__", "settings", "fs", "schedule", "pattern", "tiles", "reduce"}
)


def _of_wrapper(owner: object, _: set[str]) -> Content:
    """Of our own wrappers, and of cached functions: what they wrap, and options."""
    return _of_namespace(owner, _OF_WRAPPERS)


def _of_namespace(owner: object, names: Set[str]) -> Content:
    held = attributes(owner)
    return {("var", key): held[key] for key in held if key in names or key == _LENDING}


def of_class(owner: type, names: set[str]) -> Content:
    """Of a class met as the type of an object: methods and constants that are mentioned."""
    content: Content = {}
    for key, value in attributes(owner).items():
        operator = key.startswith("__") and isinstance(value, types.FunctionType)
        if key in WATCHERS or (operator and key in _CONSTRUCTION):
            continue
        if key in names or key == "forward" or operator:
            content["var", key] = value
    first, *others = library.user_bases(owner) or (0,)
    for index in others if first == 0 else (first, *others):
        content["base", index] = owner.__mro__[index]
    if library.user_bases(type(owner)):
        content["type", ""] = type(owner)
    return content


def of_called_class(owner: type, names: set[str]) -> Content:
    """Of a class met as a value: it may be called, or its functions applied."""
    content = of_class(owner, names)
    for key, value in attributes(owner).items():
        function = isinstance(value, (types.FunctionType, staticmethod, classmethod))
        if function and key not in WATCHERS:
            content["var", key] = value
    return content


def of_nothing(_owner: object, _: set[str]) -> Content:
    """Of what is not followed, such as a library's Python module."""
    return {}


@library.cached_weakly
def slots(kind: type) -> tuple[str, ...]:
    """Contents of objects: the slots that the Python classes among the bases of a class declare."""
    return tuple(
        name
        for base in kind.__mro__
        if "__slots__" in attributes(base)
        for name, given in attributes(base).items()
        if isinstance(given, types.MemberDescriptorType)
    )


Look: TypeAlias = Callable[[Any, set[str]], Content]

# First match wins; a sort that holds the user's code or constants by name is looked at
# again when more names are known.
_SORTS: tuple[tuple[type, Look], ...] = (
    (nn.Module, _of_module),
    (functools.partial, _of_partial),
    (functools.partialmethod, _of_partial),
    (functools.singledispatchmethod, _at(("attr", "dispatcher"), ("attr", "func"))),
    (types.MethodType, _at(("attr", "__self__"), ("attr", "__func__"))),
    (types.BuiltinFunctionType, _at(("attr", "__self__"), ("attr", "__name__"))),
    (types.MethodWrapperType, _at(("attr", "__self__"), ("attr", "__name__"))),
    (operator.itemgetter, _of_getter),
    (operator.attrgetter, _of_getter),
    (operator.methodcaller, _of_getter),
    (property, _at(("attr", "fget"))),
    (staticmethod, _at(("attr", "__func__"))),
    (classmethod, _at(("attr", "__func__"))),
    (contextvars.ContextVar, _at(("variable", ""))),
    (weakref.ref, _at(("referent", ""))),
    (types.MappingProxyType, _at(("behind", 0))),
    (dict, _of_dict),
    (set, _of_set),
    (deque, _of_sequence),
    (bytearray, _of_array),
    (array.array, _of_array),
    (list, _of_sequence),
    (tuple, _of_sequence),
)


# The hooks of `fully_shard` on one module lead to the parameters of all others. These belong to
# the engine, not to the function (`_rerun.fully_shard`). As operands of a region that does not use them,
# they would make autograd wait for the region before it returns their gradients.
_ENGINES = ("torch.distributed.fsdp.", "torch.distributed._composable")


@library.cached_weakly
def _sort_of_type(kind: type) -> Look:
    for base, sort in _SORTS:
        if issubclass(kind, base):
            return sort
    if Tensor in kind.__mro__:
        # What a user has set, by the names in code; a class of tensors keeps parts in all of them.
        is_torchs = f"{kind.__module__}.".startswith("torch.")
        return _of_namespace if is_torchs else _of_tensor
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    if "numpy.ndarray" in names:
        return _of_array
    if names[0].startswith(_ENGINES):
        return of_nothing
    if names[0] in _NAMESPACES:
        return _of_attributes
    is_own = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    is_known = is_own or library.is_standard(library.module_of(kind))
    return _of_wrapper if is_known else _of_object


def look_for(value: object, step: Step) -> Look:
    """The function that looks at an object which this step led to."""
    if trackers.is_tracker(value):
        return of_nothing  # its states are no constants: see there
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
        if file.startswith(library.OWN_FILES):
            return _of_wrapper
        # A root is what the user has chosen, even if a library wrote it.
        is_library = step[0] != "root" and library.is_library_file(file)
        return of_library_function if is_library else of_user_function
    if isinstance(value, types.ModuleType):
        is_library = library.is_library_module(value.__name__)
        return of_nothing if is_library else _of_namespace
    if isinstance(value, type):
        if not library.user_bases(value):
            return of_nothing
        return of_class if step[0] in AS_CLASS else of_called_class
    return _sort_of_type(type(value))


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
        owner = fun.__self__
        return "method", fun.__name__, owner if isinstance(owner, type) else type(owner)
    kind = type(fun)
    return "object", kind, code_key(getattr(kind, "__call__", None))  # noqa: B004


# What they hold comes and goes without them.
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


def is_compared(value: object) -> bool:
    """Whether it shows at each call that an object holds something else than it did."""
    if isinstance(value, set):
        return shows_members(cast("object", value))
    kind = type(value)
    if not is_simple(value) and _sort_of_type(kind) is _of_array:
        return ("bytes", "") in _of_array(value, set())
    return not (hasattr(kind, "__next__") or isinstance(value, _WEAK))


# Where the classes stand of which layers with an object each share a trace: those of locks and
# loggers hold no numbers, and ours are followed to what they wrap.
_ALIKE = frozenset({"logging", "_thread", __name__.partition(".")[0]})


def is_told_by_contents(value: object) -> bool:
    """Whether what the walk finds in an object tells it from others of its class.

    It finds nothing of what C code keeps to itself (a function of TorchScript, a generator of
    torch), and in the standard library's internals.
    """
    kind, look = type(value), look_for(value, ("item", 0))
    if look is of_nothing or kind.__module__.partition(".")[0] in _ALIKE:
        return True
    if look is _of_wrapper or look is _of_getter:
        return bool(look(value, set()))
    if look is _of_object and _has_native_state(kind):
        return False
    return is_compared(value)


@library.cached_weakly
def _has_native_state(kind: type) -> bool:
    """Whether the objects of a class hold more than attributes and slots, as pickling finds it."""
    places = len(slots(kind)) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ > object.__basicsize__ + places * _POINTER_BYTES


def hides_contents(value: object) -> bool:
    """Whether a value holds others that are compared nowhere, as an iterator does."""
    return not shows_contents(type(value)) and not is_simple(value)


@library.cached_weakly
def shows_contents(kind: type) -> bool:
    """Whether all contents of the values of a class are seen by the walk, whatever they are."""
    if not {set, frozenset, bytearray, array.array}.isdisjoint(kind.__mro__):
        return False
    if not hasattr(kind, "__iter__") or type in kind.__mro__:
        return True
    sort = _sort_of_type(kind)
    has_places = kind.__dictoffset__ != 0 or bool(slots(kind))
    return sort is not _of_wrapper and (sort is not _of_object or has_places)


def of_roots(roots: tuple[object, ...], _: set[str]) -> Content:
    return {("root", index): root for index, root in enumerate(roots)}


# Looked at again when more names are known.
BY_NAME = frozenset(
    {_of_namespace, of_class, of_called_class, of_library_function, of_user_function}
)
# Objects whose attribute reads are watched; of all others, what is looked at is covered.
WATCHED = frozenset({_of_module, _of_object, _of_attributes, _of_dict, _of_sequence})
