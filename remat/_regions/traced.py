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

Each of these is traced when it is first needed, then kept; `_regions.rules` decides what is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, final

from remat._graph.values import TensorMeta, is_open, named
from remat._partition.analysis import Analysis, analyze
from remat._partition.budgets import decisions as decisions_of
from remat._partition.cut import Cut, cut, permitted_members
from remat._partition.halves import forward_graph
from remat._partition.permission import decide_of_operands
from remat._programs.program import Program
from remat._regions.derived import (
    DerivedForward,
    Kept,
    are_outputs,
    backward_given,
    found_again,
    mapped_given,
    mapped_in_parts,
    placements_of,
    require_parts,
    state_metas,
)
from remat._regions.fast_path import FastPath
from remat._regions.forwards import Calls, Forward
from remat._regions.function import Function, Roots
from remat._regions.functions import (
    Batch,
    Pull,
    mapped,
    pullback,
    pushforward,
    with_pushforward,
)
from remat._regions.protocol import Asked, Batched, Pushed
from remat._regions.pushing import Tangents, moved_outputs, push, tangent_metas
from remat._switches.numerics import Numerics
from remat._torch import tracer
from remat._tracing.trace import Joint, Request, View, with_states
from remat.policies import AbstractPolicy, Save, nothing_saveable
from remat.policies._planned import for_derived
from remat.storage import AbstractStorage, Keep

_FORWARDS = ("forward", "forward that saves")


