"""Keyed draws beside torch's own: `python -m tests.benchmarks.random`.

Each row is the best of several runs of both, in turn, on one thread, of 4 M numbers. The
aim is a ratio of 1.5 with torch's kernels and of 8 without. Normal numbers miss it on a
CPU with torch 2.15: torch's kernel of them, the last row, alone takes 3 times
`torch.randn`, because it calls scalar functions. It is used for the sake of its bits.
"""

import importlib
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from remat import _compat, random
from remat.random import _portable

COUNT = 1 << 22
ROUNDS = 9

Call = Callable[[], object]


def best_ms(calls: tuple[Call, Call], rounds: int = ROUNDS) -> tuple[float, float]:
    """The least time of each of two calls, taken in turn."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds + 1):
        for place, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[place] = min(best[place], 1e3 * (time.perf_counter() - start))
    return best[0], best[1]


def cases() -> dict[str, tuple[Call, Call, float]]:
    """Name -> (ours, torch's, the ratio that is aimed at)."""
    key, x, out = random.key(0), torch.randn(COUNT), torch.empty(1, COUNT)
    kernels = _compat.has_philox("cpu")
    limit = 1.5 if kernels else 8.0

    def rand() -> object:
        return torch.rand(COUNT)

    def randn() -> object:
        return torch.randn(COUNT)

    found: dict[str, tuple[Call, Call, float]] = {
        "uniform": (lambda: random.uniform(key, (COUNT,)), rand, limit),
        "normal": (lambda: random.normal(key, (COUNT,)), randn, limit),
        "dropout": (
            lambda: random.dropout(key, x, 0.1),
            lambda: F.dropout(x, 0.1),
            limit,
        ),
        "uniform, portable": (
            lambda: _portable.uniform(out, key[None], 0.0, 1.0),
            rand,
            8.0,
        ),
        "normal, portable": (
            lambda: _portable.normal(out, key[None], 0.0, 1.0),
            randn,
            8.0,
        ),
    }
    if kernels:
        draws = importlib.import_module("torch.func._random")
        found["normal, torch's kernel"] = (
            lambda: draws.normal(key, (COUNT,)),
            randn,
            limit,
        )
    return found


def table() -> str:
    """One line a draw: times and their ratio, measured now."""
    lines = [
        f"torch {torch.__version__}, {COUNT} numbers, one thread",
        f"{'draw':24}{'ours':>10}{'torch':>10}{'ratio':>8}{'aim':>8}",
    ]
    for name, (ours, theirs, limit) in cases().items():
        one, other = best_ms((ours, theirs))
        times = f"{one:7.1f} ms{other:7.1f} ms"
        lines.append(f"{name:24}{times}{one / other:6.2f} x{limit:6.1f} x")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    sys.stdout.write(table())


if __name__ == "__main__":
    main()
