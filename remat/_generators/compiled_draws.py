"""Draws for graphs of torch.compile: one operator for a draw and its generator's state.

A program reads a generator's state and draws; a backward program sets the state, draws again, and
puts the generator's state back. A compiler orders steps by their inputs, and these have none of
each other's. So for a compiler each is one operator: a draw that also returns the state from which
it started, and takes that of the draw before it, which keeps their order; and a draw from a state
that is its input. The numbers are those that PyTorch draws outside a graph.

`torch._prims.rng_prims` has such operators for AOTAutograd's own recomputation. They cannot
be used here: AOTAutograd does not accept them in a graph that it has yet to differentiate.
"""

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat._generators import device_states
from remat._graph import operators
from remat._graph.values import Value
from remat._torch import schemas, tracer

# The state that the last draw of a graph started from.
_latest: weakref.WeakKeyDictionary[fx.Graph, Tensor] = weakref.WeakKeyDictionary()


def with_state(
    draw: Value, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[Any, Tensor]:
    """Draws as one step of the graph that is recorded; with the generator's state before."""
    graph = tracer.active_graph()
    before = _latest.get(graph)
    told = {"rng_device": device, "rng_in_place": draw.in_place, "rng_before": before}
    *drawn, state = _drawing(draw.op, again=False)(*args, **kwargs, **told)
    _latest[graph] = state
    return drawn[0] if len(drawn) == 1 else tuple(drawn), state


def from_state(
    draw: Value,
    state: Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> Any:
    """Draws again, as one step, from a state; the generator is left as it was found."""
    told = {"rng_device": device, "rng_in_place": draw.in_place, "rng_state": state}
    return _drawing(draw.op, again=True)(*args, **kwargs, **told)


@functools.cache
def _drawing(op: Any, *, again: bool) -> Any:
    """The operator that draws as another and also returns the state, or draws `again` from one."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        device = kwargs["rng_device"]
        if not again:
            found = device_states.get(device)
            return (*_results_of_draw(op, args, kwargs), found)
        with device_states.put_back({device}):
            device_states.put(kwargs["rng_state"], device)
            drawn = _results_of_draw(op, args, kwargs)
        return drawn[0] if len(drawn) == 1 else tuple(drawn)

    def fake(*args: Any, **kwargs: Any) -> Any:
        drawn = _results_of_draw(op, args, {**kwargs, "rng_in_place": False})
        if not again:
            return (*drawn, device_states.fake_state(kwargs["rng_device"]))
        return drawn[0] if len(drawn) == 1 else tuple(drawn)

    given, _, returned = (
        str(schemas.schema_of(op)).partition("(")[2].rpartition(") -> ")
    )
    returned = returned.removeprefix("(").removesuffix(")")
    joint = ", " if "*" in given else ", *, "
    given += f"{joint}Device rng_device, bool rng_in_place, "
    given += "Tensor rng_state" if again else "Tensor? rng_before"
    name = operators.full_name(op).replace("::", "_").replace(".", "_")
    return schemas.define(
        f"{'redraw' if again else 'draw'}_{name}",
        f"({given}) -> ({returned if again else f'{returned}, Tensor'})",
        draw,
        fake,
        () if again else (torch.Tag.nondeterministic_seeded,),
    )


def _results_of_draw(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The numbers; what `_drawing` adds to the arguments of `op` is not passed on to it."""
    own = {name: each for name, each in kwargs.items() if not name.startswith("rng_")}
    if kwargs["rng_in_place"]:
        drawn = operators.IN_PLACE_OF[op](torch.empty_like(args[0]), *args[1:], **own)
    else:
        drawn = op(*args, **own)
    outputs = [drawn] if isinstance(drawn, Tensor) else list(drawn)
    # If nothing is dropped, torch returns its argument itself.
    return [
        each.clone() if any(each is given for given in args) else each
        for each in outputs
    ]
