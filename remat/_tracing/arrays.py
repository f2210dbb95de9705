"""Arrays of numpy of which a function makes tensors: these are constants of its trace.

As those of lists are: an array that the function reaches is compared at each call, up to a size,
and one that it makes is what it was in the trace.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat._captures.contents import MOST_BYTES
from remat._captures.places import held_bytes
from remat._torch import trees
from remat._tracing import refusals
from remat._user_lines import user_line
from remat.policies._by_op import function_name

#: What these return lies in the memory of the array. In a trace torch.from_numpy is the first.
SHARE_MEMORY = frozenset({torch.as_tensor, torch.asarray})


class Copied(NamedTuple):
    """An array that a torch function was given, and the copy that it got instead."""

    where: str
    array: Any
    copied: Any


def copied(
    func: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Any, list[Copied]]:
    """The arguments of a torch function, each array copied: a later change reaches no constant."""
    leaves, spec = trees.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if trees.is_array(leaf)]
    if not places:
        return args, kwargs, []
    where = f"torch.{function_name(func) or 'tensor'} at {user_line()}"
    copies: list[Copied] = []
    for place in places:
        array = leaves[place]
        if array.nbytes > MOST_BYTES:
            raise refusals.from_large_array(where, array.nbytes)
        leaves[place] = copy.copy(array)
        copies.append(Copied(where, array, leaves[place]))
    return *trees.unflatten(leaves, spec), copies


def require_unchanged(shared: Iterable[tuple[Copied, Tensor]]) -> None:
    """Refuses a change of memory that a tensor of the function shares with an array."""
    for (where, array, before), tensor in shared:
        is_alike = held_bytes(array) == held_bytes(before)
        if tensor._version or not is_alike:
            raise refusals.changes_array(where)
