"""Operators that are asked only for those of their results which are read.

The backward of a convolution or of a norm takes a mask of the gradients that it computes: each
costs as much as the forward. A trace asks for all that could be wanted there, and a backward that
is asked for some, or a recomputation that needs one of them, reads fewer. Autograd sets the mask
anew for each backward. The graph of a program keeps the traced mask, so that equal steps of two
programs are known to be equal (`_graph.numbering`).
"""

import dataclasses
import functools
import operator
from typing import Any

from remat._graph.values import Graph
from remat._torch import schemas

_MASK = "output_mask"


def narrowed(graph: Graph) -> Graph:
    """The graph with each mask of results narrowed to those that are read."""
    masked = {
        index: place
        for index, value in enumerate(graph.values)
        if (place := _place_of_mask(value.op)) is not None and place < len(value.args)
    }
    if not masked:
        return graph
    read = {
        (value.args[0].index, value.args[1])
        for value in graph.values
        if value.op is operator.getitem
    }
    values = list(graph.values)
    for index, place in masked.items():
        args = list(values[index].args)
        asked = enumerate(args[place])
        args[place] = [is_asked and (index, k) in read for k, is_asked in asked]
        values[index] = dataclasses.replace(values[index], args=tuple(args))
    return dataclasses.replace(graph, values=tuple(values))


@functools.cache
def _place_of_mask(op: Any) -> int | None:
    """Which argument of one of torch's operators says which of its results it computes."""
    if not isinstance(op, schemas.OpOverload) or op.namespace != "aten":
        return None
    names = [each.name for each in schemas.schema_of(op).arguments]
    return names.index(_MASK) if _MASK in names else None
