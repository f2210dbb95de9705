"""One operator judged: how it became a region, and what came of each transform."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.testing._internal.opinfo.core import OpInfo

from remat import ImplicitRandomnessError, TraceError, policies, remat
from tests.sweep.catalog import Case, cases, full_name
from tests.sweep.judging import TRANSFORMS, Cell, attempt, describe, expected, judge

#: Ways to make a region, tried in this order: a later one is for what an earlier refuses.
WAYS: dict[str, dict[str, Any]] = {
    "traced": {},
    "preserve": {"rng": "preserve"},
    "rerun": {"engine": "rerun", "rng": "preserve"},
}
POLICIES = (policies.nothing_saveable, policies.everything_saveable)


class Judged(NamedTuple):
    """One cell and where it stands: the transform, and how the region was made."""

    transform: str
    way: str
    cell: Cell


@dataclasses.dataclass(frozen=True)
class Row:
    """An operator and its cells.

    Attributes:
        name: the name of the operator and its variant.
        way: the last of `WAYS` that a sample needs to be called; "excused" where the
            plain function fails.
        why: what the ways before it said, or the plain function.
        cells: what came of each sample, policy and transform.
    """

    name: str
    way: str
    why: str
    cells: tuple[Judged, ...]


def judge_operator(op: OpInfo, samples: int) -> Row:
    """Judges the samples of an operator under both policies and every transform."""
    found: list[Judged] = []
    ways = {"traced": ""}
    excuses: list[str] = []
    for case in cases(op, samples):
        plain = {name: expected(case, name) for name in TRANSFORMS}
        if isinstance(plain["backward"], Exception):
            excuses.append(describe(plain["backward"]))
            continue
        way, why = way_of(case)
        ways[way] = why
        found += judge_case(case, way, plain)
    if not found:
        return Row(full_name(op), "excused", excuses[0], ())
    last = [way for way in WAYS if way in ways][-1]
    return Row(full_name(op), last, ways[last], tuple(found))


def way_of(case: Case) -> tuple[str, str]:
    """How a case becomes a region, and what the ways before it said."""
    why = ""
    for way, options in WAYS.items():
        region = remat(case.call, **options)
        found = attempt(TRANSFORMS["backward"], region, case.tensors)
        if not isinstance(found, (TraceError, ImplicitRandomnessError)):
            return way, why
        why = describe(found)
    raise AssertionError("a function that runs again is neither traced nor refused")


def judge_case(case: Case, way: str, plain: dict[str, Any]) -> Iterator[Judged]:
    """The cells of one case."""
    again = remat(case.call, **WAYS["rerun"])
    for policy in POLICIES if way != "rerun" else (None,):
        region = remat(case.call, policy=policy, **WAYS[way])
        for transform in TRANSFORMS:
            cell = judge(region, case, transform, plain[transform])
            if cell.reason.startswith(TraceError.__name__):
                # A derivative may branch on data where the function does not.
                said = cell.reason
                cell = judge(again, case, transform, plain[transform])
                cell = cell._replace(reason=cell.reason or said)
                yield Judged(transform, "rerun", cell)
            else:
                yield Judged(transform, way, cell)
