"""`python -m tests.benchmarks NAME`: runs one benchmark and prints its tables."""

import argparse
import importlib
import os
import sys

#: With the default thresholds glibc gives memory back to the system after every step, and
#: timings swing by 15 %. They are read when a process starts, for all contenders alike.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}
BENCHMARKS = {
    "budget": "tests.benchmarks.budget",
    "overhead": "tests.benchmarks.overhead",
    "random": "tests.benchmarks.random",
    "sharding": "tests.benchmarks.sharding",
    "reports": "tests.benchmarks.reports",
    "storage": "tests.benchmarks.storage",
}


def main() -> None:
    """Parses the command, settles the allocator, runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch, in an operator"
    )
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        command = [sys.executable, "-m", "tests.benchmarks", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | MALLOC)
    importlib.import_module(BENCHMARKS[arguments.name]).main(arguments.threads)


if __name__ == "__main__":
    main()
