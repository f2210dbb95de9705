"""The command line: `python -m remat demo`, `report`, `checklist`, `plan` and `compare`.

Standard output holds the result alone, as plain text unless it is a terminal; progress,
warnings and errors go to standard error, each on one line. Exit codes: 0, success; 1, the
command met an error or its claim did not hold; 2, wrong usage; 130, interrupted; 141, nobody
reads what it prints any more.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn, final

from remat._api import remat
from remat._calls.options import ENGINES
from remat._errors import RematError
from remat._plans.plan import plan
from remat._user_lines import line_of
from remat._version import __version__
from remat.reporting import checklist, compare, report
from remat.reporting._arguments import keywords, load_target, policy_of_word
from remat.reporting._demo.gpt import one_layer
from remat.reporting._demo.run import (
    demo_json,
    demo_table,
    first_loss_difference,
    run_demo,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        arguments: the words after the program's name, by default those of the process.
    """
    options = _command_parser().parse_args(arguments)
    try:
        with _one_line_warnings():
            code = options.run(options)
            sys.stdout.flush()
            return code
    except BrokenPipeError as error:
        if line_of(error):
            return _fail_command(_error_line(error))  # a pipe of the user's own
        # What is left to print would be flushed at exit, and raise again.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # open until the process ends
        return 141
    # By the user's code: the result is missing all the same.
    except SystemExit as error:
        return _fail_command(
            f"the code that was named called sys.exit({error.code!r}): guard what a "
            'script runs by if __name__ == "__main__"'
        )
    except Exception as error:  # noqa: BLE001  # what the user's code raises may be any
        return _fail_command(_error_line(error))
    except KeyboardInterrupt:
        return _fail_command("interrupted", code=130)


@final
class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a call."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        self.exit(2, f"remat: {message} (more: {self.prog} --help)\n")


def _demo(options: argparse.Namespace) -> int:
    rows = run_demo(options.steps, options.seed)
    print(demo_json(rows) if options.json else demo_table(rows))
    difference = first_loss_difference(rows)
    return 0 if difference is None else _fail_command(difference)


def _report(options: argparse.Namespace) -> int:
    with patience("running one step"):
        function, kwargs = _call(options)
        result = report(function, **kwargs)
    if options.html is not None:
        result.to_html(options.html)
    return _write_result(result, options)


def _checklist(options: argparse.Namespace) -> int:
    with patience("running some steps"):
        function, kwargs = _call(options)
        result = checklist(function, tokens_of=options.tokens_of, **kwargs)
    _write_result(result, options)
    return 0 if result.is_passed else 1


def _plan(options: argparse.Namespace) -> int:
    with patience("planning"):
        function, kwargs = _call(options)
        bounds = {"budget": options.budget, "peak": options.peak}
        result = plan(function, solver=options.solver, **bounds)(**kwargs)
    return _write_result(result, options)


def _compare(options: argparse.Namespace) -> int:
    with contextlib.redirect_stdout(sys.stderr):
        is_own = options.function is None
        function, kwargs = one_layer(options.device) if is_own else _call(options)
        peers = {name.rpartition(":")[2]: load_target(name) for name in options.peer}
        result = compare(function, kwargs, options.steps, peers=peers)
    return _write_result(result, options)


def _call(options: argparse.Namespace) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that a command line names, as it is to run, and its keyword arguments."""
    function = load_target(options.function, options.device)
    chosen = {k: getattr(options, k, None) for k in ("policy", "rng", "engine")}
    given = {name: each for name, each in chosen.items() if each is not None}
    function = remat(function, **given) if given else function
    return function, keywords(options.arguments, options.device)


def _write_result(result: Any, options: argparse.Namespace) -> int:
    """Writes a command's result where it is wanted: to a file, a terminal, or a pipe."""
    kind = "" if options.out is None else options.out.suffix.lower()
    if kind in _DRAWN:
        result.figure().savefig(options.out)
        return 0
    if options.out is None and not options.json and _show_richly(result):
        return 0
    text = result.to_json() if options.json or kind == ".json" else str(result)
    if options.out is None:
        print(text.encode(_encoding(), "backslashreplace").decode(_encoding()))
    else:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0


