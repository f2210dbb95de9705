"""A stack of links: which tensors go into each, and what comes out of all.

Its operands are the leaves of the first state, what is scanned over (stacked), and the tensors
that the links capture. Its outputs are the leaves of the last state, and the other results of
the links, stacked.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Self, TypeVar, final

import torch
from torch import Tensor

from remat._graph.meta import TensorMeta
from remat._regions.functions import Batch, mapped
from remat._regions.rules import without_none
from remat._tracing.trace import Flat
from remat.layers._links import Link, dense_stride, on_fakes, united_bits

_T = TypeVar("_T")


@final
@dataclasses.dataclass(frozen=True)
class Stack:
    """Links in the order in which they run."""

    links: Sequence[Link]
    #: Leaves of the first state, tensors that are scanned over, other results of a link.
    num_state: int
    num_slices: int = 0
    num_rows: int = 0
    #: The metadata of what the stack takes.
    operands: tuple[TensorMeta, ...] = ()
    #: Whether the first stage takes the last slice.
    is_reversed: bool = False
    #: Makes the first state and what is scanned over from what was given; None if it is that.
    enter: Flat | None = None

    @functools.cached_property
    def written(self) -> tuple[int, ...]:
        """Which operands the links change: their buffers, each changed by one link."""
        places = [place for link in self.links for place in link.written]
        return tuple(self.num_entered + place for place in places)

    @property
    def num_entered(self) -> int:
        """How many operands come before those that are captured."""
        return self.num_state + self.num_slices

    def entered(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The first state and what is scanned over."""
        given = operands[: self.num_entered]
        return [*given] if self.enter is None else without_none(self.enter(given))

    def place(self, stage: int) -> int:
        """Which slice a stage takes."""
        return len(self.links) - 1 - stage if self.is_reversed else stage

    def parted(self, returned: Sequence[_T]) -> tuple[list[_T], list[_T]]:
        """The state among what a link or the stack returns, and the other results."""
        count = len(returned) - self.num_rows
        return [*returned[:count]], [*returned[count:]]

    def dependent_outputs(self) -> tuple[int, ...]:
        """For each operand, as bits, the outputs that may depend on it."""
        found = [0] * len(self.operands)
        # From the last stage back: which outputs rest on each leaf of its state.
        outputs = [1 << place for place, _ in enumerate(self.links[-1].returned())]
        state, rows = self.parted(outputs)
        behind: tuple[Link | None, list[int]] = None, []
        for link in reversed(self.links):
            if link is behind[0] and state == behind[1]:
                continue  # It would find what the stage behind it found, and change nothing.
            behind = link, state
            bits = [united_bits([*state, *rows], k) for k in link.dependent_outputs]
            state, others = bits[: link.num_state], bits[link.num_state :]
            captured = [self.num_entered + place for place in link.captured]
            places = [*range(self.num_state, self.num_entered), *captured]
            for place, each in zip(places, others, strict=True):
                found[place] |= each
        found[: self.num_state] = state
        return tuple(
            each if meta.requires_grad else 0
            for each, meta in zip(found, self.operands, strict=True)
        )

    def batched(self, batch: Batch) -> Self:
        """The stack of the mapped links, over physical tensors.

        Each link is mapped, not the stack: gradients of captured tensors are summed
        within the backward of each stage, as in plain reverse mode over vmap.
        """
        enter, count = self._entering(batch), self.num_entered
        with on_fakes(batch.metas) as fakes:
            scanned = without_none(enter(fakes[:count]))[self.num_state :]
            parts = [TensorMeta.of(each.unbind(0)[0]) for each in scanned]

        def mapped_link(link: Link) -> Link:
            entering = [_with_batch(meta, batch.size) for meta in link.state] + parts
            captured = [count + place for place in link.captured]
            dims = (*[0] * len(entering), *(batch.dims[k] for k in captured))
            metas = (*entering, *(batch.metas[k] for k in captured))
            own = batch._replace(dims=dims, metas=metas)
            region = link.region.mapped_whole(link.roots, own)
            return dataclasses.replace(link, region=region)

        links = {id(link): mapped_link(link) for link in self.links}
        return dataclasses.replace(
            self,
            links=[links[id(link)] for link in self.links],
            operands=batch.metas,
            enter=enter,
        )

    def _entering(self, batch: Batch) -> Flat:
        count = self.num_entered
        entering = batch._replace(dims=batch.dims[:count], metas=batch.metas[:count])
        over = mapped(self.enter or list, None, entering, 0)

        def enter(given: Sequence[Tensor]) -> Sequence[Tensor]:
            entered = without_none(over(given))
            scanned = [each.movedim(0, 1) for each in entered[self.num_state :]]
            return [*entered[: self.num_state], *scanned]

        return enter


def slices_of(
    scanned: Sequence[Tensor], count: int, is_reversed: bool
) -> list[tuple[Tensor, ...]]:
    """The slices of each stage; made at once, or the backward would be quadratic."""
    if not scanned:
        return [()] * count
    found = [*zip(*(each.unbind(0) for each in scanned), strict=True)]
    return found[::-1] if is_reversed else found


def stacked_rows(rows: Sequence[Sequence[Tensor]], is_reversed: bool) -> list[Tensor]:
    """The other results of the stages, one row each, in the order of the slices."""
    order = reversed(rows) if is_reversed else rows
    return [torch.stack(column) for column in zip(*order, strict=True)]


def _with_batch(meta: TensorMeta, size: int) -> TensorMeta:
    """A dense tensor's metadata with a dimension before all others."""
    stride = dense_stride(meta)
    numel = max(int(torch.Size(meta.shape).numel()), 1)
    return dataclasses.replace(meta, shape=(size, *meta.shape), stride=(numel, *stride))
