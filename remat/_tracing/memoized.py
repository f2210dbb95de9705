"""Finds the cache that holds a tensor, so that an error can name it.

It is most often the cache of a function under `functools.lru_cache`, whose contents cannot be
looked at from outside. A tensor that comes out of it cannot be found again at the next call,
and a tensor of a trace that goes into it has no data. Both are refused.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

from torch import Tensor

_Memoized: Any = type(functools.lru_cache(len))
_CONTAINERS = (dict, list, tuple)
_DEPTH = 4  # of containers inside a cache, a heuristic


def keeper_of(tensor: Tensor) -> Any:
    """The function in whose cache a tensor is, None if it is in none."""
    for each in gc.get_objects():
        if type(each) is _Memoized:
            around: list[Any] = [each.__wrapped__, each.__dict__]
            if holds(each, tensor, around):
                return each
    return None


def remedy(keeper: Any = None) -> str:
    """What to do about a tensor that cannot be found again.

    Args:
        keeper: the function in whose cache it is, if it is in one.
    """
    if keeper is None:
        return (
            "Pass it as an argument, or keep it in a closure, a global, a list, a dict "
            "or an attribute that the function names."
        )
    name = keeper.__name__
    return (
        f"Call `{name}.__wrapped__` inside the function, which makes the tensor anew, or "
        f"call `{name}` outside and pass what it returns."
    )


def holds(thing: object, tensor: Tensor, around: Sequence[object] = ()) -> bool:
    """Whether an object holds a tensor, a few containers deep; `around` is not looked into."""
    found = [
        each
        for each in gc.get_referents(thing)
        if not any(each is other for other in around)
    ]
    for _ in range(_DEPTH):
        if any(each is tensor for each in found):
            return True
        inner = [each for each in found if _is_part(each)]
        found = gc.get_referents(*inner) if inner else []
    return False


def _is_part(thing: object) -> bool:
    # Where its size is limited, a cache is a ring of links of a type without a name.
    return isinstance(thing, _CONTAINERS) or type(thing).__name__ == "_lru_list_elem"
