"""Keyed draws beside torch's own: `python -m tests.benchmarks random`.

4 M float32 numbers a row, each contender once a round. The aim is a ratio of 1.5 where
torch has kernels for stateless draws, and of 8 for the portable implementation. Normal
numbers miss the first on a CPU: torch's kernel of them, a row of its own, alone takes
about 3 times `torch.randn`, since it calls scalar functions. It is used for its bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from remat import random
from remat.random import _native, _portable
from tests.benchmarks.timing import interleaved, paired, table

COUNT = 1 << 22
ROUNDS = 15

Call = Callable[[], object]


@dataclass(frozen=True)
class Group:
    """One of torch's own functions, and what is measured beside it."""

    name: str
    base: Call
    draws: dict[str, Call]


def groups() -> list[Group]:
    """The draws, by what torch has for the same."""
    key, x, out = random.key(0), torch.randn(COUNT), torch.empty(1, COUNT)
    uniform: dict[str, Call] = {
        "uniform": lambda: random.uniform(key, (COUNT,)),
        "uniform, portable": lambda: _portable.uniform(out, key[None], 0.0, 1.0),
    }
    normal: dict[str, Call] = {
        "normal": lambda: random.normal(key, (COUNT,)),
        "normal, portable": lambda: _portable.normal(out, key[None], 0.0, 1.0),
    }
    if _native.has_kernels("cpu"):
        normal["normal, torch's kernel alone"] = lambda: torch.ops.aten._philox_normal_(
            torch.empty(1, COUNT), key[None, None], 0.0, 1.0
        )
    dropout: dict[str, Call] = {"dropout": lambda: random.dropout(key, x, 0.1)}
    return [
        Group("torch.rand", lambda: torch.rand(COUNT), uniform),
        Group("torch.randn", lambda: torch.randn(COUNT), normal),
        Group("F.dropout", lambda: F.dropout(x, 0.1), dropout),
    ]


def main(threads: int) -> None:
    """Prints one table for each of torch's functions."""
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {COUNT} numbers, {threads} thread(s)")
    for group in groups():
        times = interleaved({group.name: group.base, **group.draws}, ROUNDS)
        ratios = paired(times, times[group.name])
        print(table(f"Beside `{group.name}`", group.name, ratios))
