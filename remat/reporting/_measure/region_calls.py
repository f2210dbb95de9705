"""The calls of regions in one step: which call each run of a program belongs to."""

import functools
from collections.abc import Hashable, Sequence
from typing import final

from remat.reporting._held import Node
from remat.reporting._measure.traced import RegionCall, RegionTrace
from remat.reporting._measure.watch import ProgramRun, StepListener


@final
class RegionCalls:
    """All calls of regions that one backward will meet."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        # By the place of the node.
        self.at = {k: RegionCall(k, node) for k, node in enumerate(nodes) if node.call}
        rows: dict[Hashable, list[RegionCall]] = {}
        traces: dict[int, RegionTrace] = {}
        for call in self.at.values():
            row = rows.setdefault(call.key, [])
            call.number = len(row)
            row.append(call)
            region = call.call.region.explained
            if region is not None:
                if id(region) not in traces:
                    traces[id(region)] = RegionTrace(region, call.call.roots)
                call.traced = traces[id(region)]
                call.traced.calls.append(call)
        # The calls of one code under one policy together.
        self.rows = list(rows.values())
        self.traces = list(traces.values())
        self._name_apart()

    def _name_apart(self) -> None:
        """Different functions of one name, and one under several policies, get a number."""
        names: dict[str, list[list[RegionCall]]] = {}
        for row in self.rows:
            names.setdefault(row[0].name, []).append(row)
        for rows in names.values():
            for number, row in enumerate(rows if len(rows) > 1 else (), start=1):
                for call in row:
                    call.name = f"{call.name} #{number}"

    def callers(self, runs: Sequence[ProgramRun]) -> dict[int, RegionCall]:
        """For the id of each run of a region's program, the call.

        Forwards run in the order of the calls; for a backward, the run has its node.
        """
        waiting = {id(each.forward_graph): iter(each.calls) for each in self.traces}
        found: dict[int, RegionCall] = {}
        for run in runs:
            if run.phase == "forward":
                call = next(waiting.get(id(run.graph), iter(())), None)
            else:
                call = None if run.node is None else self.at.get(run.node)
            if call is not None:
                found[id(run)] = call
        return found


def hook(nodes: Sequence[Node], listener: StepListener) -> None:
    """Tells a listener, when a backward runs, which node, as of a region's call, it came to."""
    for place, node in enumerate(nodes):
        node.raw.register_prehook(functools.partial(listener.enter, place))
