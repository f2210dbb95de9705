"""`python -m tests.zoo`: trains every model of the zoo and prints the table.

The exit code is 1 if a model differs from the plain one, or if torch's own checkpoint trains
one that regions do not.
"""

import argparse
import sys
import warnings
from fnmatch import fnmatch
from pathlib import Path

import torch

from tests.zoo import rows
from tests.zoo.catalog import members
from tests.zoo.judging import judge
from tests.zoo.table import page


def main() -> int:
    """Prints progress to stderr; the page to stdout, and to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--match", default="*", help='names of models: "timm/*"')
    parser.add_argument("--markdown", type=Path, help="where to write the page")
    parser.add_argument(
        "--rows", type=Path, help="keeps rows: what stands there is not judged again"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [each for each in members() if fnmatch(each.name, options.match)]
    kept = {row.name: row for row in rows.read(options.rows)} if options.rows else {}
    for count, member in enumerate(chosen, 1):
        if member.name not in kept:
            kept[member.name] = judge(member)
            if options.rows:
                rows.append(options.rows, [kept[member.name]])
        row = kept[member.name]
        sys.stderr.write(f"{count}/{len(chosen)} {row.name} {row.way} {row.why}\n")
    found = [kept[member.name] for member in chosen]
    text = page(found)
    if options.markdown:
        options.markdown.write_text(text)
    sys.stdout.write(text)
    return int(any(row.is_wrong for row in found))


if __name__ == "__main__":
    sys.exit(main())
