"""The stages between a trace and its programs, as one value.

`analyze`, `decide` and `cut` each take what the stage before gave, and give a value that is
not changed afterwards and prints. `Stages` holds these values in a row: whoever saves,
runs, plans, reports or warns reads them here.
"""

import dataclasses
from typing import Self, final

from remat._graph.joint import Joint
from remat._graph.values import label
from remat._partition.analysis import Analysis, Decisions, analyze, bytes_of
from remat._partition.cut import Cut, cut, permitted_members
from remat._partition.decide import decide
from remat.policies import AbstractPolicy
from remat.storage import AbstractStorage


@final
@dataclasses.dataclass(frozen=True)
class Stages:
    """What became of a function, stage by stage, from its trace to its cut."""

    #: Its joint graphs: for cotangents laid out like the outputs, then for other layouts.
    joints: tuple[Joint, ...]
    analysis: Analysis  # the first of these, with its classes of equal values
    decisions: Decisions  # which classes may be saved, and how
    cut: Cut  # what is saved, and what the backward runs

    @classmethod
    def of(cls, joints: tuple[Joint, ...], policy: AbstractPolicy | None) -> Self:
        """Runs the stages; without a policy nothing may be saved."""
        analysis = analyze(joints[0])
        decisions = {} if policy is None else decide(analysis, policy)
        members = permitted_members(analysis, decisions)
        found = cut(analysis, members, joints[0].gradients)
        return cls(joints, analysis, decisions, found)

    @property
    def joint(self) -> Joint:
        """The joint graph for cotangents laid out like the outputs."""
        return self.joints[0]

    @property
    def storages(self) -> tuple[AbstractStorage, ...]:
        """How each saved value waits; empty if all are kept as they are."""
        analysis = self.analysis
        storages = tuple(
            self.decisions[analysis.numbers[analysis.roots[index]]].storage
            for index in self.cut.saved
        )
        return () if all(storage.keeps for storage in storages) else storages

    @property
    def saved_bytes(self) -> int:
        """Bytes of the saved values, before their storages make them fewer."""
        return bytes_of(self.joint.graph, self.cut.saved)

    def __str__(self) -> str:
        """The joint graph, what may be saved, what is, and what runs again."""
        graph, views = self.joint.graph, self.analysis.views
        permitted = [
            f"{views[n]} in {save.storage!r}" for n, save in self.decisions.items()
        ]
        sections = {
            "decisions: may be saved": permitted,
            "cut: is saved": [label(graph, index) for index in self.cut.saved],
            "cut: is recomputed": [label(graph, index) for index in self.cut.repeats],
        }
        lines = ["joint graph:", str(graph)]
        for title, listed in sections.items():
            lines += [title, *(f"  {line}" for line in listed or ["nothing"])]
        return "\n".join(lines)