def _encoding() -> str:
    """That of the command's standard output; a stand-in that keeps text as it is has none."""
    return sys.stdout.encoding or "utf-8"


def _show_richly(result: Any) -> bool:
    """Prints to a terminal by rich, if it is installed and the result has a form for it."""
    if not sys.stdout.isatty() or not _encoding().lower().startswith("utf"):
        return False
    if importlib.util.find_spec("rich") is None or not hasattr(result, "__rich__"):
        return False
    from rich.console import Console

    Console().print(result)
    return True


@contextlib.contextmanager
def patience(what: str, after_s: float = 2.0) -> Generator[None]:
    """Says on standard error what a command takes so long for, if it does.

    What the user's code prints meanwhile goes there too, beside the result.
    """
    words = {"file": sys.stderr, "flush": True}
    timer = threading.Timer(after_s, print, (f"remat: {what} ...",), words)
    timer.daemon = True
    timer.start()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _one_line_warnings() -> Generator[None]:
    """Shows each warning of a command as one line without the place that raised it."""
    with warnings.catch_warnings():

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            print(f"remat: {' '.join(str(message).split())}", file=sys.stderr)

        warnings.showwarning = show
        yield


def _error_line(error: Exception) -> str:
    """An error as a command prints it: one line, with the place for one of the user's own."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    line = "" if isinstance(error, RematError) else line_of(error)
    return f"{text} ({line})" if line else text


def _fail_command(message: str, code: int = 1) -> int:
    print(f"remat: {message}", file=sys.stderr)
    return code


def _path_option(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise argparse.ArgumentTypeError(f"{text}: {reason}")
    return path


def _out_option(text: str, kinds: Sequence[str]) -> Path:
    path = _path_option(text)
    if path.suffix.lower() not in kinds:
        known = ", ".join(filter(None, kinds))
        raise argparse.ArgumentTypeError(f"{text}: what can be written is {known}")
    return path


def _policy_option(text: str) -> Any:
    try:
        return policy_of_word(text)
    except (RematError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(" ".join(str(error).split())) from error


def _budget_option(text: str) -> int | float | str:
    if text.isdecimal():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _whole_option(text: str, least: int) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"not a whole number from 0 on: {text!r}")
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}")
    return int(text)


_DRAWN = (".svg", ".png", ".pdf")
_WRITTEN = (".txt", ".json", ".md", "")
#: What a command runs, and what it says of itself.
_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
    "demo": (
        _demo,
        "train a byte-level GPT of about 1 M parameters, with dropout by random keys, on "
        "pydoc's help topics, once under each of several policies, and compare the loss, the "
        "bytes held between forward and backward, the peak and the step time",
    ),
    "report": (
        _report,
        "measure one forward of a function and its backward: what each region holds and "
        "recomputes, and where the bytes and the seconds go",
    ),
    "checklist": (
        _checklist,
        "ask seven questions of a function, answered by a few steps with its regions and "
        "without; the exit code is 1 if one fails",
    ),
    "plan": (
        _plan,
        "trace a function without running it, and decide what it saves so that a budget of "
        "bytes holds and as little as possible is recomputed; the JSON is for Plan.from_json",
    ),
    "compare": (
        _compare,
        "run a function, by default one layer of the demo's model, as one region under "
        "several policies, without remat, and under torch_remat where it is installed, or "
        "other peers",
    ),
}


def _command_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m remat",
        description="Recomputes activations where memory is short.",
    )
    parser.add_argument("--version", action="version", version=f"remat {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    own: dict[str, argparse.ArgumentParser] = {}
    for name, (run, text) in _COMMANDS.items():
        own[name] = commands.add_parser(name, help=text, description=text)
        own[name].set_defaults(run=run)
        text = "print JSON instead of the text"
        own[name].add_argument("--json", action="store_true", help=text)
        if name != "demo":
            nargs = "?" if name == "compare" else None
            drawn = _DRAWN if name in ("report", "compare") else ()
            _take_call(own[name], nargs, (*drawn, *_WRITTEN))
    for each in (own["report"], own["checklist"]):
        _take_options(each)
    count = functools.partial(_whole_option, least=1)
    seed = functools.partial(_whole_option, least=0)
    text = "training steps under each policy (default: %(default)s)"
    own["demo"].add_argument("--steps", type=count, default=120, metavar="N", help=text)
    text = "decides initial parameters, batches and dropout (default: %(default)s)"
    own["demo"].add_argument("--seed", type=seed, default=0, metavar="N", help=text)
    text = "count the tokens in this argument, not examples"
    own["checklist"].add_argument("--tokens-of", metavar="NAME", help=text)
    text = "also write the report to this file as a page"
    own["report"].add_argument("--html", type=_path_option, metavar="FILE", help=text)
    text = "2GiB, a number of bytes, 0.5 for a fraction of what is held without remat, or auto"
    bound = own["plan"].add_mutually_exclusive_group(required=True)
    bound.add_argument("--budget", type=_budget_option, metavar="SIZE", help=text)
    text = "likewise, of what lives at one time in a call and its backward"
    bound.add_argument("--peak", type=_budget_option, metavar="SIZE", help=text)
    text = "milp is exact if it finishes within a minute (default: %(default)s)"
    own["plan"].add_argument(
        "--solver", choices=("cut", "milp"), default="cut", help=text
    )
    text = "how many steps of each are timed (default: %(default)s)"
    own["compare"].add_argument(
        "--steps", type=count, default=10, metavar="N", help=text
    )
    text = (
        "a callable that takes the function and returns it as another library would run it; "
        "may be given several times"
    )
    own["compare"].add_argument(
        "--peer", action="append", default=[], metavar="MODULE:WRAPPER", help=text
    )
    return parser


def _take_call(
    own: argparse.ArgumentParser, nargs: str | None, kinds: Sequence[str]
) -> None:
    """Has a command take what to run, where, and where the result goes."""
    text = "model.py:loss, package.model:loss"
    own.add_argument("function", metavar="MODULE:FUNCTION", nargs=nargs, help=text)
    text = (
        "keyword arguments: x=8,256:bfloat16 is a random tensor (float32 if no dtype is "
        "given), 'ids=8,256:int64<1000' holds whole numbers below 1000, heads==4 is a Python "
        "literal, params.w=3,4 goes into a dict"
    )
    own.add_argument("arguments", metavar="NAME=SIZES", nargs="*", help=text)
    text = (
        "where the tensors are, and a class of modules is made; on meta nothing is computed "
        "(default: %(default)s)"
    )
    own.add_argument("--device", default="cpu", help=text)
    text = (
        "write to this file instead of printing; .svg, .png and .pdf hold the figure, where "
        "there is one, and .json the JSON"
    )
    kind = functools.partial(_out_option, kinds=kinds)
    own.add_argument("--out", type=kind, metavar="FILE", help=text)


def _take_options(own: argparse.ArgumentParser) -> None:
    """Has a command make one region of what it runs."""
    text = (
        "run the function as one region under this policy: one of remat.policies, "
        "'save_only_these_names(\"h\")', 'budget(\"20MiB\")', or MODULE:POLICY"
    )
    own.add_argument("--policy", type=_policy_option, metavar="POLICY", help=text)
    for name, values in (("rng", ("keys", "preserve")), ("engine", ENGINES)):
        text = "as one region, with this option of remat"
        own.add_argument(f"--{name}", choices=values, help=text)


if __name__ == "__main__":
    sys.exit(main())
