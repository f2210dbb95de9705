"""One way to write a program from others: values are copied, and read what was copied.

Pruning, merging, cutting a joint graph in two and putting barriers into a backward are all
done by this.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import final

from remat._graph.values import Graph, Ref, Value, replace_refs


@final
class Building:
    """A program that is being written: its values so far, and their places by the other's."""

    def __init__(self, inputs: Iterable[Value], places: Mapping[int, int]) -> None:
        self.values = [*inputs]
        self.places = dict(places)

    def copy(self, index: int, value: Value) -> None:
        """Writes a step in place of the other program's step at `index`, which it may be."""
        copied = renumbered(value, self.places)
        self.places[index] = len(self.values)
        self.values.append(copied)

    def graph(self, num_inputs: int, outputs: Iterable[Ref | None]) -> Graph:
        """The program, with these outputs of the other one."""
        return Graph(tuple(self.values), num_inputs, self.refs(outputs))

    def refs(self, refs: Iterable[Ref | None]) -> tuple[Ref | None, ...]:
        """Uses of values of the other program as uses of what was written for them."""
        return tuple(
            None if ref is None else Ref(self.places[ref.index]) for ref in refs
        )


def renumbered(value: Value, places: Mapping[int, int]) -> Value:
    """A step that reads values at other places."""
    reads = (value.args, value.kwargs, value.state)
    args, kwargs, state = replace_refs(reads, lambda use: Ref(places[use]))
    return dataclasses.replace(value, args=args, kwargs=kwargs, state=state)


def prune(
    graph: Graph, keep: Iterable[int] = (), num_inputs: int | None = None
) -> Graph:
    """The graph with only the steps that its outputs or `keep` need.

    Its first `num_inputs` inputs stay; all of them, unless a number is given.
    """
    count = graph.num_inputs if num_inputs is None else num_inputs
    needed = {*range(count), *keep}
    needed.update(ref.index for ref in graph.outputs if ref is not None)
    for index in range(len(graph.values) - 1, -1, -1):
        if index in needed:
            needed.update(graph.values[index].uses)
    new = Building((), {})
    for index in sorted(needed):
        new.copy(index, graph.values[index])
    return new.graph(count, graph.outputs)
