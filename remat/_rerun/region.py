"""The region of `engine="rerun"`: it has no programs, and runs a Python function each time.

The same rules hold as for traced regions (`_regions.rules`): derivatives are regions again, made from
the pullback, the pushforward or the map of the function, and each runs the function again on
its operands.

A run records a graph for autograd and throws it away, as the backward does, so that
kernels that look at `requires_grad` choose alike in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from remat._graph.joint import View
from remat._regions import functions
from remat._regions.forwards import Results
from remat._regions.functions import Batch, Pull, Roots
from remat._regions.protocol import Asked, Batched, WithoutProgram
from remat._rerun import fully_shard
from remat._rerun.dependence import dependent_outputs, guard_against_others, held_leaves
from remat._rerun.state import RunState
from remat._switches.numerics import Numerics
from remat._torch import autograd, isolation, levels, modes
from remat._tracing.trace import Flat


@final
@dataclasses.dataclass(frozen=True)
class Rerun(WithoutProgram):
    """A region without programs."""

    run: Flat  # what the forward runs
    function: Flat  # the same, differentiable: derivatives are made from it
    #: For each tensor that it takes whether it is differentiated.
    requires_grad: tuple[bool, ...]
    state: RunState  # what is put back around each run
    #: How what it returns is made from the outputs; None means they are it. Those of gradients
    #: are told anew by each run.
    views: Sequence[View] | None = None
    #: Whether every output has a gradient, whatever a run's graph says.
    all_flow: bool = False
    #: Whether it returns what the user's function does, or that in tangents or mapped: what
    #: `state.dependent_outputs` tells of. Gradients rest on others.
    is_primal: bool = True
    num_leading: int = 0  # nothing comes before the operands

    # Without annotations, so that these are no fields. The forward saves nothing.
    keeps = False
    policy_text = "engine='rerun'"
    is_derivative = False

    @property
    def num_draws(self) -> int:
        """At least one if the function may draw."""
        return int(self.state.draws)

    def reached(self, roots: Roots) -> tuple[bool, ...] | None:
        """For gradients: no gradient of theirs comes back to what no output depends on either."""
        rests = self.state.dependent_outputs
        if self.runs_first or rests is None:
            return None
        return (*map(bool, rests), *(True for _ in self.requires_grad[len(rests) :]))

    @property
    def runs_first(self) -> bool:
        """Whether a run tells what the outputs depend on: that of gradients leaves no graph."""
        return not self.all_flow

    def forward(
        self, roots: Roots, save: bool
    ) -> Callable[[Sequence[Tensor], Numerics], Results]:
        """Runs the function on tensors that no transform has wrapped."""

        def run(tensors: Sequence[Tensor], _: Numerics) -> Results:
            with (
                modes.torch_function_as(self.state.torch_functions),
                isolation.without_inference_mode(),
            ):
                leaves = [
                    autograd.leaf_of(tensor).requires_grad_(wanted)
                    for tensor, wanted in zip(tensors, self.requires_grad, strict=True)
                ]
                with self.state.around(), torch.enable_grad():
                    # None, which `Flat` allows, is not an output: `_rerun_with_zeros`, `_Result`.
                    outputs = [each for each in self.run(leaves) if each is not None]
            bits = dependent_outputs(
                outputs, leaves, self.state.engine, self.state.made
            )
            guard_against_others(leaves, accumulates=self.state.engine is not None)
            if self.state.dependent_outputs is None and self.is_primal:
                self.state.dependent_outputs = bits
            with modes.unseen_by_traces():
                found = [each.detach() for each in outputs]
            if self.all_flow:
                return Results(found)
            flows = tuple(each.requires_grad for each in outputs)
            return Results(found, flows=flows, reached=tuple(map(bool, bits)))

        return run

    def vjp(self, roots: Roots, asked: Asked) -> Rerun:
        """The region of the gradients; an operand that no output depends on has none."""
        outputs = tuple(k for k, meta in enumerate(asked.layouts) if meta is not None)
        wanted = [index for index, each in enumerate(asked.wanted) if each]
        rests = self.state.dependent_outputs if self.is_primal else None
        pulled = sum(1 << index for index in outputs)
        # What follows the operands, such as tangents, is always reached.
        unreached = {k for k, each in enumerate(rests or ()) if not each & pulled}
        given = [index for index in wanted if index not in unreached]
        others = [k for k, each in enumerate(self.requires_grad) if each]
        tracked = tuple(k for k in others if k not in given)
        pull = Pull(outputs, tuple(given), len(self.requires_grad), tracked)
        # Under create_graph torch uses other formulas, which are not the same to the bit.
        grad = self.state.gradients()
        first = functions.pullback(self.function, pull, create_graph=False, grad=grad)
        again = functions.pullback(self.function, pull, grad=grad)
        engine = self.state.engine
        if engine and engine.called:
            first = _accumulating(self.function, pull, engine)
            again = fully_shard.refuse_second_derivative
        views = [View(given.index(k)) if k in given else _NO_VIEW for k in wanted]
        return Rerun(
            _rerun_with_zeros(first, pull, views),
            _rerun_with_zeros(again, pull, views),
            (*self.requires_grad, *(True for _ in pull.outputs)),
            self.state,
            views=views,
            all_flow=True,
            is_primal=False,
        )

    def jvp(
        self, roots: Roots, has_tangent: tuple[bool, ...], num_states: int
    ) -> tuple[Rerun, None]:
        differentiated = [k for k, each in enumerate(self.requires_grad) if each]
        pushed = functions.pushforward(self.function, None, has_tangent, differentiated)
        wanted = (*self.requires_grad, *(True for has in has_tangent if has))
        return Rerun(pushed, pushed, wanted, self.state, is_primal=self.is_primal), None

    def batched(self, roots: Roots, batch: Batch, save: bool) -> Batched:
        # This is how torch runs a function if reverse mode is taken per example.
        wanted = [index for index, each in enumerate(self.requires_grad) if each]
        function = functions.tracked(self.function, wanted) if save else self.function
        dims: list[int | None] | None = None
        if any(dim is not None for dim in batch.dims):
            over = functions.mapped(function, None, batch, 0)
        else:
            dims = []
            over = _drawing_apart(function, batch, dims)
        region = Rerun(
            over, over, self.requires_grad, self.state, is_primal=self.is_primal
        )
        return Batched(region, dims)


def rerun_of(
    function: Flat, requires_grad: tuple[bool, ...], dependent_outputs: tuple[int, ...]
) -> Rerun:
    """The region of a flat function that changes nothing and draws from keys alone.

    Regions that the function binds stay regions. For each tensor that it takes: whether it is
    differentiated, and the outputs that depend on it, a bit for each.
    """
    state = RunState((), ())
    state.dependent_outputs = dependent_outputs
    return Rerun(function, function, requires_grad, state)


def _drawing_apart(function: Flat, batch: Batch, dims: list[int | None]) -> Flat:
    """The map of a function that each example gives the same, and that may draw for each.

    Each run notes which results are mapped, by their first dimension: those that depend on draws.
    """

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        def of(*operands: Tensor) -> tuple[Tensor, ...]:
            return tuple(each for each in function(operands) if each is not None)

        over = levels.restore_vmap(of, batch.dims, batch.size, batch.randomness)
        found, found_dims = over(*tensors)
        dims[:] = [None if dim is None else 0 for dim in found_dims]
        pairs = zip(found, found_dims, strict=True)
        return [each if dim is None else each.movedim(dim, 0) for each, dim in pairs]

    return run


_NO_VIEW = View(is_detached=True)


def _rerun_with_zeros(function: Flat, pull: Pull, views: list[View]) -> Flat:
    """Each run gives zeros where a gradient is None, and notes in `views` that it is."""
    whole = (*views,)

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        found = function(tensors)
        views[:] = [
            _NO_VIEW if view.output is None or found[view.output] is None else view
            for view in whole
        ]
        return [
            torch.zeros_like(tensors[index]) if gradient is None else gradient
            for index, gradient in zip(pull.wanted, found, strict=True)
        ]

    return run


def _accumulating(function: Flat, pull: Pull, engine: fully_shard.Engine) -> Flat:
    """(operands, ..., cotangents) -> the gradients, by a backward inside a backward.

    It leaves the gradients of gathered parameters where the engine's hooks look for them.
    """

    def gradients(tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        given = tensors[len(tensors) - len(pull.outputs) :]
        accumulates = engine.accumulates(given)
        operands = tensors[: pull.num_operands]
        wanted = [operands[index] for index in pull.wanted]
        outputs = [each for each in function(operands) if each is not None]
        pairs = [
            (outputs[index], cotangent.detach())
            for index, cotangent in zip(pull.outputs, given, strict=True)
            if outputs[index].requires_grad
        ]
        differentiable = [output for output, _ in pairs]
        inputs = [each for each in wanted if each.requires_grad]
        if accumulates:
            met = (variable for variable, _ in held_leaves(differentiable))
            inputs += filter(engine.stands_for, met)
        if pairs and inputs:
            autograd.backward(differentiable, [each for _, each in pairs], inputs)
        return [leaf.grad for leaf in wanted]

    return gradients
