"""What a trace leaves behind in the caller's objects: changes, and tensors of its own.

A trace runs the function once, on stand-ins. State that this changes is put back, and is an
error if a plain call would have changed it too. A stand-in that the function leaves somewhere
is an error as well: it has no data, and whoever uses it later would fail. What the walk over the
caller's objects reaches is put back by that (`_captures`). A library's own objects are not
walked; of these a cache is told from an attribute, and each is as if it had not been filled.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from typing import Any, cast

from torch import Tensor

from remat._captures.reads import Reads
from remat._captures.walk import Survey
from remat._errors import SideEffectError
from remat._graph.meta import TensorMeta
from remat._torch import modes
from remat._user_lines import warn_once

_Memoized: Any = type(functools.lru_cache(len))
_CONTAINERS = (dict, list, tuple)
_FILL = "If the first call fills a cache, make one inside `with remat.disabled():`."
_DEPTH = 4  # of containers in a cache or in a returned object, a heuristic


def undone(roots: tuple[object, ...]) -> contextlib.AbstractContextManager[Any]:
    """Undoes assignments that are made inside to objects that these roots reach."""
    stack = contextlib.ExitStack()
    stack.callback(Survey(roots).restore)
    return stack


@contextlib.contextmanager
def on_error(call: Callable[[], None]) -> Generator[None]:
    """Calls a function if the body raises, such as one that undoes what the body did."""
    try:
        yield
    except BaseException:
        call()
        raise


def require_no_effects(found: Survey, reads: Reads, where: str) -> None:
    """Refuses a function that changed state while it was traced."""
    changed = found.changes(reads)
    if changed is None:
        return
    raise SideEffectError.of(
        where=where,
        what=f"{changed} while it was traced.",
        why="A trace runs Python once: at the next call the change would not "
        "happen, and code that depends on it would see a stale value.",
        do="Return the new value instead, write it into a buffer in place "
        f'(self.buffer.copy_(value)), or use engine="rerun". {_FILL}',
    )


def require_nothing_left(
    fakes: Sequence[weakref.ref[Tensor]], statics: Sequence[object], where: str
) -> None:
    """Refuses a function that left a tensor of the trace where it outlives the trace."""
    left = _left_behind(fakes)
    if not left:
        return
    with modes.unseen_by_traces():
        for returned in statics:
            # The walk goes through objects in objects; referrers show what it does not enter.
            reached = Survey((returned,)).tensors
            for tensor in left:
                holders = _holders_of([tensor])
                if id(tensor) in reached or any(each is returned for each in holders):
                    raise _returned_inside(tensor, returned, where)
        raise _left_tensor_error(left[0], where)


def require_all_returned(
    statics: Sequence[object], where: str, arguments: Sequence[Tensor]
) -> None:
    """Refuses a run whose result has a gradient in what pytree takes for no tensor."""
    given = {id(each) for each in arguments if each.requires_grad}
    for each in statics:
        if type(each).__module__ != "builtins":
            for node, *_ in Survey((each,)).tensors.values():
                if node.value.grad_fn is not None or id(node.value) in given:
                    raise _returned_inside(node.value, each, where)


def tell_of_marks(survey: Survey, marks: Set[str], where: str) -> None:
    """Warns of attributes that a function sets on what stands for arguments and results."""
    for attribute in sorted(marks):
        line = survey.line_of(attribute)
        if line:
            warn_once(
                (where, line, attribute),
                where=where,
                what=f"{line} sets `{attribute}` on a result or an argument.",
                why="Others stand for these in a region, and the caller's do not get it.",
                do="Return it beside the tensor, or set it outside.",
            )


def _returned_inside(tensor: Tensor, returned: object, where: str) -> SideEffectError:
    name = type(returned).__name__
    do = (
        "Return the tensors, as a tuple or a dict, and make the object of them outside."
    )
    if dataclasses.is_dataclass(returned):
        do = f"Register it (torch.export.register_dataclass({name})), or return a tuple or a dict."
    return SideEffectError.of(
        where=where,
        what=f"returns a tensor, {TensorMeta.of(tensor)}, inside a {name}.",
        why="torch's pytree does not know that class, so the tensor would not be an output, and "
        "nothing of it would be recomputed.",
        do=do,
    )


def _holders_of(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """The objects that hold one of the tensors which were left, a few containers deep."""
    holders = _referrers(tensors)
    for _ in range(_DEPTH):
        yield from holders
        containers: list[Any] = [
            each for each in holders if isinstance(each, _CONTAINERS)
        ]
        holders = gc.get_referrers(*containers)


def _left_tensor_error(tensor: Tensor, where: str) -> SideEffectError:
    """The error for a tensor that was left, which `take_out` takes out of where it is."""
    holder = _where_left(tensor)
    do = f'Return the tensor from the function instead, or use engine="rerun". {_FILL}'
    for memoized in _caches_with([tensor]):
        # A partial function and an object that is called have no name.
        name = getattr(memoized, "__name__", type(memoized.__wrapped__).__name__)
        holder = f"the cache of `{name}`, which is now empty"
        do = (
            f"Call `{name}.__wrapped__` inside the function, which makes the tensor anew, "
            f'or call `{name}` outside and pass what it returns. Or use engine="rerun", '
            "which reads what the cache holds."
        )
    return SideEffectError.of(
        where=where,
        what=f"left a tensor of the trace, {TensorMeta.of(tensor)}, in {holder}.",
        why="It has no data, so its next use would fail; it was taken out again.",
        do=do,
    )


def _caches_with(tensors: Sequence[Tensor]) -> list[Any]:
    """The caches of functools that hold one of these tensors, in containers too."""
    return [each for each in _holders_of(tensors) if type(each) is _Memoized]


def _where_left(tensor: Tensor) -> str:
    referrers = _referrers([tensor])
    for referrer in referrers:
        if isinstance(referrer, dict):
            for key, value in referrer.items():  # pyright: ignore[reportUnknownVariableType]
                if value is tensor and isinstance(key, str):
                    return f"a name or attribute `{key}`"
    for referrer in referrers:
        if isinstance(referrer, types.CellType):
            return "a closure variable"
        if isinstance(referrer, (dict, list, set)):
            return f"a {type(referrer).__name__}"  # pyright: ignore[reportUnknownArgumentType]
    return "an object outside the function"


def _left_behind(fakes: Sequence[weakref.ref[Tensor]]) -> tuple[Tensor, ...]:
    """Those that something other than a frame or torch's own graph holds."""
    if all(fake() is None for fake in fakes):
        return ()
    # What only a cycle holds was not left anywhere, nor was what only torch's own graph
    # holds: operators that save their output do (torch 2.15).
    gc.collect()
    # No `:=` here: before Python 3.12 it would be a cell, which holds the last of them.
    alive = [each for each in [fake() for fake in fakes] if each is not None]
    holders = [each for each in _referrers(alive) if each is not alive]
    held = {id(thing) for holder in holders for thing in gc.get_referents(holder)}
    return tuple(each for each in alive if id(each) in held)


