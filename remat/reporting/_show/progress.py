"""Shows the progress of a command: a bar on a terminal, else a line now and then."""

import importlib.util
import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

Advance = Callable[[str], None]
"""To be called after each step, with a few words about it."""

_NUM_LINES = 10  # how many lines stand for the bar where there is none


@contextmanager
def progress(title: str, total: int, stream: TextIO) -> Generator[Advance]:
    """Yields what is to be called after each of `total` steps.

    Only a terminal gets a bar, and only where rich is installed.
    """
    if not stream.isatty() or importlib.util.find_spec("rich") is None:
        steps = itertools.count(1)

        def print_line(note: str) -> None:
            step = next(steps)
            if step * _NUM_LINES // total > (step - 1) * _NUM_LINES // total:
                print(f"{title} {step}/{total} {note}", file=stream, flush=True)

        yield print_line
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = Progress.get_default_columns()
    after = (MofNCompleteColumn(), "{task.fields[note]}")
    with Progress(*columns, *after, console=Console(file=stream)) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda note: bar.update(task, advance=1, note=note)
