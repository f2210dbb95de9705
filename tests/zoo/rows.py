"""What became of a model, as values that a file can keep."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PLAIN = "plain"
PEER = "torch's checkpoint"
#: Under which the layers of each model are regions, by their names.
POLICIES = ("nothing_saveable", "save_matmul_outputs")
#: The largest difference of a tensor, over its largest number, that is still rounding: where
#: several layers read one tensor, autograd adds what they contribute in another order.
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a model that was trained in one way.

    Attributes:
        error: what was raised; "" where it trained.
        difference: the largest between its numbers and the plain model's.
        worst: the number that differs the most; "" where none does.
        held_bytes: what waits between forward and backward.
        refusals: why layers run again instead of being traced.
    """

    error: str = ""
    difference: float = 0.0
    worst: str = ""
    held_bytes: int = 0
    refusals: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether the numbers are others than the plain model's."""
        return not self.difference <= TOLERANCE


@dataclasses.dataclass(frozen=True)
class Row:
    """A model and what came of it in each way: plain, under each policy, by the peer."""

    name: str
    outcomes: Mapping[str, Outcome]

    @property
    def of_regions(self) -> list[Outcome]:
        """Those of the model with regions."""
        return [self.outcomes[name] for name in POLICIES if name in self.outcomes]

    @property
    def peer_runs(self) -> bool:
        """Whether torch's own checkpoint trains the model."""
        return PEER in self.outcomes and not self.outcomes[PEER].error

    @property
    def way(self) -> str:
        """How the layers recompute, in a word of `WAYS`."""
        if self.outcomes[PLAIN].error:
            return "not run"
        if any(each.error for each in self.of_regions):
            return "failed"
        return "rerun" if any(each.refusals for each in self.of_regions) else "traced"

    @property
    def why(self) -> str:
        """What was raised, or why layers run again."""
        for each in (self.outcomes[PLAIN], *self.of_regions):
            if each.error or each.refusals:
                return each.error or each.refusals[0]
        return ""

    @property
    def differs(self) -> bool:
        """Whether a region gives other numbers than the plain model, silently."""
        return any(each.differs for each in self.of_regions)

    @property
    def is_wrong(self) -> bool:
        """Whether it differs, or the peer trains what regions do not."""
        return self.differs or (self.way == "failed" and self.peer_runs)


WAYS = ("traced", "rerun", "failed", "not run")


def read(path: Path) -> list[Row]:
    """The rows that a file keeps, one a line; none where there is no file."""
    if not path.exists():
        return []
    return [_row(json.loads(line)) for line in path.read_text().splitlines()]


def append(path: Path, rows: Iterable[Row]) -> None:
    """Adds rows to a file."""
    with path.open("a") as file:
        file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)


def _row(made: dict[str, Any]) -> Row:
    outcomes = {
        way: Outcome(**{**fields, "refusals": tuple(fields["refusals"])})
        for way, fields in made["outcomes"].items()
    }
    return Row(made["name"], outcomes)