def _referrers(things: Sequence[object]) -> list[Any]:
    """The objects that hold one of these, but for frames."""
    # Python 3.13 finds the tuple of what is asked, too.
    asked = tuple(things)
    found = gc.get_referrers(*asked) if asked else []
    others = (each for each in found if each is not things and each is not asked)
    return [each for each in others if not isinstance(each, types.FrameType)]


def take_out(fakes: Sequence[weakref.ref[Tensor]]) -> None:
    """Takes these tensors of a trace out of what holds them, alone or in tuples.

    An entry of a dict goes, and so does an element of a list. An attribute, a module's buffer, a
    closure variable or a global becomes None, as one is that is filled when it is first asked for.
    A cache of functools is emptied.
    """
    tensors = _left_behind(fakes)
    if not tensors:
        return
    for memoized in _caches_with(tensors):
        memoized.cache_clear()
    holders = _referrers(tensors)
    tuples: list[Any] = [each for each in holders if type(each) is tuple]
    around = _referrers(tuples)
    held = {id(each) for each in (*tensors, *tuples)}
    for holder in itertools.chain(holders, around):
        if holder is tensors or holder is holders or holder is tuples:
            continue
        own: Any = getattr(holder, "__dict__", None)
        if isinstance(holder, dict):
            _take_out_of_dict(cast("dict[Any, Any]", holder), held)
        elif isinstance(holder, list):
            elements = cast("list[Any]", holder)
            elements[:] = [each for each in elements if id(each) not in held]
        elif isinstance(holder, types.CellType):
            holder.cell_contents = None
        elif type(own) is dict:  # a class has a proxy
            _take_out_of_dict(cast("dict[Any, Any]", own), held, is_namespace=True)


def _is_namespace_of(owner: object, holder: dict[Any, Any]) -> bool:
    """Whether a dict has an object's attributes, or a module's buffers, whose order is told."""
    if not isinstance(owner, dict):
        owner = getattr(owner, "__dict__", {})
    own, names = cast("dict[str, Any]", owner), ("_parameters", "_buffers", "_modules")
    return own is holder or any(own.get(name) is holder for name in names)


def _take_out_of_dict(
    holder: dict[Any, Any], held: set[int], *, is_namespace: bool = False
) -> None:
    found = [key for key, value in holder.items() if id(value) in held]
    if not found:
        return
    owners: list[Any] = gc.get_referrers(holder)
    is_namespace = is_namespace or any(
        _is_namespace_of(each, holder) for each in owners
    )
    for key in found:
        if is_namespace:
            holder[key] = None
        else:
            del holder[key]
