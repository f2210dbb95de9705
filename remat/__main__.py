"""The command line: `python -m remat demo`, `report`, `checklist`, `plan` and `compare`.

Standard output has the result alone, plain where it is no terminal; progress, warnings and
errors go to standard error, each in one line. Exit codes: 0 all is well; 1 the command ran
into an error, or its claim did not hold; 2 it was called wrongly; 130 it was interrupted.
"""

import argparse
import contextlib
import importlib.util
import sys
import threading
import warnings
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn, final

from remat._errors import RematError
from remat._lines import line_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        arguments: the words after the program's name, by default those of the process.
    """
    options = _parser().parse_args(arguments)
    try:
        with _one_line_warnings():
            return options.run(options)
    except Exception as error:  # noqa: BLE001  # what the user's code raises may be any
        return _fail(_told(error))
    except KeyboardInterrupt:
        return _fail("interrupted", code=130)


@final
class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a call."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        self.exit(2, f"remat: {message} (more: {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
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
    demo.set_defaults(run=_demo)
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
    _add_report(commands)
    _add_checklist(commands)
    _add_plan(commands)
    _add_compare(commands)
    return parser


_DRAWN = (".svg", ".png")
_ARGUMENTS = (
    "keyword arguments: x=8,256:bfloat16 is a random tensor (float32 if no dtype is "
    "named), ids=8,256:int64<1000 has whole numbers below 1000, heads==4 is a Python "
    "literal, params.w=3,4 goes into a dict"
)


def _add_function(command: argparse.ArgumentParser) -> None:
    """Has a command take a function and its arguments."""
    command.add_argument(
        "function", metavar="MODULE:FUNCTION", help="model.py:loss, package.model:loss"
    )
    command.add_argument("arguments", nargs="*", metavar="NAME=SIZES", help=_ARGUMENTS)


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="measure one step of a function: what each region holds and recomputes",
        description="Runs one forward and its backward, and reports where the bytes and "
        "the seconds go.",
    )
    report.set_defaults(run=_report)
    _add_function(report)
    report.add_argument(
        "--device",
        default="cpu",
        help="where the tensors are; on meta nothing is computed (default: %(default)s)",
    )
    report.add_argument(
        "--json", action="store_true", help="print JSON in place of the tables"
    )
    report.add_argument(
        "--out",
        type=_writable,
        metavar="FILE",
        help="write there instead: .svg and .png hold the figure, others the text or JSON",
    )
    report.add_argument(
        "--html", type=_writable, metavar="FILE", help="write the page there as well"
    )


def _add_checklist(commands: Any) -> None:
    checklist = commands.add_parser(
        "checklist",
        help="ask seven questions of a step, answered by measurement",
        description="Runs some steps of a function, with its regions and without, and "
        "says of each question whether it passes. The exit code is 1 where one fails.",
    )
    checklist.set_defaults(run=_checklist)
    _add_function(checklist)
    checklist.add_argument(
        "--device", default="cpu", help="where the tensors are (default: %(default)s)"
    )
    checklist.add_argument(
        "--json", action="store_true", help="print JSON in place of the table"
    )
    checklist.add_argument(
        "--out", type=_writable, metavar="FILE", help="write there instead of printing"
    )


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="decide what a function saves within a budget of bytes",
        description="Traces a function, runs nothing of it, and prints what to save so "
        "that a budget holds and as little as possible is recomputed.",
    )
    plan.set_defaults(run=_plan)
    _add_function(plan)
    plan.add_argument(
        "--budget",
        type=_budget,
        required=True,
        metavar="SIZE",
        help="2GiB, bytes, 0.5 for a part of what no remat saves, or auto",
    )
    plan.add_argument(
        "--solver",
        choices=("cut", "milp"),
        default="cut",
        help="milp is exact where it ends within a minute (default: %(default)s)",
    )
    plan.add_argument(
        "--device",
        default="cpu",
        help="where the tensors are; on meta none needs memory (default: %(default)s)",
    )
    plan.add_argument(
        "--json",
        action="store_true",
        help="print JSON for Plan.from_json in place of the table",
    )
    plan.add_argument(
        "--out", type=_writable, metavar="FILE", help="write there instead of printing"
    )


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="run a function under several policies, and peers, on this machine",
        description="Runs a function as one region under several policies, without "
        "remat, and under torch_remat where it is installed.",
    )
    compare.set_defaults(run=_compare)
    compare.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        nargs="?",
        help="what to run (default: one layer of the demo's model)",
    )
    compare.add_argument("arguments", nargs="*", metavar="NAME=SIZES", help=_ARGUMENTS)
    compare.add_argument(
        "--steps",
        type=_positive,
        default=10,
        metavar="N",
        help="how many steps of each are timed (default: %(default)s)",
    )
    compare.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="MODULE:WRAPPER",
        help="what takes the function and gives it as another library runs it; may be "
        "given several times",
    )
    compare.add_argument(
        "--device", default="cpu", help="where the tensors are (default: %(default)s)"
    )
    compare.add_argument(
        "--json", action="store_true", help="print JSON in place of the table"
    )
    compare.add_argument(
        "--out",
        type=_writable,
        metavar="FILE",
        help="write there instead: .svg and .png hold the figure, others the text or JSON",
    )


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


def _report(options: argparse.Namespace) -> int:
    from remat.reporting._arguments import keywords, load
    from remat.reporting._measure import report

    with _printing_apart(), patience("running one step"):
        function = load(options.function)
        found = report(function, **keywords(options.arguments, options.device))
    if options.html is not None:
        found.to_html(options.html)
    return _give(found, found.to_json() if options.json else str(found), options)


def _checklist(options: argparse.Namespace) -> int:
    from remat.reporting._arguments import keywords, load
    from remat.reporting._checklist import checklist

    with _printing_apart(), patience("running some steps"):
        function = load(options.function)
        found = checklist(function, **keywords(options.arguments, options.device))
    _give(found, found.to_json() if options.json else str(found), options)
    return 0 if found.is_passed else 1


def _plan(options: argparse.Namespace) -> int:
    from remat._plan import plan
    from remat.reporting._arguments import keywords, load

    with _printing_apart(), patience("planning"):
        function = load(options.function)
        kwargs = keywords(options.arguments, options.device)
        found = plan(function, budget=options.budget, solver=options.solver)(**kwargs)
    return _give(found, found.to_json() if options.json else str(found), options)


def _compare(options: argparse.Namespace) -> int:
    from remat.reporting._arguments import keywords, load
    from remat.reporting._compare import compare
    from remat.reporting._gpt import one_layer

    with _printing_apart():
        if options.function is None:
            function, kwargs = one_layer(options.device)
        else:
            function = load(options.function)
            kwargs = keywords(options.arguments, options.device)
        peers = {each.rpartition(":")[2]: load(each) for each in options.peer}
        found = compare(function, kwargs, options.steps, peers=peers)
    return _give(found, found.to_json() if options.json else str(found), options)


def _give(found: Any, text: str, options: argparse.Namespace) -> int:
    """Writes a result where it is wanted: in a file, on a terminal, or into a pipe."""
    if options.out is not None and options.out.suffix in _DRAWN and _can_draw(found):
        found.figure().savefig(options.out)
    elif options.out is not None:
        options.out.write_text(text + "\n")
    elif not options.json and sys.stdout.isatty() and _show_richly(found):
        return 0
    else:
        print(text)
    return 0


def _can_draw(found: Any) -> bool:
    return hasattr(found, "figure")


def _show_richly(found: Any) -> bool:
    """Prints by rich, if it is installed and the result has a form for it."""
    if importlib.util.find_spec("rich") is None or not hasattr(found, "__rich__"):
        return False
    from rich.console import Console

    Console().print(found)
    return True


def _printing_apart() -> contextlib.AbstractContextManager[Any]:
    """What the user's code prints goes to standard error, beside the result."""
    return contextlib.redirect_stdout(sys.stderr)


@contextlib.contextmanager
def patience(what: str, after_s: float = 2.0) -> Generator[None]:
    """Says on standard error what takes so long, if it does."""

    def say() -> None:
        print(f"remat: {what} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(after_s, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _one_line_warnings() -> Generator[None]:
    """Shows each warning as one line without the place that raised it."""
    with warnings.catch_warnings():

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            print(f"remat: {' '.join(str(message).split())}", file=sys.stderr)

        warnings.showwarning = show
        yield


def _told(error: Exception) -> str:
    """An error in one line; of one of the user's own, where it was raised."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    line = "" if isinstance(error, RematError) else line_of(error)
    return f"{text} ({line})" if line else text


def _fail(message: str, code: int = 1) -> int:
    print(f"remat: {message}", file=sys.stderr)
    return code


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise argparse.ArgumentTypeError(f"{text}: {reason}")
    return path


def _budget(text: str) -> int | float | str:
    if text.isdecimal():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


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
