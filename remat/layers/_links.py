"""One stage of a stack: a traced region, and how to run it forward and backward."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from remat._graph.joint import Joint
from remat._graph.meta import TensorMeta, layout_of
from remat._regions.protocol import Asked, Call
from remat._regions.retraceable import Roots
from remat._regions.returned_views import make_views
from remat._regions.rules import bind, bind_all, run_saving
from remat._regions.traced import TracedRegion
from remat._regions.transforms import Pull, pullback
from remat._switches.numerics import Numerics
from remat._torch import isolation, levels
from remat._torch.fakes import fake_mode

_T = TypeVar("_T")


def once_a_region(compute: Callable[[Link], _T]) -> Callable[[Link], _T]:
    """Remembers what is computed of a link for all links of its region."""
    known: weakref.WeakKeyDictionary[TracedRegion, _T] = weakref.WeakKeyDictionary()

    @functools.wraps(compute)
    def remembered(link: Link) -> _T:
        found = known.get(link.region)
        if found is None:
            found = known[link.region] = compute(link)
        return found

    return remembered


@contextmanager
def on_fakes(metas: Sequence[TensorMeta]) -> Generator[list[Tensor]]:
    """A link's stand-ins for tensors, and a context in which operators run without data."""
    home = metas[0].device if metas else torch.device("cpu")
    with isolation.isolated(), fake_mode(home):
        yield [meta.empty() for meta in metas]


def stand_ins(metas: Sequence[TensorMeta]) -> list[Tensor]:
    """Tensors without data by which a stage is looked up; read only."""
    if any(meta.placement is not None for meta in metas):
        with on_fakes(metas) as fakes:
            return fakes
    pairs = zip(metas, _stage_stand_ins(tuple(metas)), strict=True)
    return [meta.cast_alike(each) for meta, each in pairs]


# Entering a mode and making a tensor without data takes longer than a small stage.
@functools.lru_cache(maxsize=256)
def _stage_stand_ins(metas: tuple[TensorMeta, ...]) -> tuple[Tensor, ...]:
    with on_fakes(metas) as fakes:
        return tuple(fakes)


def dense_stride(meta: TensorMeta) -> tuple[int, ...]:
    """How a link's tensors lie: the strides of a pointwise result, without gaps or repeats.

    Expanded dimensions, whose stride carries no information, stay in place.
    """
    order: list[int] = []  # the fastest dimension first
    for dim in reversed(range(len(meta.shape))):
        place = len(order)
        for before in reversed(range(len(order))):
            one, other = meta.stride[order[before]], meta.stride[dim]
            if one and other and one < other:
                break
            if one and other and one > other:
                place = before
        order.insert(place, dim)
    found = [0] * len(meta.shape)
    step = 1
    for dim in order:
        found[dim] = step
        step *= max(meta.shape[dim], 1)
    return tuple(found)


