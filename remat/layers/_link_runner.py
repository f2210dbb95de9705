"""Runs a link; by its programs alone if neither a transform nor a mode is active.

A stack runs a link once for each stage, nearly always with tensors of the same metadata.
So the rules that apply, and the program of the gradients, are looked up once.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from torch import Tensor

from remat._graph.joint import View
from remat._programs.program import Quiet
from remat._regions.returned_views import make_views
from remat._regions.traced import TracedRegion
from remat._regions.waiting import resumed
from remat._switches.numerics import Numerics
from remat._torch import guards
from remat.layers._links import Link, add_gradients, sum_gradients, without_none

# The last stage gets the cotangent of the loss; the first may want no gradient.
_MOST_FOLLOWED = 4


class _BackwardProgram(NamedTuple):
    """A backward that is one program."""

    #: Whether cotangents have the metadata of those that it was derived for.
    check: Callable[..., bool]
    #: Which outputs had a cotangent, and which gradients are wanted.
    given: list[bool]
    wanted: tuple[bool, ...]
    numerics: Numerics
    #: From what is saved, the operands and cotangents, to the outputs.
    quiet: Quiet
    #: How the gradients are made; None where the outputs are them.
    views: tuple[View, ...] | None

    def __call__(
        self, saved: Sequence[Tensor], tensors: list[Tensor]
    ) -> list[Tensor | None]:
        with self.quiet.around():
            found = self.quiet.run([*saved, *tensors])
        if self.views is not None:
            found = make_views(self.views, found, tensors)
        rest = iter(found)
        return [next(rest) if each else None for each in self.wanted]


#: The latest backwards of each region.
_latest: weakref.WeakKeyDictionary[TracedRegion, tuple[_BackwardProgram, ...]] = (
    weakref.WeakKeyDictionary()
)


class _ForwardProgram(NamedTuple):
    """A forward that is one program; it gives outputs, new values of buffers, saved values."""

    quiet: Quiet
    num_outputs: int
    #: How many of what it gives are not saved.
    num_kept: int
    #: How what the link returns is made; None where the outputs are it.
    views: tuple[View, ...] | None

    def __call__(
        self, operands: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        with self.quiet.around():
            found = self.quiet.run([*resumed(operands)])
        returned = found[: self.num_outputs]
        if self.views is not None:
            made = make_views(self.views, returned, operands)
            returned = without_none(made)
        mutations = found[self.num_outputs : self.num_kept]
        return returned, mutations, found[self.num_kept :]


class _Flows(NamedTuple):
    """Where the cotangents of what a link returns go, if each goes somewhere unchanged.

    A target is an output of the region, or an operand, counted on from these; None for a
    cotangent that goes nowhere.
    """

    targets: tuple[int | None, ...]
    num_outputs: int
    num_operands: int

    def __call__(
        self, cotangents: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The cotangents of the outputs, and those that go straight to operands."""
        found: list[Tensor | None] = [None] * (self.num_outputs + self.num_operands)
        for target, each in zip(self.targets, cotangents, strict=True):
            if target is not None:
                found[target] = add_gradients(found[target], each)
        return found[: self.num_outputs], found[self.num_outputs :]


@final
class Runner:
    """Runs a link; `is_quiet` says that neither a transform nor a mode is active."""

    def __init__(self, link: Link, numerics: Numerics, is_quiet: bool) -> None:
        self._link = link
        self._numerics = numerics
        self._is_quiet = is_quiet
        latest = _latest.get(link.region, ()) if is_quiet else ()
        self._pulled = tuple(each for each in latest if each.numerics == numerics)

    def advance(self, operands: list[Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
        """What the link returns, and the new values of what it changes."""
        run = self._advances
        if run is None:
            return self._link.advance(operands, self._numerics)
        return run(operands)[:2]

    def record(
        self, operands: list[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor], list[Tensor]]:
        """What `advance` gives, and what the link's backward reads besides its operands."""
        run = self._records
        if run is None:
            return self._link.record(operands, self._numerics)
        return run(operands)

    def pull(
        self,
        saved: Sequence[Tensor],
        operands: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        wanted: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """The gradients of the operands, None where none is wanted or none comes."""
        if not self._is_direct:
            return self._link.pull(saved, operands, cotangents, wanted, self._numerics)
        flows, direct = self._flows, None
        outward = cotangents
        if flows is not None:
            outward, direct = flows(cotangents)
        there = without_none(outward)
        given = [each is not None for each in outward]
        for each in self._pulled:
            if each.given == given and each.wanted == wanted and each.check(*there):
                found = each(saved, [*resumed(operands), *there])
                return found if direct is None else sum_gradients(found, direct, wanted)
        self._learn(outward, wanted)
        return self._link.pull(saved, operands, cotangents, wanted, self._numerics)

    @functools.cached_property
    def _advances(self) -> _ForwardProgram | None:
        return self._alone(save=False)

    @functools.cached_property
    def _records(self) -> _ForwardProgram | None:
        return self._alone(save=True)

    def _alone(self, save: bool) -> _ForwardProgram | None:
        """The link's forward, if it needs no more than one program."""
        region, roots = self._link.region, self._link.roots
        if not self._is_quiet or region.inputs:
            return None
        forward = region.forward(roots, save)
        outputs, mutations, _, states = forward.shape
        if states or forward.untracked or not forward.is_alone:
            return None
        if not forward.numerics.are_met_by(self._numerics):
            return None
        views = region.views
        return _ForwardProgram(
            forward.program.quiet, outputs, outputs + mutations, views
        )

    @functools.cached_property
    def _flows(self) -> _Flows | None:
        """Where cotangents go that are not those of the outputs, one by one."""
        region, roots = self._link.region, self._link.roots
        views = region.views
        if views is None:
            return None
        flows = region.stages(roots).joint.differentiable
        targets = tuple(_target_of_cotangent(view, flows) for view in views)
        return _Flows(targets, len(flows), len(region.operands))

    @functools.cached_property
    def _is_direct(self) -> bool:
        """Whether all cotangents pass on unchanged, and at most two of them to one place."""
        if not self._is_quiet or self._records is None:
            return False
        views = self._link.region.views
        if views is None:
            return True
        assert self._flows is not None
        counts = Counter(self._flows.targets)
        # The sum of three depends on which two are added first.
        return all(view.path is None for view in views) and all(
            count <= 2 for target, count in counts.items() if target is not None
        )

    def _learn(
        self, cotangents: Sequence[Tensor | None], wanted: tuple[bool, ...]
    ) -> None:
        """Notes the backward for these cotangents, if it needs no more than one program."""
        link, there = self._link, without_none(cotangents)
        if not there or not any(wanted):
            return
        derived = link.derived(cotangents, wanted, self._numerics)
        forward = derived.forward(link.roots, save=False)
        is_met = forward.numerics.are_met_by(self._numerics)
        if not (forward.is_alone and is_met and all(map(guards.is_plain, there))):
            return
        check = guards.tensor_guard(there)
        given = [each is not None for each in cotangents]
        found = _BackwardProgram(
            check, given, wanted, self._numerics, forward.program.quiet, derived.views
        )
        others = self._pulled[: _MOST_FOLLOWED - 1]
        self._pulled = _latest[link.region] = (found, *others)


def _target_of_cotangent(view: View, flows: Sequence[bool]) -> int | None:
    """When a link runs backward, where the cotangent of a view's result goes: see `_Flows`."""
    if view.is_cut or view.is_detached:
        return None
    if view.output is not None:
        return view.output if flows[view.output] else None
    return None if view.operand is None else len(flows) + view.operand
