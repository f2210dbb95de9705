"""The engine's only hook for code that watches a run, such as reports and checklists.

A dispatch mode hears every operator that runs on a thread, but not on whose behalf. A
`Watcher` is a dispatch mode that programs also tell which of their steps comes next.
Without an active dispatch mode, no watcher is looked for.
"""

import abc
import contextlib
from collections.abc import Callable, Sequence

from torch import Tensor

from remat._graph.values import Graph
from remat._torch.modes import DispatchMode, dispatch_modes, is_watched


class Watcher(DispatchMode):
    """Hears operators as any dispatch mode does, and which step of a program makes each."""

    @abc.abstractmethod
    def following(
        self, graph: Graph, inputs: Sequence[Tensor], /
    ) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """Around a run of the program of a graph on these inputs.

        Yields:
            What the run calls before each step, with the step's index in its graph.
        """


def following(
    graph: Graph, inputs: Sequence[Tensor]
) -> contextlib.AbstractContextManager[Callable[[int], None] | None]:
    """`Watcher.following` of the innermost watcher of this thread; None where there is none."""
    for mode in reversed(dispatch_modes() if is_watched() else ()):
        if isinstance(mode, Watcher):
            return mode.following(graph, inputs)
    return contextlib.nullcontext()