def relaid(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A link's tensor with these dense strides; a copy only if it has others."""
    if tensor.stride() == stride:
        return tensor
    order = sorted(range(tensor.dim()), key=lambda dim: (-stride[dim], dim))
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def resolved(tensor: Tensor) -> Tensor:
    """A link's tensor with lazy conjugation and negation resolved."""
    return tensor.resolve_conj().resolve_neg()


def laid_densely(tensor: Tensor) -> Tensor:
    """A link's tensor without gaps or repeats in memory, in its own order of dimensions."""
    tensor = resolved(tensor)
    return relaid(tensor, dense_stride(TensorMeta.of(tensor)))


@final
@dataclasses.dataclass(frozen=True)
class Link:
    """A stage, traced."""

    #: It takes the state, slices of what is scanned over, and what the stage captures.
    region: TracedRegion
    roots: Roots
    #: What messages call the operands.
    labels: tuple[str, ...]
    #: Leaves of the state that it takes.
    num_state: int
    #: Where the stack keeps the tensors that it captures.
    captured: tuple[int, ...]
    #: Those of these places whose tensors it changes: its buffers.
    written: tuple[int, ...] = ()

    @property
    def state(self) -> tuple[TensorMeta, ...]:
        """The metadata of the state that it takes."""
        return self.region.operands[: self.num_state]

    @property
    def num_saved(self) -> int:
        """How many values wait for its backward when it is recorded."""
        return len(self.region.stages(self.roots).cut.saved)

    @functools.cached_property
    def _strides(self) -> list[tuple[int, ...]]:
        return [meta.stride for meta in self.state]

    def laid(self, state: list[Tensor]) -> list[Tensor]:
        """A state laid out as the stage was traced for."""
        strides = self._strides
        if [tensor.stride() for tensor in state] == strides:
            return state
        return [relaid(*each) for each in zip(state, strides, strict=True)]

    def advance(
        self, operands: Sequence[Tensor], numerics: Numerics
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """What the stage returns, and the new values of what it changes."""
        returned, mutations = bind_all(self._call(numerics), operands)
        return without_none(returned), mutations

    def record(
        self, operands: Sequence[Tensor], numerics: Numerics
    ) -> tuple[list[Tensor], Sequence[Tensor], list[Tensor]]:
        """What `advance` gives, and what the stage's backward reads besides its operands."""
        results = run_saving(self._call(numerics), operands)
        views, returned = self.region.views, [*results.outputs]
        if views is not None:
            returned = without_none(make_views(views, returned, operands))
        return returned, results.mutations, [*results.saved]

    def pull(
        self,
        saved: Sequence[Tensor],
        operands: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        wanted: tuple[bool, ...],
        numerics: Numerics,
    ) -> list[Tensor | None]:
        """The gradients of the operands, None where none is wanted or none comes."""
        direct: list[Tensor | None] = [None] * len(operands)
        if self.region.views is not None:
            cotangents, direct = self._through_views(operands, cotangents)
        pulled: list[Tensor | None] = [None] * len(operands)
        if any(each is not None for each in cotangents) and any(wanted):
            derived = self.derived(cotangents, wanted, numerics)
            call = Call(derived, self.roots, numerics, self.labels)
            found = iter(bind(call, [*saved, *operands, *without_none(cotangents)]))
            pulled = [next(found) if each else None for each in wanted]
        return sum_gradients(pulled, direct, wanted)

    def differentiable(self, wanted: Sequence[bool]) -> tuple[bool, ...]:
        """Which of the wanted gradients there are."""
        pairs = zip(wanted, self.region.operands, strict=True)
        return tuple(each and meta.requires_grad for each, meta in pairs)

    def derived(
        self,
        cotangents: Sequence[Tensor | None],
        wanted: tuple[bool, ...],
        numerics: Numerics,
    ) -> TracedRegion:
        """The region of the gradients that are wanted for these cotangents."""
        layouts = tuple(
            None if each is None else layout_of(each) for each in cotangents
        )
        return self.region.vjp(self.roots, Asked(layouts, wanted, 0, numerics))

    def _through_views(
        self, operands: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The cotangents of the outputs, and those that go straight to operands."""
        views = self.region.every_view
        metas = [
            dataclasses.replace(meta, requires_grad=False)
            for meta in self.region.stages(self.roots).joint.output_metas
        ]
        count = len(metas)

        def returned(tensors: Sequence[Tensor]) -> list[Tensor | None]:
            outputs, given = tensors[:count], tensors[count:]
            return make_views(views, outputs, given)

        # A view's derivative reads no numbers.
        stand_ins = [each.empty() for each in metas]
        gradients = pull_back(returned, [*stand_ins, *operands], cotangents)
        flows = self.region.stages(self.roots).joint.differentiable
        outputs = [
            each if flow else None for each, flow in zip(gradients, flows, strict=False)
        ]
        return outputs, gradients[count:]

    @property
    @once_a_region
    def dependent_outputs(self) -> tuple[int, ...]:
        """For each operand, as bits, which of the returned tensors depend on it."""
        joint = self.region.stages(self.roots).joint
        read_by = _outputs_of_gradients(joint)
        found = [0] * joint.num_operands
        for place, view in enumerate(self.region.every_view):
            if view.is_cut or view.is_detached:
                continue
            if view.operand is not None:
                found[view.operand] |= 1 << place
            for operand, outputs in enumerate(read_by):
                if view.output in outputs:
                    found[operand] |= 1 << place
        return tuple(found)

    @once_a_region
    def returned(self) -> list[TensorMeta]:
        """The metadata of what the stage returns; `requires_grad` where gradients flow."""
        region, joint = self.region, self.region.stages(self.roots).joint
        with on_fakes(region.operands) as fakes, torch.no_grad():
            tensors, _ = self.advance(fakes, Numerics.current())
            metas = [TensorMeta.of(each) for each in tensors]
        flows = [
            not (view.is_cut or view.is_detached)
            and (
                joint.differentiable[view.output]
                if view.output is not None
                else region.operands[view.operand or 0].requires_grad
            )
            for view in region.every_view
        ]
        return [
            dataclasses.replace(meta, requires_grad=flow and meta.is_differentiable)
            for meta, flow in zip(metas, flows, strict=True)
        ]

    def _call(self, numerics: Numerics) -> Call:
        return Call(self.region, self.roots, numerics, self.labels)


def _outputs_of_gradients(joint: Joint) -> list[set[int]]:
    """For each operand the outputs whose cotangents its gradient reads."""
    values, taken = joint.graph.values, iter(joint.cotangents)
    read: list[set[int]] = [set() for _ in values]
    for output, meta in enumerate(joint.layout):
        if meta is not None:
            read[next(taken)].add(output)
    for index, value in enumerate(values):
        read[index].update(*(read[use] for use in value.uses))
    every = {output for output, meta in enumerate(joint.layout) if meta is not None}
    # A gradient that reads no cotangent is that of a constant: zeros for any of them.
    return [
        set() if ref is None else read[ref.index] or every for ref in joint.gradients
    ]


def pull_back(
    function: Callable[[Sequence[Tensor]], Sequence[Any]],
    tensors: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of a link's function of tensors; None where none flows."""
    wanted = tuple(
        index
        for index, each in enumerate(tensors)
        if each.is_floating_point() or each.is_complex()
    )
    outputs = tuple(k for k, each in enumerate(cotangents) if each is not None)
    pull = pullback(function, Pull(outputs, wanted, len(tensors)), create_graph=False)
    leaves = [*tensors]
    if not levels.interpreter_is_active():
        for index in wanted:
            leaves[index] = leaves[index].detach().requires_grad_()
    with torch.enable_grad():
        found = iter(pull([*leaves, *without_none(cotangents)]))
    return [next(found) if k in wanted else None for k in range(len(tensors))]


def without_none(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors of a link that are not None."""
    return [each for each in tensors if each is not None]


def add_gradients(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two gradients of a link, None for none."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def sum_gradients(
    pulled: Sequence[Tensor | None],
    direct: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The wanted gradients of a link, each of two parts."""
    return [
        add_gradients(one, other) if is_wanted else None
        for one, other, is_wanted in zip(pulled, direct, wanted, strict=True)
    ]
