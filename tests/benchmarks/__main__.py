"""`python -m tests.benchmarks [NAME ...]`: the suite, rows of it, or another benchmark."""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

import torch

#: With the default thresholds glibc gives memory back to the system after every step, and
#: timings swing by 15 %. They are read when a process starts, for all contenders alike.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}
OTHERS = {
    "budget": "tests.benchmarks.budget",
    "fit": "tests.benchmarks.fit",
    "fit-times": "tests.benchmarks.fit_times",
    "gpu": "tests.benchmarks.gpu",
    "gpu-fit": "tests.benchmarks.gpu_fit",
    "growth": "tests.benchmarks.growth",
    "llama": "tests.benchmarks.llama",
    "overhead": "tests.benchmarks.overhead",
    "peaks": "tests.benchmarks.peaks",
    "random": "tests.benchmarks.random",
    "recorded": "tests.benchmarks.recorded",
    "sharding": "tests.benchmarks.sharding",
    "sizes": "tests.benchmarks.sizes",
    "reports": "tests.benchmarks.reports",
    "rounding": "tests.benchmarks.rounding",
    "storage": "tests.benchmarks.storage",
    "tiles": "tests.benchmarks.tiles",
    "transformers": "tests.benchmarks.transformers",
}
#: Which of them are told what the command was told.
OPTIONS = {"gpu": ("dry_run", "quick"), "recorded": ("quick",)}
#: What these measure, each by a name of its own too.
ROWS_OF = {
    "nested": ("pinn", "maml", "hessian", "penalty", "third"),
    "orders": (
        *("grad", "grad(grad)", "grad(grad(grad))", "grad(vmap(grad))"),
        *("vmap(hessian)", "grad(laplacian)", "grad(jvp(jvp))", "jvp(grad)"),
    ),
}
COMMAND = "python -m tests.benchmarks"


def main(given: list[str] | None = None) -> int:
    """Parses the command and runs what it names; 1 where a bound is missed."""
    from tests.benchmarks.rows import ROWS

    rows = {row.name: row for row in ROWS}
    arguments = _parser(
        [*rows, *OTHERS, *ROWS_OF, *sum(ROWS_OF.values(), ())]
    ).parse_args(given)
    torch.set_num_threads(arguments.threads)
    picked = [rows[name] for name in arguments.names or rows if name in rows]
    others = [name for name in arguments.names if name in OTHERS]
    failed = _suite(picked, arguments) if picked else 0
    for name in others:
        options = {key: getattr(arguments, key) for key in OPTIONS.get(name, ())}
        measure = importlib.import_module(OTHERS[name]).main
        failed += measure(arguments.threads, **options) or 0
    for group, own in ROWS_OF.items():
        named = [name for name in arguments.names if name in (group, *own)]
        if named:
            module = importlib.import_module(f"tests.benchmarks.{group}")
            chosen = () if group in named else named
            module.main(arguments.threads, chosen, arguments.quick)
    return int(failed > 0)


def _parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Without a name, every row of the suite."
    )
    parser.add_argument("names", nargs="*", choices=[[], *names], metavar="NAME")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch, in an operator"
    )
    parser.add_argument("--json", type=Path, help="the file that gets all figures")
    parser.add_argument("--markdown", type=Path, help="the file that gets the tables")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, two rounds, nothing compiled"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="of gpu: print what would be measured"
    )
    return parser


def _suite(rows: list, arguments: argparse.Namespace) -> int:
    """Measures and prints rows; how many bounds failed."""
    from tests.benchmarks import suite, tables

    results, printed = [], [tables.heading()]
    print(printed[0])
    for row in rows:
        results.append(suite.measured(row, arguments.quick))
        printed.append(tables.markdown(results[-1]))
        print(printed[-1], flush=True)
    found = tables.as_json(results)
    printed.append(tables.conclusion(results))
    print(printed[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(printed))
    return len(found["failed"])


def _settled() -> None:
    """Starts again where the environment is not settled."""
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        command = [sys.executable, "-m", "tests.benchmarks", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ENVIRONMENT)


if __name__ == "__main__":
    _settled()
    sys.exit(main())
