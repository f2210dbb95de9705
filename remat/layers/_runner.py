"""Runs a link: where neither a transform nor a mode is active, by its programs alone.

A stack runs a link as often as it has stages, nearly always with tensors of the same
metadata. Which rules apply, and which program gives these gradients, is asked once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from torch import Tensor

from remat import _compat
from remat._numerics import Numerics
from remat._program import Quiet
from remat._region import Region
from remat._waiting import resumed
from remat.layers._links import Link, present

# The last stage has the loss's cotangent, and the first has another layout or none to give.
_MOST_FOLLOWED = 4


class _Pulled(NamedTuple):
    """A backward that is one program.

    Attributes:
        check: whether cotangents have the metadata of those that it was for.
        given: which outputs had one.
        wanted: which gradients it gave.
        numerics: the switches under which it runs.
        quiet: from what is saved, the operands and cotangents, to the gradients.
    """

    check: Callable[..., bool]
    given: list[bool]
    wanted: tuple[bool, ...]
    numerics: Numerics
    quiet: Quiet


#: The latest backwards of each region.
_latest: weakref.WeakKeyDictionary[Region, tuple[_Pulled, ...]] = (
    weakref.WeakKeyDictionary()
)


class _Run(NamedTuple):
    """A forward that is one program.

    Attributes:
        quiet: the program.
        num_outputs: how many of what it gives are returned.
        num_kept: how many are these or new values of what the link changes; the rest is
            saved.
    """

    quiet: Quiet
    num_outputs: int
    num_kept: int

    def __call__(self, operands: list[Tensor]) -> list[Tensor]:
        with self.quiet.around():
            return self.quiet.run([*resumed(operands)])


@final
class Runner:
    """Runs a link.

    Args:
        link: what is run.
        numerics: the switches that are in force.
        is_quiet: whether neither a transform nor a mode is active.
    """

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
        found = run(operands)
        return found[: run.num_outputs], found[run.num_outputs :]

    def record(
        self, operands: list[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor], list[Tensor]]:
        """The same, and what the link's backward reads beyond its operands."""
        run = self._records
        if run is None:
            return self._link.record(operands, self._numerics)
        found = run(operands)
        first, last = run.num_outputs, run.num_kept
        return found[:first], found[first:last], found[last:]

    def pull(
        self,
        saved: Sequence[Tensor],
        operands: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        wanted: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """The gradients of the operands, None where none is wanted or none comes."""
        there = present(cotangents)
        given = [each is not None for each in cotangents]
        for each in self._pulled:
            if each.given == given and each.wanted == wanted and each.check(*there):
                with each.quiet.around():
                    found = each.quiet.run([*saved, *resumed(operands), *there])
                rest = iter(found)
                return [next(rest) if is_wanted else None for is_wanted in wanted]
        self._learn(cotangents, wanted)
        return self._link.pull(saved, operands, cotangents, wanted, self._numerics)

    @functools.cached_property
    def _advances(self) -> _Run | None:
        return self._alone(save=False)

    @functools.cached_property
    def _records(self) -> _Run | None:
        return self._alone(save=True)

    def _alone(self, save: bool) -> _Run | None:
        """The link's forward, if a program is all that it comes to."""
        region, roots = self._link.region, self._link.roots
        if not self._is_quiet or region.inputs or region.views(roots) is not None:
            return None
        forward = region.forward(roots, save)
        outputs, mutations, _, states = forward.shape
        if states or not forward.is_alone:
            return None
        if not forward.numerics.are_met_by(self._numerics):
            return None
        return _Run(forward.program.quiet, outputs, outputs + mutations)

    def _learn(
        self, cotangents: Sequence[Tensor | None], wanted: tuple[bool, ...]
    ) -> None:
        """Notes the backward for these cotangents, if a program is all that it comes to."""
        link, there = self._link, present(cotangents)
        if self._records is None or not there or not any(wanted):
            return
        program = link.derived(cotangents, wanted, self._numerics).program
        if program is None or not all(map(_compat.is_plain, there)):
            return
        check = _compat.tensor_guard(there)
        given = [each is not None for each in cotangents]
        found = _Pulled(check, given, wanted, self._numerics, program.quiet)
        others = self._pulled[: _MOST_FOLLOWED - 1]
        self._pulled = _latest[link.region] = (found, *others)
