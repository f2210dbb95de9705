"""What a trace reads: which attributes of which reached objects, library reads included.

While a recording is active, the Python classes of the surveyed objects carry a `__getattribute__`
that notes the name and goes on to the class's own. Only reads on the recording thread are noted,
and no attribute that the trace wrote first itself, such as what a context manager keeps for its
exit; a `__setattr__` notes such writes. Of classes that cannot get these methods (builtins, C
types), everything that their instances hold counts as read. Of tensors it is noted what they
are asked for and do not have.

A region inside the traced function may find its own trace in its cache, and then runs only its
generated check, which reads instance dictionaries. Such a read stands for the attributes that the
check's line goes on to look at: `LINE_READS` of the generated code.
"""

import contextlib
import functools
import sys
from collections.abc import Generator, Iterable
from contextvars import ContextVar
from typing import Any, final

from torch import Tensor, nn

from remat._captures.contents import WATCHED
from remat._captures.walk import EVERYTHING, Survey
from remat._torch.attributes import attributes_as

# The file name of generated checks, which tells their reads from the user's.
GENERATED = "<remat captures>"

# These look one name up in the instance dictionary: a read of that, not of all.
_LOOKUPS: frozenset[Any] = frozenset(
    getattr(kind, name).__code__
    for kind, name in (
        *((nn.Module, f"__{name}attr__") for name in ("get", "set", "del")),
        (functools.cached_property, "__get__"),
    )
)


@final
class Reads(dict[int, dict[str, None]]):
    """The names read, in order, by the id of the object or tensor they were read from."""

    def __init__(self, survey: Survey) -> None:
        super().__init__({each: {} for each in (*survey.nodes, *survey.tensors)})
        self._written: dict[int, set[str]] = {}

    def note(self, owner: object, names: Iterable[str]) -> None:
        """Notes a read of these names, less those that were written before."""
        known = self.get(id(owner))
        if known is not None:
            written = self._written.get(id(owner), ())
            known.update((name, None) for name in names if name not in written)

    def note_write(self, owner: object, name: str) -> None:
        if id(owner) in self:
            self._written.setdefault(id(owner), set()).add(name)


# The recordings of this thread, the outermost first.
_active: ContextVar[tuple[Reads, ...]] = ContextVar("_active", default=())


@contextlib.contextmanager
def recording(survey: Survey) -> Generator[Reads, None, None]:
    """Notes what this thread reads from the objects of `survey`, until the block ends."""
    reads = Reads(survey)
    is_watched: dict[type, bool] = dict.fromkeys((list, tuple, dict), False)
    with contextlib.ExitStack() as undo:
        for identity, node in survey.nodes.items():
            kind = node.kind
            if node.look in WATCHED and kind not in is_watched:
                is_watched[kind] = _watch(kind, undo)
            if node.look not in WATCHED or not is_watched[kind]:
                reads[identity][EVERYTHING] = None
        undo.enter_context(attributes_as(Tensor, __getattr__=_lacking))
        undo.callback(_active.reset, _active.set((*_active.get(), reads)))
        yield reads


def _lacking(tensor: Tensor, name: str) -> object:
    """What a tensor is asked for and does not have; torch itself asks for much."""
    asking = sys._getframe(1).f_globals  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    if not (f"{asking.get('__name__')}.".startswith("torch.") or name[:2] == "__"):
        for reads in _active.get():
            reads.note(tensor, (name,))
    return Tensor.__getattribute__(tensor, name)  # raises


def _watch(kind: type, undo: contextlib.ExitStack) -> bool:
    """Notes the reads and writes of a class's instances, where it permits, until it is undone."""
    if hasattr(kind.__dict__.get("__getattribute__"), "original"):
        return True  # by a recording around: traces are made one at a time
    try:
        undo.enter_context(attributes_as(kind, **_watchers_of(kind)))
    except TypeError:
        return False
    return True


def _watchers_of(kind: type) -> dict[str, Any]:
    """The methods that note reads and writes, and go on to the class's own."""
    # Not the watcher of a base class, or one read would be noted twice.
    inherited: tuple[Any, ...] = kind.__getattribute__, kind.__setattr__
    read, write = (getattr(each, "original", each) for each in inherited)

    def __getattribute__(self: object, name: str) -> object:
        if _active.get():
            _note_read(self, name)
        return read(self, name)

    def __setattr__(self: object, name: str, value: object) -> None:
        write(self, name, value)
        for reads in _active.get():
            reads.note_write(self, name)

    vars(__getattribute__)["original"], vars(__setattr__)["original"] = read, write
    return {"__getattribute__": __getattribute__, "__setattr__": __setattr__}


def _note_read(owner: object, name: str) -> None:
    names: tuple[str, ...] = (name,)
    if name == EVERYTHING:
        frame = sys._getframe(2)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        if frame.f_code in _LOOKUPS:
            return
        if frame.f_code.co_filename == GENERATED:
            names = frame.f_globals["LINE_READS"].get(frame.f_lineno, names)
    for reads in _active.get():
        reads.note(owner, names)
