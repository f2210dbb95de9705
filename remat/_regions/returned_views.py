"""Makes what a function returned from the outputs of its region.

A region gives each storage once. What the function returned may be such an output, a view
of it or of an argument, or either without its gradient: those are made from it anew, so that
they share their storage as they do where the function itself runs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import final

from torch import Tensor

from remat._graph.joint import View
from remat._graph.values import Graph
from remat._programs.program import Program
from remat._regions.waiting import resume_differentiably


def make_views(
    views: Sequence[View], outputs: Sequence[Tensor], operands: Sequence[Tensor]
) -> list[Tensor | None]:
    """What is returned, each from the tensor that it is or shares its storage with."""
    return [_make_view(view, outputs, operands) for view in views]


def _make_view(
    view: View, outputs: Sequence[Tensor], operands: Sequence[Tensor]
) -> Tensor | None:
    if view.output is not None:
        tensor = outputs[view.output]
    elif view.operand is not None:
        tensor = resume_differentiably(operands[view.operand])
    else:
        return None
    if view.is_cut or (view.is_detached and tensor.requires_grad):
        tensor = tensor.detach()
    if view.path is not None:
        (tensor,) = _view_program(_Path(view.path)).with_gradient((tensor,))
    return tensor


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """View operators, told apart by identity: to compare them takes longer than to run them."""

    graph: Graph

    def __hash__(self) -> int:
        return id(self.graph)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Path) and other.graph is self.graph


@functools.lru_cache(maxsize=1024)
def _view_program(path: _Path) -> Program:
    return Program(path.graph, "view")
