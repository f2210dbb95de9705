"""`python -m tests.sweep`: judges every operator and prints the table."""

import argparse
import sys
import time
from pathlib import Path

from tests.sweep.catalog import full_name, operators
from tests.sweep.rows import judge_operator
from tests.sweep.table import page


def main() -> int:
    """Sweeps, prints progress to stderr and the page to stdout or a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--match", default="*", help="names of operators, as a glob")
    parser.add_argument("--samples", type=int, default=2, help="1 or 2 of each")
    parser.add_argument("--out", type=Path, help="where to write the page")
    options = parser.parse_args()
    start = time.monotonic()
    rows = []
    chosen = operators(options.match)
    for count, op in enumerate(chosen, 1):
        rows.append(judge_operator(op, options.samples))
        failed = {each.cell for each in rows[-1].cells if each.cell.outcome == "FAILED"}
        sys.stderr.write(f"{count}/{len(chosen)} {full_name(op)} {rows[-1].way}\n")
        sys.stderr.writelines(f"    {cell.reason}\n" for cell in failed)
    text = page(rows, options.samples, (time.monotonic() - start) / 60)
    if options.out is None:
        sys.stdout.write(text)
    else:
        options.out.write_text(text)
    return int(any(e.cell.outcome == "FAILED" for row in rows for e in row.cells))


if __name__ == "__main__":
    sys.exit(main())
