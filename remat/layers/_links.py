"""One stage of a stack: a traced region, and how to run it forward and backward."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from remat._calls.decorated import DecoratedFunction, RematModule
from remat._calls.entry import Entry
from remat._errors import ImplicitRandomnessError, MutationError, SideEffectError
from remat._graph.meta import TensorMeta, layout_of
from remat._regions.forwards import Forward, latest, make_views
from remat._regions.functions import Pull, Roots, pullback
from remat._regions.protocol import Asked, Call
from remat._regions.rules import bind_all, returned_by, run, without_none
from remat._regions.traced import TracedRegion
from remat._regions.waiting import resumed
from remat._switches.numerics import Numerics
from remat._torch import guards, isolation, levels
from remat._torch.fakes import fake_mode

_T = TypeVar("_T")


# Of each region the latest backwards: whether cotangents have the metadata of those that it
# was derived for; which there were, what was wanted, under which switches; its region.
_Followed = tuple[Callable[..., bool], tuple[Any, ...], TracedRegion]
_latest_backwards: weakref.WeakKeyDictionary[TracedRegion, tuple[_Followed, ...]] = (
    weakref.WeakKeyDictionary()
)


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
    found = _stage_stand_ins(tuple(metas))
    if not any(meta.is_cast_each_time for meta in metas):
        return [*found]
    # A trace around would take them for tensors of the user's.
    with isolation.isolated():
        pairs = zip(metas, found, strict=True)
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

    def laid(self, state: Sequence[Tensor]) -> list[Tensor]:
        """A state laid out as the stage was traced for."""
        pairs = zip(state, self.state, strict=True)
        return [relaid(each, meta.stride) for each, meta in pairs]

    def pull(
        self,
        saved: Sequence[Tensor],
        operands: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        wanted: tuple[bool, ...],
        under: Pass,
    ) -> list[Tensor | None]:
        """The gradients of the operands, None where none is wanted or none comes."""
        outward, direct = self._through_views(operands, cotangents)
        there = without_none(outward)
        pulled: list[Tensor | None] = [None] * len(operands)
        if there and any(wanted):
            region = self._derived(outward, wanted, under.numerics)
            returned, _, _ = under.run(self, region, [*saved, *operands, *there])
            found = iter(returned)
            pulled = [next(found) if each else None for each in wanted]
        return [
            add_gradients(one, other) if is_wanted else None
            for one, other, is_wanted in zip(pulled, direct, wanted, strict=True)
        ]

    def _derived(
        self,
        cotangents: Sequence[Tensor | None],
        wanted: tuple[bool, ...],
        numerics: Numerics,
    ) -> TracedRegion:
        """The region of the gradients that are wanted for these cotangents.

        Nearly every backward of a stage is like an earlier one. It takes less time to
        recognize it than to look it up by what is asked.
        """
        there = without_none(cotangents)
        given = [each is not None for each in cotangents]
        followed = _latest_backwards.get(self.region, ())
        for check, asked, region in followed:
            if asked == (given, wanted, numerics) and check(*there):
                return region
        layouts = tuple(
            None if each is None else layout_of(each) for each in cotangents
        )
        region = self.region.vjp(self.roots, Asked(layouts, wanted, 0, numerics))
        if guards.is_quiet() and all(map(guards.is_plain, there)):
            known = (guards.tensor_guard(there), (given, wanted, numerics), region)
            _latest_backwards[self.region] = latest(known, followed)
        return region

    def _through_views(
        self, operands: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The cotangents of the outputs, and those that go straight to operands."""
        joint = self.region.stages(self.roots).joint
        count, views = len(joint.outputs), self.region.every_view
        if self._targets is not None:
            found: list[Tensor | None] = [None] * (count + len(operands))
            for target, each in zip(self._targets, cotangents, strict=True):
                if target is not None:
                    found[target] = add_gradients(found[target], each)
            return found[:count], found[count:]

        def returned(tensors: Sequence[Tensor]) -> list[Tensor | None]:
            return make_views(views, tensors[:count], tensors[count:])

        # A view's derivative reads no numbers.
        metas = [
            dataclasses.replace(meta, requires_grad=False)
            for meta in joint.output_metas
        ]
        stand_ins = [each.empty() for each in metas]
        gradients = pull_back(returned, [*stand_ins, *operands], cotangents)
        outputs = [
            each if flows else None
            for each, flows in zip(gradients, joint.differentiable, strict=False)
        ]
        return outputs, gradients[count:]

    @functools.cached_property
    def _targets(self) -> list[int | None] | None:
        """Where each cotangent goes, if all pass on unchanged; else None.

        A target is an output of the region, or an operand, counted on from these; None for
        a cotangent that goes nowhere.
        """
        flows = self.region.stages(self.roots).joint.differentiable
        found: list[int | None] = []
        for view in self.region.every_view:
            target = None if view.operand is None else len(flows) + view.operand
            if view.output is not None and flows[view.output]:
                target = view.output
            found.append(None if view.is_cut or view.is_detached else target)
        # The sum of three depends on which two are added first.
        counts = Counter(target for target in found if target is not None)
        is_direct = all(view.path is None for view in self.region.every_view)
        return found if is_direct and max(counts.values(), default=0) <= 2 else None

    @property
    @once_a_region
    def dependent_outputs(self) -> tuple[int, ...]:
        """For each operand, as bits, which of the returned tensors depend on it."""
        joint, views = self.region.stages(self.roots).joint, self.region.every_view
        found = [0] * joint.num_operands
        returned_of = [0] * len(joint.outputs)
        for place, view in enumerate(views):
            if view.is_cut or view.is_detached:
                continue
            if view.operand is not None:
                found[view.operand] |= 1 << place
            if view.output is not None:
                returned_of[view.output] |= 1 << place
        # Of each value, as bits, the outputs whose cotangents it reads.
        there = [k for k, meta in enumerate(joint.layout) if meta is not None]
        read = dict(zip(joint.cotangents, (1 << k for k in there), strict=True))
        for index, value in enumerate(joint.graph.values):
            for use in value.uses:
                read[index] = read.get(index, 0) | read.get(use, 0)
        # A gradient that reads no cotangent is that of a constant: zeros for any of them.
        every = sum(1 << k for k in there)
        for operand, ref in enumerate(joint.gradients):
            outputs = 0 if ref is None else read.get(ref.index, 0) or every
            found[operand] |= united_bits(returned_of, outputs)
        return tuple(found)

    @once_a_region
    def returned(self) -> list[TensorMeta]:
        """The metadata of what the stage returns; `requires_grad` where gradients flow."""
        region, joint = self.region, self.region.stages(self.roots).joint
        with on_fakes(region.operands) as fakes, torch.no_grad():
            tensors, *_ = Pass(Numerics.current()).run(self, region, fakes)
            metas = [TensorMeta.of(each) for each in without_none(tensors)]
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


