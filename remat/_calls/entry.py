"""One trace that is kept: how to know that it still holds, and how to call it.

An entry belongs to a function's *code* and to a signature; it holds nothing of the user's
strongly. Each call checks what the trace rested on (`_captures`), fetches the captured
tensors anew, and binds the region.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor

from remat._captures.covered import Covered
from remat._captures.places import Step
from remat._captures.walk import refresh_hooked
from remat._generators.streams import exists
from remat._graph.meta import layout_of
from remat._partition.stages import Stages
from remat._programs.barriers import opaque_copy
from remat._regions.forwards import FastPath, make_views
from remat._regions.functions import Roots
from remat._regions.protocol import Call
from remat._regions.rules import bind_all, run_fast
from remat._regions.traced import TracedRegion
from remat._switches.blocks import is_first_order
from remat._switches.numerics import Numerics
from remat._torch import levels, trees
from remat._tracing.arguments import require_apart
from remat._tracing.open_sizes import Template

clock = itertools.count()  # of uses


@final
@dataclasses.dataclass
class Entry:
    """A kept trace."""

    #: What it rested on, and where its captured tensors are found.
    covered: Covered
    #: Whether such tensors have the metadata that they had, checked in C; None where it cannot be.
    guard: Callable[..., bool] | None
    stages: Stages  # what became of the function, from its trace to what is saved
    region: TracedRegion  # what runs
    output: trees.Frame  # how the result is put together
    labels: tuple[str, ...]  # what messages call the operands
    written: tuple[int, ...]  # the places of operands that a call writes to
    #: Those of its buffers that a kernel changes without counting up their version.
    unseen: frozenset[int]
    streams: frozenset[str]  # the streams of registered trackers that it draws from
    #: The steps to each module with weights that torch's hooks make at each call.
    hooked: tuple[tuple[Step, ...], ...]
    #: The objects that are returned as they were given: places in `output`, and of the root.
    passed: tuple[tuple[int, int], ...]
    #: The trace with its sizes open; None if it holds for one set of sizes.
    template: Template | None
    #: Seconds that the trace took; None where one with open sizes was there already.
    trace_s: float | None
    #: When it was last looked up, as a count.
    used: int = dataclasses.field(default_factory=clock.__next__, init=False)
    _fast_path: Any = dataclasses.field(default=..., init=False, repr=False)

    def gather(self, roots: Roots) -> tuple[Tensor, ...] | None:
        """The captured tensors of some roots; None if the trace does not hold there."""
        if self.streams and not all(map(exists, self.streams)):
            return None
        tensors = self.covered.gather(roots)
        if not tensors or (self.guard is not None and self.guard(*tensors)):
            return tensors
        captured = self.region.operands[-len(tensors) :]
        layouts = [meta.layout for meta in captured]
        return tensors if [*map(layout_of, tensors)] == layouts else None

    def call_quietly(
        self, roots: Roots, tensors: Sequence[Tensor], numerics: Numerics
    ) -> Any:
        """`call` where no transform and no mode is active, and a gradient is wanted."""
        fast_path = self.fast_path(roots, numerics)
        if fast_path is None:
            return self.call(roots, tensors, numerics)
        call = Call(
            *(self.region, roots, numerics, self.labels),
            is_first_order=is_first_order(),
            fast_path=fast_path,
        )
        return self.result(run_fast(call, levels.unwrap_dead(tensors)), roots)

    @property
    def wants_gradient(self) -> bool:
        """Whether some operand is to be differentiated by plain autograd."""
        return any(meta.requires_grad for meta in self.region.operands)

    def fast_path(self, roots: Roots, numerics: Numerics) -> FastPath | None:
        """What runs for a call that wants a gradient, if it needs no more than one program.

        It is the same at every call: a trace holds for one set of switches.
        """
        if self._fast_path is ...:
            is_more = self.written or self.hooked
            # Without a guard some captured tensor may be wrapped.
            is_one_run = self.guard and self.wants_gradient and not is_more
            found = self.region.fast_path(roots, numerics) if is_one_run else None
            self._fast_path = found
        # What plain autograd is known to differentiate again is opened instead, at each call.
        return None if self.region.was_recorded else self._fast_path

    def call(self, roots: Roots, tensors: Sequence[Tensor], numerics: Numerics) -> Any:
        """Runs the region and writes changed buffers back, once."""
        call, given = Call(self.region, roots, numerics, self.labels), list(tensors)
        if self.written:
            require_apart(tensors, self.written, self.labels)
        for index in self.written:
            # The backward must find what the forward found.
            given[index] = opaque_copy(given[index])
        returned, mutations = bind_all(call, given)
        num_mutated = len(mutations)
        mutated, changed = self.written[:num_mutated], self.written[num_mutated:]
        for index, new in zip(mutated, mutations, strict=True):
            levels.write_back(tensors[index], new, unseen=index in self.unseen)
        count = len(returned) - len(changed)
        for place, new in zip(changed, returned[count:], strict=True):
            assert new is not None, "the copy of an argument is returned"
            tensors[place].copy_(new)
        if self.written:
            returned = self._with_changed(returned[:count], tensors)
        result = self.result(returned, roots)
        for way in self.hooked:
            refresh_hooked(way, roots)
        return result

    def result(self, returned: Sequence[Tensor | None], roots: Roots) -> Any:
        """What the function returns, put together; objects that it was given are the call's."""
        if not self.passed:
            return self.output.around(returned)
        statics = [*self.output.statics]
        for place, root in self.passed:
            statics[place] = roots[root]
        return dataclasses.replace(self.output, statics=tuple(statics)).around(returned)

    def _with_changed(
        self, returned: Sequence[Tensor | None], tensors: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """What is returned, of which parts are the tensors that were written to."""
        joint, views = self.stages.joint, self.region.every_view
        copies = [view.output for view in views[len(returned) :]]
        place_of = dict(zip(copies, joint.changed, strict=True))
        found: list[Tensor | None] = []
        for view, tensor in zip(views, returned, strict=False):
            if view.output is not None and view.output in place_of:
                own = dataclasses.replace(
                    view, output=None, operand=place_of[view.output]
                )
                found += make_views([own], (), tensors)
            elif view.operand in joint.mutated:
                changed = tensors[view.operand]
                is_view = view.path is not None
                found += make_views([view], (), tensors) if is_view else [changed]
            else:
                found.append(tensor)
        return found
