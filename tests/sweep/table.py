"""The rows of a sweep as a page of Markdown."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from tests.sweep.judging import TRANSFORMS
from tests.sweep.rows import WAYS, Row

OUTCOMES = ("equal", "close", "excused", "FAILED")

_PROD = """\
for a plain tensor, torch tests whether a factor is zero and, if none is, divides the product by
each factor; for any other tensor, also under `torch.func.grad`, it multiplies the factors before
each one with those after it. A trace cannot test values, so a region has the bits of plain
`torch.func.grad`, not those of plain `.backward()`."""

#: Why cells are neither equal nor excused, by operator.
EXPLANATIONS = {"prod": _PROD, "masked.prod": _PROD}

INTRODUCTION = """\
# Operators

Every operator in torch's own list (`op_db`) that has a gradient in double precision on a CPU,
called through a region and compared with the plain call: {samples} samples each, under the
policies `nothing_saveable` and `everything_saveable`. torch {version}. This page is printed by

```sh
python -m tests.sweep --out docs/operators.md
```

in a clone with the `dev` extra, in about {minutes} minutes on one core.

- **traced**: works with `@remat` as it is. **preserve**: draws random numbers, and needs
  `rng="preserve"`; it is traced too. **rerun**: looks at the values of a tensor, or takes a sparse
  one, and needs `engine="rerun"`. An operator is counted by its most demanding sample.
- **equal**: the same bits under `.backward()` and `torch.func.grad`, and the same to rounding under
  the other transforms. **close**: the same to rounding, where equal bits were required. **excused**:
  the plain function raises too. **FAILED**: anything else.
"""


def page(rows: Sequence[Row], samples: int, minutes: float) -> str:
    """The whole page."""
    head = INTRODUCTION.format(
        samples=samples, version=torch.__version__, minutes=max(1, round(minutes))
    )
    parts = [
        head,
        "## How operators become regions\n",
        *ways(rows),
        "\n## Results by transform\n",
        *transforms(rows),
        "\n## Operators that need an option\n",
        *others(rows),
        "\n## Cells that are neither equal nor excused\n",
        *differences(rows),
        "\n## Excused cells\n",
        *excuses(rows),
    ]
    return "\n".join(parts) + "\n"


def ways(rows: Sequence[Row]) -> Iterator[str]:
    """How many operators need what."""
    counts = Counter(row.way for row in rows)
    yield "| way | operators |\n|---|--:|"
    for way in (*WAYS, "excused"):
        yield f"| {way} | {counts[way]} |"
    yield f"| all | {len(rows)} |"


def transforms(rows: Sequence[Row]) -> Iterator[str]:
    """How many cells of each transform had each outcome."""
    counts = Counter(
        (each.transform, each.cell.outcome) for row in rows for each in row.cells
    )
    yield f"| transform | {' | '.join(OUTCOMES)} |\n|---|{'--:|' * len(OUTCOMES)}"
    for name in TRANSFORMS:
        found = " | ".join(str(counts[name, outcome]) for outcome in OUTCOMES)
        yield f"| `{name}` | {found} |"


def others(rows: Sequence[Row]) -> Iterator[str]:
    """The operators that need an option, and why."""
    yield "| operator | way | reason |\n|---|---|---|"
    for row in rows:
        if row.way != "traced":
            yield f"| `{row.name}` | {row.way} | {cell_text(row.why)} |"
            continue
        again = {each.transform: each for each in row.cells if each.way == "rerun"}
        if again:
            reason = next(iter(again.values())).cell.reason
            names = ", ".join(again)
            yield f"| `{row.name}` | rerun for {names} | {cell_text(reason)} |"


def differences(rows: Sequence[Row]) -> Iterator[str]:
    """What is to be explained, and the explanations."""
    found = list(_with_outcome(rows, {"close", "FAILED"}))
    if not found:
        yield "None."
        return
    yield "| operator | outcome | transforms | reason |\n|---|---|---|---|"
    for name, outcome, reason, names in found:
        yield f"| `{name}` | {outcome} | {names} | {cell_text(reason)} |"
    named: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for name, *_ in found):
        if name in EXPLANATIONS:
            named.setdefault(EXPLANATIONS[name], []).append(f"`{name}`")
    for text, names in named.items():
        yield f"\n{', '.join(names)}: {text}"


def excuses(rows: Sequence[Row]) -> Iterator[str]:
    """Under which transforms plain torch raises."""
    yield "| operator | transforms | plain torch says |\n|---|---|---|"
    for name, _, reason, names in _with_outcome(rows, {"excused"}):
        yield f"| `{name}` | {names} | {cell_text(reason)} |"


def _with_outcome(
    rows: Sequence[Row], outcomes: set[str]
) -> Iterator[tuple[str, str, str, str]]:
    for row in rows:
        chosen = [each for each in row.cells if each.cell.outcome in outcomes]
        for outcome in dict.fromkeys(each.cell.outcome for each in chosen):
            same = [each for each in chosen if each.cell.outcome == outcome]
            names = dict.fromkeys(f"`{each.transform}`" for each in same)
            yield row.name, outcome, same[0].cell.reason, ", ".join(names)


def cell_text(reason: str) -> str:
    """A reason that fits into a cell."""
    return reason.replace("|", "\\|").replace("<", "\\<")[:160]