@final
class TracedRegion:
    """One function at one signature; see the module's docstring."""

    def __init__(
        self,
        function: Function,
        operands: tuple[TensorMeta, ...],
        policy: AbstractPolicy,
        *,
        joints: tuple[Joint, ...] = (),
        given: DerivedForward | None = None,
        states: tuple[int, ...] = (),
        verify: bool = False,
        inputs: Mapping[int, AbstractStorage] = MappingProxyType({}),
        calls: Calls | None = None,
    ) -> None:
        """Makes a region; nothing is traced yet.

        Args:
            function: what the region computes.
            operands: the metadata of what it takes.
            policy: what its backward may find saved.
            joints: its joint graphs, where they are known already.
            given: its forward, if it was made from another region's program; else None.
            states: which operands are generator states for its draws, in order.
            verify: whether the backward compares saved values with recomputed ones.
            inputs: the operands that do not wait as they are, and their storages.
            calls: numbers the calls of the function; those of its derivatives too.
        """
        self.verify = verify
        self.inputs = inputs
        self.calls = calls or Calls()
        self.function = function
        self.operands = operands
        self.policy = policy
        self.given = given
        self.states = states
        self.program: Program | None = None
        self._latest: tuple[Asked, TracedRegion] | None = None
        self._made: dict[Any, Any] = {}
        # Inside a trace with open sizes its operands' sizes are symbols.
        self._is_open = any(map(is_open, operands))
        if joints:
            self._made["joints"] = joints

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if self._is_open:
            key = named(key)
        found = self._made.get(key)
        if found is None:
            # Two threads may both make it; the first result is kept.
            found = self._made.setdefault(key, make())
        return found

    def joint(self, roots: Roots) -> Joint:
        """The joint graph for cotangents laid out like the outputs."""
        return self._joints(roots)[0]

    def _joints(self, roots: Roots) -> tuple[Joint, ...]:
        return self._once("joints", lambda: self._trace(roots, None, None))

    def _light(self, roots: Roots) -> Joint:
        """The forward alone, or a joint graph if there is one already."""
        if "joints" in self._made:
            return self._made["joints"][0]
        return self._once(
            "light", lambda: self._trace(roots, None, None, gradients=False)[0]
        )

    def _trace(
        self,
        roots: Roots,
        layout: tuple[TensorMeta | None, ...] | None,
        numerics: Numerics | None,
        *,
        gradients: bool = True,
    ) -> tuple[Joint, ...]:
        request = Request(
            self.function.build(roots),
            self.operands,
            layout,
            backward_numerics=numerics,
            gradients=gradients,
        )
        with (
            tracer.one_trace_at_a_time(),
            self.function.restored(roots),
            self.function.numerics.applied(),
        ):
            joints = self.function.joints(request)
        return tuple(with_states(joint, self.states) for joint in joints)

    def analysis(self, roots: Roots) -> Analysis:
        """The joint graph with its classes."""
        return self._once("analysis", lambda: analyze(self.joint(roots)))

    def decisions(self, roots: Roots) -> dict[int, Save]:
        """What the policy permits, by class."""
        return self._once(
            "decisions", lambda: decisions_of(self.analysis(roots), self.policy)
        )

    def store_named_operands(self, roots: Roots) -> None:
        """Stores the operands for which the policy names a storage.

        For an operand that `saved_inputs` names too, the storage of `saved_inputs` is used.
        """
        named = decide_of_operands(self.analysis(roots), self.policy)
        storages = {index: answer.storage for index, answer in named.items()}
        found = {k: each for k, each in storages.items() if not each.keeps}
        self.inputs = {**found, **self.inputs}

    def cut(self, roots: Roots) -> Cut:
        """What is saved, and what the backward runs."""
        return self._once("cut", lambda: self._cut(roots))

    def _cut(self, roots: Roots) -> Cut:
        analysis = self.analysis(roots)
        # A forward that was given returns fixed values: nothing else can be saved.
        permitted = {} if self.given else self.decisions(roots)
        members = permitted_members(analysis, permitted)
        return cut(analysis, members, analysis.joint.gradients)

    def forward(self, roots: Roots, save: bool) -> Forward:
        """The forward; if `save`, its results include what the backward will read."""
        if self.given is not None:
            return self.given.forward
        key = _FORWARDS[save]
        return self._made.get(key) or self._once(
            key, lambda: self._forward(roots, save)
        )

    def _forward(self, roots: Roots, save: bool) -> Forward:
        saved = self.cut(roots).saved if save else ()
        joint = self.joint(roots) if save else self._light(roots)
        if not save:
            joint = dataclasses.replace(joint, states=())
        graph, untracked = forward_graph(joint, saved)
        shape = (
            len(joint.outputs),
            len(joint.mutations),
            len(saved),
            len(joint.states),
        )
        return Forward(
            Program(graph, "forward", self.function.backend),
            shape,
            self.function.numerics,
            flows=None if all(joint.differentiable) else joint.differentiable,
            untracked=untracked,
            storages=self.storages(roots) if save else (),
            calls=self.calls.saved,
            placements=placements_of(joint, self.operands),
        )

    def is_spread(self, roots: Roots) -> bool:
        """Whether some operand or output is a DTensor that is not taken as a whole."""
        return self._spread(roots) is not None

    def _spread(self, roots: Roots) -> tuple[Any, ...] | None:
        if self.given is not None:
            return self.given.forward.placements
        return placements_of(self._light(roots), self.operands)

    def storages(self, roots: Roots) -> tuple[AbstractStorage, ...]:
        """How each saved value waits; empty if all are kept as they are."""
        analysis, decisions = self.analysis(roots), self.decisions(roots)
        found = tuple(
            decisions[analysis.numbers[analysis.roots[index]]].storage
            for index in self.cut(roots).saved
        )
        return () if all(each.keeps for each in found) else found

    @property
    def num_leading(self) -> int:
        """How many tensors the forward reads before the operands."""
        return 0 if self.given is None else self.given.forward.num_leading

    @property
    def keeps(self) -> bool:
        """Whether the backward reads what the forward saved, not only its operands."""
        return self.given is None

    @property
    def runs_first(self) -> bool:
        """Whether only a run tells which operands the outputs depend on: here the trace does."""
        return False

    def views(self, roots: Roots) -> tuple[View, ...] | None:
        """How each returned tensor is made; None if the outputs are what is returned."""
        found = self._made.get("views", ...)
        if found is ...:
            every = self.every_view(roots)
            found = None if are_outputs(every) else every
            self._made["views"] = found
        return found

    def every_view(self, roots: Roots) -> tuple[View, ...]:
        """How each tensor that the function returns is made from the outputs and operands."""
        return self._light(roots).views if self.given is None else self.given.views

    def fast_path(self, roots: Roots, numerics: Numerics) -> FastPath | None:
        """The forward that saves, if a call needs no more than to run its program."""
        found = self._made.get("fast_path", ...)
        if found is ...:
            forward = self.forward(roots, save=True)
            found = None
            if forward.is_one_run and not self.inputs:
                found = FastPath(forward, self.views(roots))
            self._made["fast_path"] = found
        if found is None or not found.numerics.are_met_by(numerics):
            return None
        return found

    def num_draws(self, roots: Roots) -> int:
        """How many generator states the forward records."""
        if self.given is not None:
            return self.given.forward.shape[3]
        return len(self._light(roots).states)

    def chosen(self, roots: Roots) -> tuple[int, ...]:
        """Which of the tensors that the function returns are the outputs."""
        whole = {
            view.output: index
            for index, view in reversed(list(enumerate(self.every_view(roots))))
            if view.output is not None and view.path is None
        }
        if self.given is None:
            return self._light(roots).chosen
        return tuple(whole[output] for output in range(self.given.forward.shape[0]))

    def vjp(self, roots: Roots, asked: Asked) -> TracedRegion:
        """The region of the gradients of what is wanted.

        It is differentiable only with respect to the cotangents that require grad. Some
        operators' backwards are not differentiable there, and they seldom have to be.

        Its operands: this region's, the generator states, the cotangents. What this
        region saved comes before them.
        """
        if self._is_open:
            return self._once(asked, lambda: self._vjp(roots, asked))
        latest = self._latest
        if latest is not None and latest[0] == asked:
            return latest[1]
        found = self._once(asked, lambda: self._vjp(roots, asked))
        self._latest = (asked, found)
        return found

    def _vjp(self, roots: Roots, asked: Asked) -> TracedRegion:
        if not self.is_spread(roots):
            asked = asked.taken_whole()
        require_parts(self._spread(roots) or (), asked)
        still = asked.without_gradients()
        given, states = self._once(
            ("backward", still), lambda: self._backward(roots, still)
        )
        cotangents = [meta for meta in asked.cotangents if meta is not None]
        derived = TracedRegion(
            self._pulled_back(roots, asked),
            (*self.operands, *states, *cotangents),
            nothing_saveable,
            given=given,
            states=self._states_after(asked.num_states),
            inputs=self.inputs,
            calls=self.calls,
        )
        forward = given.forward
        if (
            forward.verification is None
            and forward.placements is None
            and not self.inputs
            and not self.storages(roots)
            and forward.numerics.are_met_by(asked.numerics)
            and are_outputs(given.views)
        ):
            derived.program = forward.program
        return derived

    def _backward(
        self, roots: Roots, asked: Asked
    ) -> tuple[DerivedForward, list[TensorMeta]]:
        """The backward program, and the metadata of the generator states it takes."""
        analysis, saved = self._backward_analysis(
            roots, asked.cotangents, asked.numerics
        )
        kept = Kept(
            analysis, saved, self.storages(roots) or (Keep(),) * len(saved), self.verify
        )
        given = backward_given(self.function, self.operands, kept, asked)
        return given, state_metas(analysis)

    def _states_after(self, num_states: int) -> tuple[int, ...]:
        count = len(self.operands)
        return self.states or tuple(range(count, count + num_states))

    def _pulled_back(self, roots: Roots, asked: Asked) -> Function:
        chosen = self.chosen(roots)
        pull = Pull(
            tuple(
                chosen[k] for k, each in enumerate(asked.layouts) if each is not None
            ),
            tuple(index for index, each in enumerate(asked.wanted) if each),
            len(self.operands),
        )
        return self.function.derive(lambda f: pullback(f, pull), "vjp", pull)

    def _backward_analysis(
        self,
        roots: Roots,
        cotangents: tuple[TensorMeta | None, ...],
        numerics: Numerics,
    ) -> tuple[Analysis, tuple[int, ...]]:
        """The joint graph for these cotangents, and where in it the saved values are.

        What is saved was settled by the forward, for cotangents laid out like outputs.
        """
        analysis, saved = self.analysis(roots), self.cut(roots).saved
        if numerics.autocast == ():
            for joint in self._joints(roots):
                if joint.layout == cotangents:
                    return dataclasses.replace(analysis, joint=joint), saved
        again = analyze(self._trace(roots, cotangents, numerics)[0])
        return again, found_again(analysis, again, saved)

    def jvp(
        self, roots: Roots, has_tangent: tuple[bool, ...], num_states: int
    ) -> tuple[TracedRegion, tuple[int, ...]]:
        """The region of the outputs' tangents, and which outputs have one.

        Its operands: this region's, `num_states` generator states, the tangents.
        """
        return self._once(
            ("jvp", has_tangent, num_states),
            lambda: self._jvp(roots, has_tangent, num_states),
        )

    def _jvp(
        self, roots: Roots, has_tangent: tuple[bool, ...], num_states: int
    ) -> tuple[TracedRegion, tuple[int, ...]]:
        chosen = self.chosen(roots)
        moved = moved_outputs(self.forward(roots, save=False))
        outputs = tuple(chosen[index] for index in moved)
        states = state_metas(self.analysis(roots)) if num_states else []
        operands = (
            *self.operands,
            *states,
            *tangent_metas(self.operands, has_tangent),
        )
        region = TracedRegion(
            self.function.derive(
                lambda f: pushforward(f, outputs, has_tangent),
                *("jvp", outputs, has_tangent),
            ),
            operands,
            for_derived(self.policy),
            states=self._states_after(num_states),
            calls=self.calls,
        )
        return region, moved

    def pushed(self, roots: Roots, has_tangent: tuple[bool, ...], save: bool) -> Pushed:
        """The region of the outputs and, after these, the tangents of some of them.

        Its operands: this region's, the tangents.
        """
        return self._once(
            ("pushed", has_tangent, save),
            lambda: self._pushed(roots, has_tangent, save),
        )

    def _pushed(
        self, roots: Roots, has_tangent: tuple[bool, ...], save: bool
    ) -> Pushed:
        chosen = self.chosen(roots)
        moved = moved_outputs(self.forward(roots, save=False))
        given = None
        if moved and (save or self.given is not None):
            given = self._pushed_forward(roots, has_tangent, save)
        region = TracedRegion(
            self.function.derive(
                lambda f: with_pushforward(f, chosen, moved, has_tangent),
                *("values and jvp", chosen, moved, has_tangent),
            ),
            (*self.operands, *tangent_metas(self.operands, has_tangent)),
            nothing_saveable if given else for_derived(self.policy),
            given=given,
            states=self.states,
            verify=self.verify and given is None,
            inputs=self.inputs,
            calls=self.calls,
        )
        return Pushed(region, moved)

    def _pushed_forward(
        self, roots: Roots, has_tangent: tuple[bool, ...], save: bool
    ) -> DerivedForward:
        forward = self.forward(roots, save)
        num_states = forward.shape[3]
        region = self.jvp(roots, has_tangent, num_states)[0]
        tangents = Tangents(
            region.forward(roots, save=False),
            region.every_view(roots),
            len(self.operands),
            num_states,
        )
        origins = self.given.origins if self.given else None
        return DerivedForward(*push(forward, tangents, origins), origins)

    def batched(self, roots: Roots, batch: Batch, save: bool) -> Batched:
        """The region of the mapped function, over the physical tensors."""
        return self._once(
            ("batched", batch, save), lambda: self._batched(roots, batch, save)
        )

    def mapped_whole(self, batch: Batch) -> TracedRegion:
        """The region of the mapped function, each result mapped over its first dimension.

        Unlike the region of `batched`, it returns views too, and takes physical tensors.
        """
        return self._once(("whole", batch), lambda: self._mapped_whole(batch))

    def _mapped_whole(self, batch: Batch) -> TracedRegion:
        function = self._mapped(None, batch, 0)
        return TracedRegion(function, batch.metas, self.policy, calls=self.calls)

    def _mapped(
        self,
        outputs: tuple[int, ...] | None,
        batch: Batch,
        skip: int,
        *,
        are_apart: bool = False,
    ) -> Function:
        size, randomness, dims = batch.size, batch.randomness, batch.dims
        return self.function.derive(
            lambda f: mapped(f, outputs, batch, skip, are_apart=are_apart),
            *("vmap", outputs, size, randomness, dims, skip, are_apart),
        )

    def _batched(self, roots: Roots, batch: Batch, save: bool) -> Batched:
        chosen = self.chosen(roots)
        if self.is_spread(roots):
            raise mapped_in_parts()
        if self.given is None and not save:
            # Reverse mode is taken below this level: the policy sees batched values.
            function = self._mapped(chosen, batch, 0)
            region = TracedRegion(
                function,
                batch.metas,
                for_derived(self.policy),
                states=self.states,
                inputs=self.inputs,
                calls=self.calls,
            )
            written = [operand for operand, _ in region._light(roots).mutations]
            dims = [0] * len(chosen) + [batch.dims[operand] for operand in written]
            return Batched(region, tuple(dims))
        forward = self.forward(roots, save)
        skip = forward.num_leading
        given, dims = mapped_given(forward, batch)
        region = TracedRegion(
            self._mapped(chosen, batch, skip, are_apart=True),
            batch.metas[skip:],
            nothing_saveable,
            given=given,
            states=self.states,
            inputs=self.inputs,
            calls=self.calls,
        )
        return Batched(region, dims)
