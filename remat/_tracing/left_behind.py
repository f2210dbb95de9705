"""Tensors of a trace that a function has left where they outlive it.

They have no data: whoever meets one later fails, without a region too. What the walk over the
caller's objects reaches is put back by that (`_captures`). A library's own objects are not
walked; of these a cache is told from an attribute, and each is as if it had not been filled.
"""

import contextlib
import gc
import itertools
import types
import weakref
from collections.abc import Generator, Sequence
from typing import Any, cast

from torch import Tensor


def left_behind(fakes: Sequence[weakref.ref[Tensor]]) -> tuple[Tensor, ...]:
    """Those that something other than a frame or torch's own graph holds."""
    if all(fake() is None for fake in fakes):
        return ()
    # What only a cycle holds was not left anywhere, nor was what only torch's own graph
    # holds: operators that save their output do (torch 2.15).
    gc.collect()
    # No `:=` here: before Python 3.12 it would be a cell, which holds the last of them.
    alive = [each for each in [fake() for fake in fakes] if each is not None]
    holders = [each for each in referrers(alive) if each is not alive]
    held = {id(thing) for holder in holders for thing in gc.get_referents(holder)}
    return tuple(each for each in alive if id(each) in held)


@contextlib.contextmanager
def taken_out_on_error(fakes: Sequence[weakref.ref[Tensor]]) -> Generator[None]:
    """Takes these tensors of a trace out of whatever holds them, if the body raises."""
    try:
        yield
    except Exception:
        _take_out(left_behind(fakes))
        raise


def referrers(things: Sequence[object]) -> list[Any]:
    """The objects that hold one of these, but for frames."""
    found = gc.get_referrers(*things) if things else []
    return [each for each in found if not isinstance(each, types.FrameType)]


def _take_out(tensors: Sequence[Tensor]) -> None:
    """Takes tensors out of what holds them, alone or in tuples.

    An entry of a dict goes, and so does an element of a list. An attribute, or a module's
    global, becomes None, as one is that is filled when it is first asked for.
    """
    holders = referrers(tensors)
    tuples: list[Any] = [each for each in holders if type(each) is tuple]
    around = referrers(tuples)
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
        elif type(own) is dict:  # a class has a proxy
            _take_out_of_dict(cast("dict[Any, Any]", own), held, is_namespace=True)


def _take_out_of_dict(
    holder: dict[Any, Any], held: set[int], *, is_namespace: bool = False
) -> None:
    found = [key for key, value in holder.items() if id(value) in held]
    if not found:
        return
    owners: list[Any] = gc.get_referrers(holder)
    is_namespace = is_namespace or any(
        getattr(each, "__dict__", None) is holder for each in owners
    )
    for key in found:
        if is_namespace:
            holder[key] = None
        else:
            del holder[key]
