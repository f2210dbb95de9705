"""A region: one function at one signature, its programs, and the regions derived from it.

The derivatives of a region are regions again:

- `vjp`: (saved, operands, states, cotangents) -> gradients, run by the backward program.
  `torch.func.grad` records every backward in case somebody differentiates it. Because the
  backward is a region too, that record saves its operands alone, and memory falls. The
  derivative of the backward is traced only if asked for, from the function's pullback.
- `jvp`: (operands, states, tangents) -> tangents, the region of the pushforward.
- `pushed`: (operands, tangents) -> outputs and their tangents, in one program. If reverse
  mode is taken above, its forward is the region's own, merged with that of the tangents.
- `batched`: the region of the mapped function. If reverse mode is taken per example, its
  forward is the per-example program, mapped.

A derived region is compiled when it is first needed, then kept; `_regions.rules` decides what is
needed. Nothing of the user's is kept: what has to trace takes the roots of the call that needs it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, cast, final

from remat._graph.joint import Joint
from remat._graph.meta import TensorMeta, is_open, without_symbols
from remat._partition.analysis import Analysis
from remat._partition.cut import forward_graph
from remat._partition.stages import Stages
from remat._programs.program import Program
from remat._regions.by_rules import batched_by_rules, needs_rules
from remat._regions.derived_forwards import (
    Saved,
    analysis_for,
    are_identity_views,
    backward_forward,
    backward_from_operands,
    has_derivative,
    mapped_forward,
    mapped_in_parts,
    moved_outputs,
    pushed_forward,
    require_parts,
    takes_functions,
    tangent_metas,
)
from remat._regions.forwards import Calls, FastPath, Forward, placements_of
from remat._regions.functions import (
    Batch,
    Function,
    Pull,
    Roots,
    if_derivable,
    interpreted,
    mapped,
    pullback,
    pushforward,
    tracked,
)
from remat._regions.opening import (
    is_differentiated_alike,
    may_read_constants,
    operands_of,
    reads_constants,
    unmapped_outputs,
    with_ends,
)
from remat._regions.protocol import Asked, Batched, Opened, Pushed
from remat._switches.numerics import Numerics
from remat._tracing.trace import Flat, require_states
from remat.policies import AbstractPolicy, nothing_saveable
from remat.policies._budget import for_derived
from remat.storage import AbstractStorage, Keep

_Make = TypeVar("_Make", bound=Callable[..., Any])
_UNKNOWN: Any = object()  # what was made may be None


def _once(make: _Make) -> _Make:
    """A method of a region that runs once for whatever it is asked, `roots` aside."""

    @functools.wraps(make)
    def derived(self: TracedRegion, roots: Roots, *args: Any, **kwargs: Any) -> Any:
        # Arguments are passed in the order of the parameters, by name or not.
        key = (make.__name__, *args, *kwargs.values())
        # Inside a trace with open sizes a key holds symbols, which cannot be hashed.
        place = without_symbols(key) if self.is_open else key
        found = self.derived.get(place, _UNKNOWN)
        if found is _UNKNOWN:
            # Two threads may both make it; the first result is kept.
            return self.derived.setdefault(place, make(self, roots, *args, **kwargs))
        return found

    return cast("_Make", derived)


@final
@dataclasses.dataclass(eq=False, repr=False)
class TracedRegion:
    """One function at one signature; see the module's docstring.

    Attributes:
        policy_above: the policy of the region that its forward was made from, or its own.
        given: its forward, if it was made from another region's program; else None.
        is_derivative: whether reports call it the derivative of the function.
        keeps: whether the backward reads what the forward saved, not only its operands.
        num_leading: how many tensors the forward reads before the operands.
        num_draws: how many generator states the forward records.
        placements: how outputs and mutations are spread, as DTensors; None if nothing is one.
        chosen: which of the tensors that the function returns are the outputs.
        every_view: how each returned tensor is made from the outputs and operands.
        views: the same; None if the outputs are what is returned.
        held_apart: what waits for its backward outside of autograd: nothing.
        runs_first: whether only a run tells what the outputs depend on: here the trace does.
        is_open: whether a size of an operand is a symbol of a running trace.
        rules: where a user's `autograd.Function` has a rule of its own for vmap, as in `Joint`.
        was_recorded: whether plain autograd has recorded a backward of it (`create_graph=True`).
        derived: what was made of it so far, by what makes it and what was asked.
    """

    function: Function  # what the region computes
    operands: tuple[TensorMeta, ...]  # the metadata of what it takes
    policy: AbstractPolicy  # what its backward may find saved
    #: What is known of it: all stages, a given forward, or a trace, which may lack a backward.
    origin: Stages | Forward | tuple[Joint, ...]
    _: dataclasses.KW_ONLY
    #: Which operands are generator states for its draws, in order.
    states: tuple[int, ...] = ()
    #: Whether the backward compares saved values with recomputed ones.
    verify: bool = False
    #: The operands that do not wait as they are, and their storages.
    inputs: Mapping[int, AbstractStorage] = dataclasses.field(
        default_factory=dict[int, AbstractStorage]
    )
    #: Numbers the calls of the function; those of its derivatives too.
    calls: Calls = dataclasses.field(default_factory=Calls)
    #: The region whose program its forward was made from; None if none was.
    made_from: TracedRegion | None = None
    is_opened: bool = False  # whether it is that region's program itself
    #: Whether it is made from a backward that may take values from the one before.
    is_borrowing: bool = False

    # Without annotations, so that these are no fields.
    held_apart = ()
    runs_first = False

    def __post_init__(self) -> None:
        origin, above = self.origin, self.made_from
        opened = above if self.is_opened else None
        self.policy_above: AbstractPolicy = above.policy_above if above else self.policy
        self.given = origin if isinstance(origin, Forward) else None
        self.keeps = self.given is None
        self._stages = origin if isinstance(origin, Stages) else None
        self._joints: tuple[Joint, ...] = ()
        if isinstance(origin, Forward):
            self.is_derivative = True
            self.is_borrowing = origin.program.is_borrowing
            self.num_leading, self.num_draws = origin.num_leading, origin.shape[3]
            self.placements = origin.placements
            self.chosen, self.every_view = origin.chosen, origin.views
            self.rules = origin.program.rules
        else:
            self._joints = origin.joints if isinstance(origin, Stages) else origin
            outline = self._joints[0]
            self.is_derivative = opened is not None and opened.is_derivative
            self.num_leading, self.num_draws = 0, len(outline.states)
            self.placements = placements_of(outline, self.operands)
            self.chosen, self.every_view = outline.chosen, outline.views
            self.rules = outline.rules
        self.views = None if are_identity_views(self.every_view) else self.every_view
        self.is_open = any(map(is_open, self.operands))
        templates = None if self.is_open else self.function.templates
        self._recorded = set[Hashable]() if templates is None else templates.recorded
        self.was_recorded = self.function.key in self._recorded
        self.derived: dict[Hashable, Any] = {}

    def stages(self, roots: Roots) -> Stages:
        """What became of the function, stage by stage, where reverse mode is wanted."""
        if self._stages is None:
            joints = self._joints
            if not any(ref for joint in joints for ref in joint.gradients):
                joints = self.function.traced(roots, self.operands, self.states)
            # A forward that was given returns fixed values: nothing else can be saved.
            self._stages = Stages.of(joints, None if self.given else self.policy)
        return self._stages

    @_once
    def forward(self, roots: Roots, save: bool) -> Forward:
        """The forward; if `save`, its results include what the backward will read.

        Where an operator has no derivative nothing is saved: as in torch, the backward raises.
        """
        if self.given is not None:
            return self.given
        stages = if_derivable(lambda: self.stages(roots)) if save else None
        if stages is None:
            joint, saved = dataclasses.replace(self._joints[0], states=()), ()
        else:
            joint, saved = stages.joint, stages.cut.saved
        graph, untracked = forward_graph(joint, saved)
        program = Program(
            *(graph, "forward", self.function.backend),
            is_borrowing=self.is_borrowing,
            is_custom=joint.is_custom,
            rules=joint.rules,
            policies=joint.policies | {self.policy_above},
        )
        return Forward(
            program,
            (len(joint.outputs), len(joint.mutations), len(saved), len(joint.states)),
            self.function.numerics,
            flows=None if all(joint.differentiable) else joint.differentiable,
            untracked=untracked,
            storages=() if stages is None else stages.storages,
            calls=self.calls.saved,
            placements=placements_of(joint, self.operands),
        )

    @_once
    def reached(self, roots: Roots) -> tuple[bool, ...] | None:
        """Whether a gradient comes back to each operand; None if to all, as far as is known.

        That some level differentiates an operand is known, not which: another one records nothing for
        what is only read under `no_grad`.
        """
        if self.given is not None:
            # Its operands begin with those of the region that it was made from.
            above = self.made_from and self.made_from.reached(roots)
            return above and (*above, *(True for _ in self.operands[len(above) :]))
        stages = if_derivable(lambda: self.stages(roots))
        if stages is None or stages.joint.is_custom:
            return None
        return tuple(ref is not None for ref in stages.joint.gradients)

    @property
    def policy_text(self) -> str:
        """Its policy as code, or what a report calls it in place of one."""
        return repr(self.policy)

    @property
    def explained(self) -> TracedRegion | None:
        """Itself; None for a derivative, which has run some operators again by then."""
        return None if self.is_derivative else self

    def one_program(self, roots: Roots, numerics: Numerics) -> Forward | None:
        """The forward that saves, if a call under these switches is one run of its program."""
        forward = self.forward(roots, save=True)
        is_met = forward.numerics.are_met_by(numerics)
        return forward if is_met and forward.is_one_program else None

    def fast_path(self, roots: Roots, numerics: Numerics) -> FastPath | None:
        """The forward that saves, if a call needs no more than to run its program."""
        # The backwards that one remembers take values from others, or all do not.
        path = self._fast_path(roots, self.was_recorded)
        return path if path and path.numerics.are_met_by(numerics) else None

    @_once
    def _fast_path(self, roots: Roots, _is_borrowing: bool) -> FastPath | None:
        forward = self.forward(roots, save=True)
        if forward.num_leading or self.inputs or not forward.is_one_program:
            return None
        pairs = zip(self.operands, self.reached(roots) or (), strict=False)
        reaches_all = all(each or not meta.requires_grad for meta, each in pairs)
        return FastPath.of(forward, self.views, reaches_all=reaches_all)

    @_once
    def opened(
        self, roots: Roots, wants: tuple[bool, ...], has_tangent: tuple[bool, ...]
    ) -> Opened | None:
        """The region of the program that saves, which a level below differentiates.

        It takes what that program reads and returns all that it computes, so that saved values have
        gradients and tangents of their own between forward and backward, and the policy is asked
        about both. None where the program may have other derivatives.
        """
        if not self.is_transparent(roots, any(has_tangent)):
            return None
        forward, policy = self.forward(roots, save=True), self.policy_above
        program, (num_outputs, _, num_saved, _) = forward.program, forward.shape
        if self.keeps and not num_saved:
            return Opened(self, None)
        outputs = program.graph.outputs
        waiting = {*outputs[num_outputs:]}
        alone = frozenset(k for k in range(num_outputs) if outputs[k] not in waiting)
        graph = with_ends(program.graph, forward.flows or (True,) * num_outputs)
        function = self.function.of_program(graph)
        operands = operands_of(program.graph, wants)
        gradients = any(meta.requires_grad for meta in operands)

        def opened() -> Opened:
            region = TracedRegion(
                function,
                operands,
                for_derived(policy),
                function.traced(roots, operands, (), gradients=gradients),
                calls=self.calls,
                made_from=self,
                is_opened=True,
                is_borrowing=self.is_borrowing,
            )
            if any(has_tangent):
                region.pushed(roots, has_tangent, save=False)
            return Opened(region, num_outputs, alone)

        return if_derivable(opened)

    @_once
    def shows_saved(self, roots: Roots) -> bool:
        """Whether all that its backward reads beside the operands is returned, too.

        A function may return a value detached that waits with a gradient. A program may not: what
        it returns without a gradient, as indices and the means of norms, has none.
        """
        forward = self.forward(roots, save=True)
        num_outputs, num_mutations, num_saved, _ = forward.shape
        found, first = forward.program.graph.outputs, num_outputs + num_mutations
        flows = (not self.is_opened and forward.flows) or (True,) * num_outputs
        shown = set(itertools.compress(found, flows))
        return forward.is_alone and shown.issuperset(found[first : first + num_saved])

    def note_recorded(self, roots: Roots) -> bool:
        """Notes that plain autograd records a backward, and so opens the calls from now on.

        Returns whether what the backward reads has gradients of its own: autograd knows of a value
        that waits, and is an output too, how it came about.
        """
        self.was_recorded = True
        self._recorded.add(self.function.key)
        return self.shows_saved(roots)

    @_once
    def recorded(self, roots: Roots) -> TracedRegion:
        """The region to call where its gradients are differentiated again.

        Itself, but where these read numbers that torch gives no derivative. That one has other
        gradients, by the formulas that torch takes for gradients to be differentiated.
        """
        function, operands = self.function, self.operands
        if self.given is not None or function.is_recorded:
            return self
        graph = self.forward(roots, save=False).program.graph
        if not may_read_constants(graph, operands):
            return self
        stages = if_derivable(lambda: self.stages(roots))
        if stages is None or not reads_constants(function, roots, operands, stages):
            return self
        again = function.recorded()
        joints = if_derivable(lambda: again.traced(roots, operands, self.states))
        if joints is None:
            return self
        found = dataclasses.replace(self, function=again, origin=joints)
        return found if found.is_transparent(roots, True) else self

    @_once
    def saving_nothing(self, roots: Roots) -> TracedRegion:
        """The region whose backward reads operands alone, whatever the policy says."""
        if not self.forward(roots, save=True).shape[2]:
            return self
        joints = self.stages(roots).joints
        return dataclasses.replace(self, policy=nothing_saveable, origin=joints)

    @_once
    def is_transparent(self, roots: Roots, is_pushed: bool) -> bool:
        """Whether its programs have the derivatives of the function, in forward mode or without."""
        if self.made_from is not None and not self.is_opened:
            return self.made_from.is_transparent(roots, is_pushed)
        function, operands = self.function, self.operands
        if function.is_program:
            graph = self.forward(roots, save=False).program.graph
            if not may_read_constants(graph, operands):
                return True
        stages = if_derivable(lambda: self.stages(roots))
        if stages is None:
            return False
        if not function.is_program:
            is_more = self.states or self.inputs or self.verify or self.is_open
            known = function, roots, operands, self.forward(roots, save=True)
            policy = for_derived(self.policy)
            if is_more or not is_differentiated_alike(
                *known, stages, policy, is_pushed=is_pushed
            ):
                return False
        return not reads_constants(function, roots, operands, stages)

    @_once
    def vjp(self, roots: Roots, asked: Asked) -> TracedRegion:
        """The region: saved values, operands, generator states, cotangents -> the wanted gradients.

        It is differentiable only with respect to the cotangents that require grad. Some operators'
        backwards are not differentiable there, and they seldom have to be.
        """
        if self.placements is None:
            asked = asked.taken_whole()
        require_parts(self.placements or (), asked)
        forward, states = self._backward(roots, asked.without_gradients())
        cotangents = [meta for meta in asked.cotangents if meta is not None]
        outputs = tuple(itertools.compress(self.chosen, asked.layouts))
        wanted = tuple(index for index, each in enumerate(asked.wanted) if each)
        pull = Pull(outputs, wanted, len(self.operands))
        function = self._pulled_back(roots, asked, pull)
        operands = (*self.operands, *states, *cotangents)
        return self.derive(function, operands, forward, asked.num_states)

    def _pulled_back(self, roots: Roots, asked: Asked, pull: Pull) -> Function:
        """The function of the gradients; a program, where torch's own backward has no derivative."""
        function = self.function.derive(lambda f: pullback(f, pull), "vjp", pull)
        if not takes_functions(self.forward(roots, save=False).program.graph):
            return function

        def build(roots: Roots) -> Flat:
            analysis = self._analysis(roots, asked.without_gradients())[0]
            graph = backward_from_operands(analysis, asked.wanted)
            is_alike = has_derivative(graph) and self.is_transparent(roots, False)
            return interpreted(graph) if is_alike else function.build(roots)

        return dataclasses.replace(function, build=build)

    def derive(
        self,
        function: Function,
        operands: tuple[TensorMeta, ...],
        origin: Forward | tuple[Joint, ...],
        num_states: int = 0,
        *,
        verify: bool = False,
    ) -> TracedRegion:
        """A region derived from this one, by a program that was made from this one's or anew.

        Its operands begin with this region's, and `num_states` generator states if these have none.
        """
        is_made = isinstance(origin, Forward)
        return TracedRegion(
            function,
            operands,
            nothing_saveable if is_made else for_derived(self.policy),
            origin,
            states=self._states_after(num_states),
            verify=verify,
            inputs=self.inputs,
            calls=self.calls,
            made_from=self if is_made else None,
            is_borrowing=self.is_borrowing,
        )

    @_once
    def _backward(self, roots: Roots, asked: Asked) -> tuple[Forward, list[TensorMeta]]:
        """The backward program, and the metadata of the generator states it takes."""
        if not (self.function.key or self.function.is_program):
            self.calls.note(asked.cotangents == self.stages(roots).joint.layout)
        analysis, saved = self._analysis(roots, asked)
        require_states(asked.num_states, analysis.joint)
        stages = if_derivable(lambda: self.stages(roots))
        storages = (stages and stages.storages) or (Keep(),) * len(saved)
        kept = Saved(analysis, saved, storages, self.verify)
        given = backward_forward(self.function, self.operands, kept, asked)
        return given, analysis.joint.state_metas

    def _analysis(self, roots: Roots, asked: Asked) -> tuple[Analysis, tuple[int, ...]]:
        """The joint graph of a backward, and where in it the saved values are."""
        # Of what lacks a derivative, what has a cotangent may have one.
        stages = if_derivable(lambda: self.stages(roots))
        return analysis_for(
            stages,
            asked,
            lambda: self.function.traced(
                *(roots, self.operands, self.states),
                cotangents=asked.cotangents,
                backward_numerics=asked.numerics,
            ),
        )

    @property
    def _differentiated(self) -> tuple[int, ...]:
        """The operands that require grad where the region is called."""
        return tuple(k for k, meta in enumerate(self.operands) if meta.requires_grad)

    def _states_after(self, num_states: int) -> tuple[int, ...]:
        count = len(self.operands)
        return self.states or tuple(range(count, count + num_states))

    @_once
    def jvp(
        self,
        roots: Roots,
        has_tangent: tuple[bool, ...],
        num_states: int,
        moved: tuple[int, ...] | None = None,
    ) -> tuple[TracedRegion, tuple[int, ...]]:
        """The region: operands, generator states, tangents -> the tangents of these outputs.

        Of all that can have one unless told otherwise, zeros included.
        """
        if moved is None:
            moved = moved_outputs(self.forward(roots, save=False))
        if not moved:
            return self, moved  # there is no tangent to compute
        outputs = tuple(self.chosen[index] for index in moved)
        recorded = self.stages(roots).joint.state_metas if num_states else []
        tangents = tangent_metas(self.operands, has_tangent)
        operands = (*self.operands, *recorded, *tangents)
        function = self.function.derive(
            lambda f: pushforward(f, outputs, has_tangent, self._differentiated),
            *("jvp", outputs, has_tangent, self._differentiated),
        )
        states = self._states_after(num_states)
        joints = function.traced(roots, operands, states, gradients=False)
        policy = for_derived(self.policy)
        region = TracedRegion(
            function, operands, policy, joints, states=states, calls=self.calls
        )
        return region, moved

    @_once
    def pushed(self, roots: Roots, has_tangent: tuple[bool, ...], save: bool) -> Pushed:
        """The region of the outputs and then their tangents; it takes operands, then tangents."""
        chosen = self.chosen
        moved = moved_outputs(self.forward(roots, save=False), has_tangent)
        if not moved:
            # Views of operands carry the operands' own tangents: nothing runs.
            return Pushed(self, moved)
        function = self.function.derive(
            lambda f: pushforward(
                *(f, chosen, has_tangent, self._differentiated),
                moved=moved,
                with_values=True,
            ),
            *("values and jvp", chosen, moved, has_tangent, self._differentiated),
        )
        operands = (*self.operands, *tangent_metas(self.operands, has_tangent))
        is_given = save or not self.keeps
        if is_given:
            forward = self.forward(roots, save)
            below = self.jvp(roots, has_tangent, forward.shape[3], moved)[0]
            tangents = below.forward(roots, save=False)
            origin = pushed_forward(forward, tangents, below.every_view)
        else:
            strict = self.is_opened and bool(self._differentiated)
            origin = function.outline(roots, operands, self.states, strict=strict)
        verify = self.verify and not is_given
        return Pushed(self.derive(function, operands, origin, verify=verify), moved)

    @_once
    def batched(self, roots: Roots, batch: Batch, save: bool) -> Batched:
        """The region of the mapped function, over the physical tensors."""
        if self.placements is not None:
            raise mapped_in_parts()
        if self.keeps and not save:
            return self._batched_below(roots, batch)
        forward = self.forward(roots, save)
        skip = forward.num_leading
        if needs_rules(forward, batch):
            return batched_by_rules(self, roots, batch, forward)
        given, dims = mapped_forward(forward, batch)
        unmapped = frozenset(k for k in range(forward.shape[0]) if dims[k] is None)
        function = self.mapped_function(
            *(roots, self.chosen, batch, skip), are_apart=True, unmapped=unmapped
        )
        return Batched(self.derive(function, batch.metas[skip:], given), dims)

    def _batched_below(self, roots: Roots, batch: Batch) -> Batched:
        """Where reverse mode is taken below the map: the policy sees batched values."""
        graph = self.forward(roots, save=False).program.graph
        unmapped = unmapped_outputs(graph, len(self.chosen), batch.dims)
        function = self.mapped_function(roots, self.chosen, batch, 0, unmapped=unmapped)
        joints = function.outline(roots, batch.metas, self.states)
        region = self.derive(function, batch.metas, joints)
        dims = [None if k in unmapped else 0 for k in range(len(self.chosen))]
        return Batched(region, (*dims, *(batch.dims[k] for k in joints[0].mutated)))

    @_once
    def mapped_whole(self, roots: Roots, batch: Batch) -> TracedRegion:
        """The region of the mapped function that returns views too, all mapped over dimension 0."""
        function = self.mapped_function(roots, None, batch, 0)
        joints = function.traced(roots, batch.metas, ())
        return TracedRegion(
            function, batch.metas, self.policy, joints, calls=self.calls
        )

    def mapped_function(
        self,
        roots: Roots,
        outputs: tuple[int, ...] | None,
        batch: Batch,
        skip: int,
        *,
        are_apart: bool = False,
        unmapped: frozenset[int] = frozenset(),
    ) -> Function:
        size, randomness, dims = batch.size, batch.randomness, batch.dims
        kinds = (skip, are_apart, unmapped)
        # torch maps operators that take functions, and has no rule for them below a map.
        graph = self.forward(roots, save=False).program.graph
        is_whole = self.function.is_program or takes_functions(graph)
        wanted = self._differentiated if batch.is_tracked and not is_whole else ()
        return self.function.derive(
            lambda f: mapped(tracked(f, wanted), outputs, batch, *kinds),
            *("vmap", outputs, size, randomness, dims, *kinds, wanted),
        )
