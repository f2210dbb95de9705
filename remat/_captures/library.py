"""Whose code it is, and what it mentions.

Library code is torch, the standard library, what is installed in site-packages, and this
package; all other code is the user's, and is followed by the names that it mentions.
"""

import dis
import functools
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Set
from pathlib import Path as FilePath
from typing import Any, NamedTuple, TypeVar, cast

import torch

from remat._torch.modules import HOOKS_FOR_ALL, hooks_for_all

Subject = TypeVar("Subject", type, types.CodeType)
Answer = TypeVar("Answer")

# Folders end in a slash: a file beside them, such as remat_demo.py, is the user's.
OWN_FILES = (f"{FilePath(__file__).parent.parent}/", "<remat")
_LIBRARY_FILES = (
    *OWN_FILES,
    f"{FilePath(torch.__file__).parent}/",
    f"{sysconfig.get_path('stdlib')}/",
    "<frozen",
)
_IS_MADE = 1 << 9  # of classes that are made when code runs (`Py_TPFLAGS_HEAPTYPE`)


@functools.lru_cache(maxsize=4096)
def is_library_file(name: str) -> bool:
    """Whether a source file belongs to a library, and not to the user."""
    parts = FilePath(name).parts
    installed = "site-packages" in parts or "dist-packages" in parts
    return installed or name.startswith(_LIBRARY_FILES)


def is_standard(name: str) -> bool:
    """Whether a module, by its dotted name, belongs to the standard library."""
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names and top != "__main__"


def is_library_module(name: str) -> bool:
    """Whether a module, by its dotted name, belongs to a library."""
    if is_standard(name):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and is_library_file(file)


def users_hooks() -> dict[int, Any]:
    """The numbers of the registrations, and the user's hooks for all modules.

    A number is given once. Libraries, which register theirs anew at each use, are left out.
    """
    if not any(HOOKS_FOR_ALL):  # at each call of a region with modules
        return {}
    return {key: hook for key, hook in hooks_for_all().items() if _is_users(hook)}


def _is_users(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = cast("functools.partial[Any]", hook).func
    return not is_library_module(getattr(hook, "__module__", None) or "")


def module_of(kind: type) -> str:
    """The module that a class stands in, by its dotted name; "" where that is lent.

    A class that a function makes (`abc.ABCMeta(name, bases, {})`, `types.new_class`) has the
    name of that function's module, and is the caller's.
    """
    name = str(kind.__module__)
    is_local = "<locals>" in kind.__qualname__
    if is_local or not kind.__flags__ & _IS_MADE or not is_standard(name):
        return name
    found: object = sys.modules.get(name)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return name if found is kind else ""


def cached_weakly(fun: Callable[[Subject], Answer]) -> Callable[[Subject], Answer]:
    """Remembers what `fun` says of a class, or of code, for as long as that lives.

    A class holds its methods' closures, and so whatever the user's code holds.
    """
    known: weakref.WeakKeyDictionary[Subject, Answer] = weakref.WeakKeyDictionary()

    @functools.wraps(fun)
    def cached(subject: Subject) -> Answer:
        answer = known.get(subject)
        if answer is None:
            answer = known[subject] = fun(subject)
        return answer

    return cached


@cached_weakly
def user_bases(kind: type) -> tuple[int, ...]:
    """Where in the resolution order of a class the user's own classes stand."""
    return tuple(
        index
        for index, base in enumerate(kind.__mro__)
        if base is not object and not is_library_module(module_of(base))
    )


class Mentions(NamedTuple):
    """What code refers to by name, the code nested in it included."""

    globals: Set[str]  # names loaded from the globals
    assigned: Set[str]  # globals that it assigns
    #: All names, those of attributes and imports and those in texts (`getattr(x, "k")`) too.
    names: Set[str]
    #: Modules imported when the code runs, as (dots, dotted name).
    imports: Set[tuple[int, str]]
    #: Attributes asked of a global or a variable of a closure, as (name, attribute).
    asked: Set[tuple[str, str]]
    #: Attributes that may be missing: texts beside `getattr`, names beside a catch.
    tried: Set[str]


def line_of_name(code: types.CodeType, name: str) -> int | None:
    """The first line of code that mentions a name, or the text of one; None if none does."""
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        if isinstance(value, types.CodeType):
            found = line_of_name(value, name)
            if found is not None:
                return found
        elif isinstance(value, str) and value == name and instruction.positions:
            return instruction.positions.lineno
    return None


# What loads a value that stands outside of a function, by its name.
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_LOADS_FROM_CLOSURE = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF"})
# What follows a name of which an attribute is asked, by a dot or by `getattr`.
_ASKS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST"})
# What code names that goes on where an attribute is not there.
_TRIES = frozenset({"getattr", "hasattr", "vars", "__dict__"})
_CATCHES = frozenset({"AttributeError", "Exception", "BaseException"})


@cached_weakly
def mentions(code: types.CodeType) -> Mentions:
    loads: set[str] = set()
    assigned: set[str] = set()
    names: set[str] = set()
    imports: set[tuple[int, str]] = set()
    asked: set[tuple[str, str]] = set()
    tried: set[str] = set()
    pending = [code]
    while pending:
        part = pending.pop()
        names.update(part.co_names)
        texts = {c for c in part.co_consts if isinstance(c, str) and c.isidentifier()}
        names |= texts
        tried |= texts if _TRIES & {*part.co_names} else set()
        tried |= {*part.co_names} if _CATCHES & {*part.co_names} else set()
        pending += [c for c in part.co_consts if isinstance(c, types.CodeType)]
        # An import follows the loads of its number of dots and of its list of names.
        before: deque[object] = deque([0, 0], maxlen=2)
        last = ""
        for instruction in dis.get_instructions(part):
            given = instruction.argval
            if last and instruction.opname in _ASKS and isinstance(given, str):
                asked.add((last, given))
            last = ""
            if instruction.opname in _LOADS | _LOADS_FROM_CLOSURE:
                last = str(given)
                if instruction.opname in _LOADS:
                    loads.add(last)
            elif instruction.opname == "STORE_GLOBAL":
                assigned.add(given)
            elif instruction.opname == "IMPORT_NAME":
                imports.add((cast("int", before[0]), given))
            before.append(given)
    return Mentions(loads, assigned, names, imports, asked, tried)
