"""The command line: `python -m remat demo`.

Exit codes: 0 all is well; 1 the command ran into an error, or its claim did not hold; 2
the command was called wrongly; 130 it was interrupted.
"""

import argparse
import sys
from collections.abc import Sequence

from remat._errors import RematError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        arguments: the words after the program's name, by default those of the process.
    """
    options = _parser().parse_args(arguments)
    try:
        return _demo(options)
    except RematError as error:
        return _fail(f"{type(error).__name__}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        return _fail("interrupted", code=130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m remat",
        description="Recomputes activations where memory is short.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small GPT under several policies and compare memory and time",
        description="Trains a byte-level GPT of about 1 M parameters, with dropout by "
        "random keys, on pydoc's help topics under torch.func.grad, once under each policy, then prints the loss, "
        "the bytes held between forward and backward, the peak and the step time.",
    )
    demo.add_argument(
        "--steps",
        type=_positive,
        default=120,
        metavar="N",
        help="training steps under each policy (default: %(default)s)",
    )
    demo.add_argument(
        "--seed",
        type=_natural,
        default=0,
        metavar="N",
        help="decides initial parameters, batches and dropout (default: %(default)s)",
    )
    demo.add_argument(
        "--json",
        action="store_true",
        help="print JSON in place of the table",
    )
    return parser


def _demo(options: argparse.Namespace) -> int:
    # Imported here, so that --help and a wrong option answer without loading torch.
    from remat.reporting._demo import run_demo
    from remat.reporting._demo_text import (
        demo_json,
        demo_table,
        first_loss_difference,
    )

    rows = run_demo(options.steps, options.seed)
    print(demo_json(rows) if options.json else demo_table(rows))
    difference = first_loss_difference(rows)
    return 0 if difference is None else _fail(str(difference))


def _fail(message: str, code: int = 1) -> int:
    print(f"remat: {message}", file=sys.stderr)
    return code


def _positive(text: str) -> int:
    if (number := _natural(text)) == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"not a whole number from 0 on: {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