#: What the region's function returns, new values of operands, and what is saved.
_Ran = tuple[Sequence[Tensor | None], Sequence[Tensor], Sequence[Tensor]]
_Way = Callable[[Sequence[Tensor]], _Ran]


def link_of(
    region: DecoratedFunction[..., Any] | RematModule,
    args: tuple[Any, ...],
    num_state: int,
    captured: dict[Tensor, int],
) -> tuple[Link, Entry]:
    """A stage that can run several times, traced for arguments like these (or fake ones).

    `captured` has the place of each tensor that a stage of the stack captures; new ones
    come last.
    """
    where = f"a stage of a scheduled stack, {region!r}"
    try:
        entry, site, found = region.entry_of(args, {})
    except ImplicitRandomnessError as error:
        raise _stage_draws(where) from error
    if entry.region.num_draws:
        raise _stage_draws(where)
    if entry.hooked:
        raise SideEffectError.of(
            where=where,
            what="has a weight that a hook makes at each call, such as that of "
            "torch.nn.utils.spectral_norm.",
            why="A schedule runs a stage several times, and out of order.",
            do="Use torch.nn.utils.parametrizations, or leave the schedule out.",
        )
    places = tuple([captured.setdefault(each, len(captured)) for each in found])
    own = len(entry.labels) - len(places)
    joint = entry.stages.joint
    if joint.changed or any(index < own for index in joint.mutated):
        raise MutationError.of(
            where=where,
            what="changes its argument in place.",
            why="A schedule runs a stage several times, from the same input.",
            do="Write x = x + 1 instead of x += 1, or x = x.clone() first.",
        )
    written = tuple(places[index - own] for index in joint.mutated)
    link = Link(entry.region, site.roots, entry.labels, num_state, places, written)
    return link, entry


def _stage_draws(where: str) -> ImplicitRandomnessError:
    return ImplicitRandomnessError.of(
        where=where,
        what="draws from a generator.",
        why="A schedule runs a stage several times, and out of order.",
        do="Draw from keys (remat.random), or leave the schedule out: a chain of "
        'groups of layers ("Layers that draw" in docs/stacks.md) holds as little.',
    )


@final
class Pass:
    """What is the same for all stages that run one after the other.

    Nearly all are of one region, so how it is run is found out once: the Python of the
    rules would take as long as the operators of a small stage.
    """

    def __init__(self, numerics: Numerics) -> None:
        self.numerics = numerics
        self._is_quiet = guards.is_quiet() and not torch.is_grad_enabled()
        self._ways: dict[tuple[TracedRegion, bool], _Way] = {}

    def run(
        self,
        link: Link,
        region: TracedRegion,
        tensors: Sequence[Tensor],
        *,
        save: bool = False,
    ) -> _Ran:
        """Runs a link's region, or one derived from it; `save` for its backward to read."""
        way = self._ways.get((region, save))
        if way is None:
            call = Call(region, link.roots, self.numerics, link.labels)
            way = self._ways[region, save] = self._way(call, save)
        return way(tensors)

    def _way(self, call: Call, save: bool) -> _Way:
        """How to run a region: by its program, where a call is no more than that."""
        if self._is_quiet and not call.region.inputs:
            forward = call.region.forward(call.roots, save)
            assert isinstance(forward, Forward), "a link's region is traced"
            is_alone = forward.is_alone and not forward.untracked
            if is_alone and forward.numerics.are_met_by(self.numerics):
                return _run_by_program(call, forward)
        if not save:
            return lambda tensors: (*bind_all(call, tensors), ())

        def saving(tensors: Sequence[Tensor]) -> _Ran:
            results = run(call, tensors, save=True)
            returned = returned_by(call, results.outputs, tensors)
            return returned, results.mutations, results.saved

        return saving


def _run_by_program(call: Call, forward: Forward) -> _Way:
    quiet = forward.program.quiet
    num_outputs, num_mutations, num_saved, _ = forward.shape
    first_saved = num_outputs + num_mutations
    end = first_saved + num_saved

    def run(tensors: Sequence[Tensor]) -> _Ran:
        with quiet.around():
            found = quiet.run([*resumed(tensors)])
        returned = returned_by(call, found[:num_outputs], tensors)
        return returned, found[num_outputs:first_saved], found[first_saved:end]

    return run


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


def united_bits(bits: Sequence[int], places: int) -> int:
    """What of a link's operands or outputs, as bits, is at some places, bits themselves."""
    united = 0
    for place, each in enumerate(bits):
        if places >> place & 1:
            united |= each
    return united


def add_gradients(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two gradients of a link, None for none."""
    if one is None or other is None:
        return other if one is None else one
    return one + other
