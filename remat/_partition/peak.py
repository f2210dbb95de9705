"""The most bytes that live at one time in a forward and its backward, by replay.

Both programs are walked step by step, as they will run: a step allocates storages, and a
storage is freed after its last use. The results of operators count. Arguments belong to the
caller and do not. Of memory inside one kernel, that of draws from keys is known, and all of it
where kernels are measured.
"""

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import final

from remat._graph import operators
from remat._graph.joint import Joint
from remat._graph.values import Graph, last_uses, roots
from remat._partition.analysis import bytes_of
from remat._partition.costs import Workspace, known_workspace
from remat._partition.cut import Cut, backward_graph, forward_graph, unique_outputs

_Storage = tuple[int, int]
"""A storage: the value that made it, and which output of it."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Peaks:
    """The most that a call and its backward hold and make, in bytes."""

    forward: int  # in the forward, what it saves and returns included
    #: In the backward, what waited for it and what comes back included; what the forward
    #: returned is not, unless it waited.
    backward: int
    shared: int  # of what waits, what the forward also returned: its caller may hold it
    returned: int  # what the forward returned and does not wait

    @property
    def of_step(self) -> int:
        """The peak of a call and its backward whose outputs live as long."""
        return max(self.forward, self.returned + self.backward)


def peaks_of(
    joint: Joint,
    found: Cut,
    held_bytes: int,
    changed_bytes: int = 0,
    restored_bytes: int = 0,
    workspace: Workspace = known_workspace,
) -> Peaks:
    """The peaks of a call under `.backward()`, with `held_bytes` between its two halves.

    Of these, `changed_bytes` wait in another form: before the backward begins all come back,
    as `restored_bytes`, and then the other form is let go. The backward lets go of each value
    after its last use. `workspace` says what kernels hold inside.
    """
    forward, _ = forward_graph(joint, found.saved)
    backward = backward_graph(joint, found, found.saved, joint.gradients)
    unique, *_ = unique_outputs(backward, len(found.saved))
    owners = roots(joint.graph)  # whoever holds a view holds all of its storage
    handed_out = {owners[ref.index] for ref in joint.outputs}
    freed = {
        place: bytes_of(joint.graph, [index])
        for place, index in enumerate(found.saved)
        if index not in handed_out
    }
    beside = max(0, peak_of_run(unique, freed, workspace) - changed_bytes)
    return Peaks(
        peak_of_run(forward, workspace=workspace),
        held_bytes + restored_bytes + beside,
        bytes_of(joint.graph, handed_out.intersection(found.saved)),
        bytes_of(joint.graph, handed_out.difference(found.saved)),
    )


def peak_of_run(
    graph: Graph,
    freed_inputs: Mapping[int, int] = MappingProxyType({}),
    workspace: Workspace = known_workspace,
) -> int:
    """The most bytes of storages that a program made and that live at one time.

    `freed_inputs` are the bytes of inputs that end with the last use of them and their
    views; they count less than nothing, as they are there before.
    """
    last, owners = last_uses(graph), roots(graph)
    uses = Counter[_Storage]()
    live = peak = 0
    for index, value in enumerate(graph.values):
        if value.op is not operators.constant:
            made = dict(_storages(graph, owners[index]))
            if value.op is not None:
                live += sum(size for each, size in made.items() if not uses[each])
            uses.update([*made])
            inside = workspace(value, graph.values)
            if value.is_redraw and value.state is not None:
                # The generator's own, and what is there when it is put back.
                inside += 2 * bytes_of(graph, [value.state.index])
            peak = max(peak, live + inside)
        for freed in last.get(index, ()):
            for each, size in _storages(graph, owners[freed]):
                uses[each] -= 1
                is_input = graph.values[each[0]].op is None
                size = freed_inputs.get(each[0], 0) if is_input else size
                live -= 0 if uses[each] else size
    return peak


def _storages(graph: Graph, owner: int) -> Iterator[tuple[_Storage, int]]:
    """The storages that a value, or a tuple of values, keeps alive, each with its bytes."""
    value = graph.values[owner]
    maker, first = owner, 0
    if value.op is operator.getitem:
        maker, first = value.args[0].index, value.args[1]
    metas = value.meta if isinstance(value.meta, tuple) else (value.meta,)
    for place, meta in enumerate(metas, first):
        if meta is not None:
            yield (maker, place), meta.size_bytes
