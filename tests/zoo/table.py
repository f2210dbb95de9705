"""The rows of the zoo as a page of Markdown."""

from collections.abc import Iterator, Sequence

import torch

from tests.zoo.members import version_of
from tests.zoo.rows import PEER, PLAIN, POLICIES, TOLERANCE, WAYS, Outcome, Row

INTRODUCTION = """\
# The zoo

Small random models of other libraries, whose layers are regions: by
[`interop.transformers.enable`](interop_transformers.md) where the model has its own hook for
checkpointing, else by [`modules.apply`](modules.md), with `engine="auto"`. Nothing is downloaded.
Measured with torch {version} on one thread of a CPU, in float32, by

```sh
python -m tests.zoo --markdown docs/zoo.md
```

in a clone with the extras `dev` and `zoo`. Each model takes two steps of gradient descent in train
mode, with its dropout, from the same weights and seeds: as it is, under two policies, and with
torch's own checkpoint (`gradient_checkpointing_enable`, or `torch.utils.checkpoint` around the
same layers). Outputs, gradients, buffers and the next random number are compared with the plain
model's after each step.

- **traced**: every layer is. **rerun**: the trace of a layer is refused, and it runs again in the
  backward. **failed**: an error. **not run**: the plain model raises, in these releases.
- **numbers**: equal to the bit; else the largest difference over the largest number of its tensor.
  Up to {tolerance:.0e} is rounding: where several layers read one tensor, autograd adds what they
  contribute in another order. Whatever is above is **DIFFERENT**.
- **held**: KiB that wait between forward and backward: of the plain model, under
  `nothing_saveable`, under `save_matmul_outputs` and, under **torch's**, with torch's checkpoint.
  That counts states of the CPU's generator, 5 KiB each, which are much beside layers so small.
- **torch's numbers**: torch's checkpoint beside the plain model. It runs a layer's forward again,
  and so changes buffers twice: those of BatchNorm differ.
"""

_HEAD = """\
| model | | numbers | plain | nothing | matmuls | torch's | torch's numbers |
|---|---|---|--:|--:|--:|--:|---|"""


def page(rows: Sequence[Row]) -> str:
    """The whole page."""
    head = INTRODUCTION.format(version=torch.__version__, tolerance=TOLERANCE)
    parts = [head, *by_library(rows), *reasons(rows), f"\n{summary(rows)}\n"]
    return "\n".join(parts)


def by_library(rows: Sequence[Row]) -> Iterator[str]:
    """A table for each library."""
    for library in dict.fromkeys(row.name.partition("/")[0] for row in rows):
        found = [row for row in rows if row.name.startswith(f"{library}/")]
        yield f"## {library} {version_of(library)}\n"
        yield _HEAD
        yield from map(line, found)
        yield f"\n{summary(found)}\n"


def line(row: Row) -> str:
    """A model's line of its table."""
    peer = row.outcomes.get(PEER, Outcome(error="?"))
    cells = [
        row.name.partition("/")[2],
        row.way,
        _numbers(max(row.of_regions, key=lambda each: each.difference, default=None)),
        *(_held(row.outcomes.get(way)) for way in (PLAIN, *POLICIES, PEER)),
        peer.error.partition(":")[0] or _numbers(peer).replace("DIFFERENT", "differs"),
    ]
    return f"| {' | '.join(cells)} |"


def _numbers(outcome: Outcome | None) -> str:
    if outcome is None or outcome.error:
        return ""
    if outcome.differs:
        return f"DIFFERENT: {outcome.worst.partition(' ')[0]}s"
    return f"{outcome.difference:.0e}" if outcome.difference else "to the bit"


def _held(outcome: Outcome | None) -> str:
    return (
        "" if outcome is None or outcome.error else f"{outcome.held_bytes / 2**10:.0f}"
    )


def reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Why models are not traced throughout, each reason once."""
    told: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.why:
            told.setdefault((row.way, row.why), []).append(row.name)
    if not told:
        return
    yield "## What is not traced\n"
    yield "| | reason | models |\n|---|---|---|"
    for (way, why), names in told.items():
        yield f"| {way} | {_cell(why)} | {', '.join(names)} |"


def _cell(reason: str) -> str:
    return reason.replace("|", "\\|").replace("<", "\\<")


def summary(rows: Sequence[Row]) -> str:
    """One sentence that counts."""
    counts = {way: sum(row.way == way for row in rows) for way in WAYS}
    told = [f"{len(rows)} models", f"{counts['traced']} traced"]
    told += [f"{counts['rerun']} by rerun", f"{counts['failed']} failed"]
    if counts["not run"]:
        told.append(f"{counts['not run']} not run")
    told.append(f"{sum(row.differs for row in rows)} different")
    return ", ".join(told) + "."
